"""Find slow nodes before a run, in the job's script: python slurm/measure.py OUTPUT [flags of training.main]

On every node, one process per GPU measures
- loader: samples/s of the training loader, all processes of the node together;
- all_reduce: GB/s of all-reduce between this node and a neighbour, 2 (W - 1) / W * bytes / seconds for their W
  processes, with NCCL on GPUs and gloo on CPUs. A pair is as slow as its slower node, so each node is measured with two
  neighbours and keeps the better value.
Prints the medians, each node below SLOW of one, and each node without an answer; writes all values to OUTPUT. Ends
within PREFLIGHT_SECONDS (180) and never with an error, so it cannot stop the run.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

#: Share of the median below which a node is slow.
SLOW = 0.8
UNITS = {"loader": "samples/s", "all_reduce": "GB/s"}
#: Seconds of the loader to skip, because of prefetched batches, and to measure.
WARM, MEASURED = 2.0, 5.0
#: Bytes to reduce, and number of repetitions.
BYTES = {"gloo": 2**23, "nccl": 2**28}
TIMES = 8
#: Share of the time in which nodes must answer, and seconds that a pair waits in the first round; more in later rounds,
#: in which the other node may still wait for a third.
GATHER, PATIENCE = 0.4, 15
#: Node -> process -> answers.
Answers = dict[str, dict[str, dict[str, Any]]]


# --- in the job's script ---------------------------------------------------------------------------------------------
def rounds(count: int) -> list[list[tuple[int, int]]]:
    """Return pairs of `count` nodes for each round: neighbours on a ring, so each node of three or more meets two."""
    pairs = [(node, (node + 1) % count) for node in range(count if count > 2 else count - 1)]
    last = [pairs.pop()] if count > 2 and count % 2 else []
    return [part for part in (pairs[0::2], pairs[1::2], last) if part]


def slow(measured: dict[str, dict[str, float]]) -> tuple[dict[str, float], dict[str, list[str]]]:
    """Return (medians, slow values of each slow node). measured: values of each node by name."""
    medians = {
        name: statistics.median(have)
        for name in UNITS
        if (have := [node[name] for node in measured.values() if name in node])
    }
    found = {
        node: [
            f"{name} {value:.4g} {UNITS[name]}, {value / medians[name]:.0%} of the median"
            for name, value in values.items()
            if value < SLOW * medians[name]
        ]
        for node, values in measured.items()
    }
    return medians, {node: words for node, words in found.items() if words}


def joined(answers: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Combine the values of a node's processes: loaders are added; an all-reduce already covers all processes."""
    found = {}
    if rates := [answer["loader"] for answer in answers.values() if "loader" in answer]:
        found["loader"] = sum(rates)
    if speeds := [speed for answer in answers.values() for speed in answer.get("all_reduce", {}).values()]:
        found["all_reduce"] = max(speeds)
    return found


def collect(store: Any, nodes: Sequence[str], processes: int) -> Answers:
    """Collect the answers so far of the processes of each node."""
    found: Answers = {}
    for number, node in enumerate(nodes):
        keys = [f"{number}/{local}/{name}" for local in range(processes) for name in (*UNITS, "error")]
        for key in (key for key in keys if store.check([key])):
            _, local, name = key.split("/")
            found.setdefault(node, {}).setdefault(local, {})[name] = json.loads(store.get(key))
    return found


def conduct(store: Any, step: subprocess.Popen, counts: tuple[int, int], seconds: float) -> None:
    """Wait for the nodes, publish the list of nodes present after GATHER * seconds, and wait until they are done.

    counts: nodes, and processes per node.
    """
    start, present = time.monotonic(), None

    def all_have(name: str, among: Sequence[int]) -> bool:
        return all(store.check([f"{node}/{local}/{name}"]) for node in among for local in range(counts[1]))

    while step.poll() is None and time.monotonic() - start < seconds:
        if present is None:
            here = [node for node in range(counts[0]) if all_have("here", [node])]
            if len(here) == counts[0] or time.monotonic() - start > GATHER * seconds:
                store.set("present", json.dumps(here))
                present = here
        elif all_have("done", present):
            break
        time.sleep(0.2)


def report(nodes: Sequence[str], answers: Answers, output: Path, seconds: float) -> list[str]:
    """Write all values; returns the lines for the log."""
    measured = {node: joined(answers[node]) for node in nodes if node in answers}
    medians, named = slow(measured)
    silent = [node for node in nodes if not measured.get(node)]
    part = output.with_name(output.name + ".part")
    values = {"units": UNITS, "median": medians, "nodes": measured, "slow": named, "silent": silent, "answers": answers}
    part.write_text(json.dumps(values, indent=2) + "\n")
    part.replace(output)
    shown = ", ".join(f"{name} {value:.4g} {UNITS[name]}" for name, value in medians.items()) or "no measurement"
    lines = [f"preflight of {len(nodes)} nodes: {shown} at the median; all values: {output}"]
    lines += [f"preflight: {node} is slow: {'; '.join(words)}" for node, words in named.items()]
    for node in silent:
        errors = [answer["error"] for answer in answers.get(node, {}).values() if "error" in answer]
        lines.append(
            f"preflight: {node} has no measurement: {errors[0] if errors else f'no answer in {seconds:.0f} s'}"
        )
    return lines


def coordinate(output: Path, flags: list[str], seconds: float) -> list[str]:
    """Measure all nodes of the job; returns the lines for the log."""
    from torch.distributed import TCPStore

    listed = subprocess.run(
        ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]],
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    nodes, processes = listed.stdout.split(), int(os.environ["GPUS"])
    store = TCPStore(nodes[0], 0, is_master=True, wait_for_workers=False)
    settings = os.environ | {"PREFLIGHT_SECONDS": f"{seconds:.0f}"}
    with open(output.with_suffix(".err"), "w", encoding="utf-8") as file:
        # --overlap: a hanging step must not block the run's own step
        step = subprocess.Popen(
            [
                "srun",
                "--overlap",
                f"--ntasks={len(nodes)}",
                "--ntasks-per-node=1",
                "--kill-on-bad-exit=0",
                "--wait=0",
                f"--cpus-per-task={os.environ.get('SLURM_CPUS_PER_TASK', '1')}",
                sys.executable,
                __file__,
                "--node",
                nodes[0],
                str(store.port),
                *flags,
            ],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=settings,
        )
        try:
            conduct(store, step, (len(nodes), processes), seconds)
            step.wait(2)  # nodes that are done end quickly
        except subprocess.TimeoutExpired:
            step.terminate()  # srun ends the tasks that it can reach
            try:
                step.wait(10)
            except subprocess.TimeoutExpired:
                step.kill()
    return report(nodes, collect(store, nodes, processes), output, seconds)


# --- on a node -------------------------------------------------------------------------------------------------------
def on_node(words: list[str]) -> None:
    """Start one process per GPU; end all of them after the time limit, or when this process ends."""
    seconds = float(os.environ["PREFLIGHT_SECONDS"])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    ranks = [
        subprocess.Popen([sys.executable, __file__, "--process", str(local), *words])
        for local in range(int(os.environ["GPUS"]))
    ]
    try:
        end = time.monotonic() + seconds
        for rank in ranks:
            rank.wait(max(end - time.monotonic(), 0.1))
    finally:
        for rank in ranks:
            rank.kill()


def in_process(local: int, host: str, port: int, flags: list[str]) -> None:
    """Measure in one process, and send each value to the store immediately."""
    signal.alarm(int(float(os.environ["PREFLIGHT_SECONDS"])))  # ends this process even if it hangs
    from torch.distributed import TCPStore

    from prolip.utils.secrecy import scrub

    node, nodes = int(os.environ["SLURM_NODEID"]), int(os.environ["SLURM_NNODES"])
    seconds = float(os.environ["PREFLIGHT_SECONDS"])
    store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=seconds))

    def send(name: str, value: Any) -> None:
        words = f"{type(value).__name__}: {scrub(str(value))}"[:300] if isinstance(value, Exception) else value
        store.set(f"{node}/{local}/{name}", json.dumps(words))

    send("here", True)
    present = json.loads(store.get("present"))
    speeds: dict[str, float] = {}
    for number, pairs in enumerate(rounds(len(present))):
        for pair in ((present[one], present[other]) for one, other in pairs if node in (present[one], present[other])):
            try:
                speeds[f"with node {pair[1 - pair.index(node)]}"] = all_reduce_speed(store, number, pair, node, local)
                send("all_reduce", speeds)
            except Exception as error:  # perhaps of the other node: keep earlier values
                send("error", error)
    try:
        send("loader", loader_rate(local, node, nodes, flags))
    except Exception as error:
        send("error", error)
    send("done", True)


def loader_rate(local: int, node: int, nodes: int, flags: list[str]) -> float:
    """Measure samples/s of this process's loader, as in training except for a small shuffle buffer."""
    import torch

    from prolip.data.config import fitting_workers
    from prolip.data.loader import build_loader
    from prolip.utils.fields import AUTO
    from prolip.utils.threads import cores
    from training.defaults import rows_per_rank
    from training.main import parse
    from training.model import build_model, build_tokenizer

    config, processes = parse(flags), int(os.environ["GPUS"])
    rows = rows_per_rank(config, nodes * processes)
    workers, batch = config.data.workers, AUTO if rows == AUTO else rows // config.run.accum_freq
    if workers is None:
        workers = fitting_workers(batch, cores(), config.data.unpaired)
    data = replace(
        config.data,
        batch_size=rows,
        workers=workers,
        noise_ratio=0.0,
        shuffle_buffer=min(config.data.shuffle_buffer, 100),
    )
    model, transform, _ = build_model(config, torch.device("cpu"), load_weights=False)
    loader = build_loader(
        data,
        transform,
        build_tokenizer(config),
        rank=node * processes + local,
        world_size=nodes * processes,
        image_size=model.image_size,
        context_length=model.context_length,
    )
    count, start, begin = 0, 0.0, 0.0
    for epoch in itertools.count():
        loader.set_epoch(epoch)
        for _ in loader:
            now = time.perf_counter()
            start = start or now
            if now - start < WARM:
                begin = now
                continue
            count += loader.config.batch_size
            if now - start > WARM + MEASURED:
                loader.close()
                return count / (now - begin)
    raise AssertionError("epochs do not end")


def all_reduce_speed(store: Any, number: int, pair: tuple[int, int], node: int, local: int) -> float:
    """Measure GB/s between all processes of two nodes."""
    import torch
    import torch.distributed as dist

    processes = int(os.environ["GPUS"])
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    world, rank, device = 2 * processes, pair.index(node) * processes + local, torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", local % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"round {number}, {pair}", store),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=PATIENCE * (number + 1)),
    )
    try:
        tensor = torch.zeros(BYTES[backend] // 4, device=device)
        for turn in range(TIMES + 2):
            if turn == 2:  # the first ones open connections
                begin = time.perf_counter()
            dist.all_reduce(tensor)
            if backend == "nccl":
                torch.cuda.synchronize(device)
        seconds = (time.perf_counter() - begin) / TIMES
    finally:
        dist.destroy_process_group()
    return 2 * (world - 1) / world * BYTES[backend] / seconds / 1e9


def main(words: list[str]) -> int:
    """Run the command; returns 2 for wrong usage, else 0."""
    if not words:
        print("usage, in a job: python slurm/measure.py OUTPUT [flags of training.main]", file=sys.stderr)
        return 2
    if words[0] == "--node":
        on_node(words[1:])
    elif words[0] == "--process":
        in_process(int(words[1]), words[2], int(words[3]), words[4:])
    else:
        seconds = float(os.environ.get("PREFLIGHT_SECONDS") or 180)
        print("\n".join(coordinate(Path(words[0]), words[1:], seconds)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
