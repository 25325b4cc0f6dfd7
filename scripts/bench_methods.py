"""Time of every method's training step against CLIP's (InfoNCE) on the same towers, and memory of PCME's loss.

    python scripts/bench_methods.py --rounds 9                                        # steps, ProLIP-ViT-S-16, batch 32
    python scripts/bench_methods.py --memory --match-samples 8 --batch-size 128 --dim 1024

Steps take turns within one process, as in bench_step.py: forward, loss, backward, fused AdamW. --memory prints what one
PCME loss with its gradients holds at most above its inputs (Linux), in a process of its own each: ours, and over all
pairs of samples at once, B x B x J x J distances as torch.cdist makes them. Differences of coordinates as formula (2)
prints them, B x B x J x J x D, are computed, not run.
"""
from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT), str(ROOT.parent / "src")]

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

import bench_step  # noqa: E402
from prolip.losses import log_match_odds, tiled_loss_over_ranks  # noqa: E402
from prolip.methods import METHODS  # noqa: E402


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="ProLIP-ViT-S-16")
    add("--batch-size", type=int, default=32)
    add("--methods", nargs="+", default=[name for name in METHODS if name != "clip"], choices=METHODS)
    add("--rounds", type=int, default=9)
    add("--threads", type=int, default=torch.get_num_threads())
    add("--device", default="cpu")
    add("--precision", default="bf16", choices=("bf16", "fp32"))
    add("--processor-time", action="store_true", help="of this process alone, for a machine that has other work")
    add("--memory", action="store_true", help="of PCME's loss, no steps")
    add("--match-samples", type=int, default=8)
    add("--dim", type=int, default=1024)
    return parser.parse_args()


def make_steps(options: argparse.Namespace, device: torch.device) -> dict[str, bench_step.Step]:
    """A training step of each method, CLIP's first."""
    steps = {}
    batch = bench_step.make_batch(options, device)
    place = torch.arange(options.batch_size, device=device)
    batch |= {"caption_id": place, "caption_ids": place.unsqueeze(1)}
    for name in ("clip", *options.methods):
        method = METHODS[name]
        config = method.config()
        cfg: dict[str, Any] = {"name": name, "config": vars(config)}
        model = bench_step.prolip.create_model(options.model, device=device, method_cfg=cfg)
        objective = method.objective(model, config).to(device)
        own = batch
        if method.objective.needs(config).data.get("captions"):  # as the loader gives them where several are asked for
            own = batch | {"text": batch["text"].unsqueeze(1)}
        loss = lambda step, objective=objective, own=own: objective(objective.prepare(own, step))["loss"]  # noqa: E731
        steps[name] = bench_step.make_step(objective.train(), loss, options, device)
    return steps


def time_steps(options: argparse.Namespace) -> None:
    device = torch.device(options.device)
    bench_step.keep_freed_memory()
    clock = time.process_time if options.processor_time else time.perf_counter
    times = bench_step.measure(make_steps(options, device), options.rounds, device, clock)
    print(f"{options.model}, batch {options.batch_size}, {options.precision}, {options.threads} threads"
          + (", processor time" if options.processor_time else ""))  # fmt: skip
    print("| method | ms | step / clip |\n|---|---:|---:|")
    for name, values in times.items():
        ratios = [a / b for a, b in zip(values, times["clip"])]
        print(f"| {name} | {statistics.median(values) * 1e3:.1f} | {bench_step.median_of(ratios)} |")


def pcme_loss(way: str, batch: int, samples: int, dim: int, pipe: Any) -> None:
    """One loss with its gradients; sends the seconds and the MiB that it held at most above its inputs."""
    v, t = (F.normalize(torch.randn(batch, samples, dim), dim=2).requires_grad_() for _ in range(2))
    label = torch.eye(batch)

    def loss(odds: torch.Tensor, positive: torch.Tensor) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(odds, positive.to(odds.dtype), reduction="sum") / batch

    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    before, start = held("VmRSS"), time.perf_counter()
    if way == "tiles":
        odds = lambda x, y: log_match_odds(x[0], y[0], 15.0, 15.0)  # noqa: E731
        value = tiled_loss_over_ranks(odds, (v,), (t,), loss)
    else:
        value = loss(log_match_odds(v, t, 15.0, 15.0), label)
    value.backward()
    pipe.send((value.item(), time.perf_counter() - start, held("VmHWM") - before))


def held(what: str) -> float:
    """What the process holds ("VmRSS") or has held at most ("VmHWM"), MiB."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what)) / 1024


def measure_memory(options: argparse.Namespace) -> None:
    batch, samples, dim = options.batch_size, options.match_samples, options.dim
    context = multiprocessing.get_context("spawn")
    print(f"PCME's loss, B = {batch}, J = {samples}, D = {dim}\n| way | MiB | s |\n|---|---:|---:|")
    for way in ("tiles", "all pairs at once"):
        receive, send = context.Pipe(duplex=False)
        process = context.Process(target=pcme_loss, args=(way, batch, samples, dim, send))
        process.start()
        _, seconds, mib = receive.recv()
        process.join()
        print(f"| {way} | {mib:.0f} | {seconds:.2f} |", flush=True)
    print(f"| differences of coordinates (not run) | {batch**2 * samples**2 * dim * 4 / 2**20:,.0f} | |")


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    (measure_memory if options.memory else time_steps)(options)


if __name__ == "__main__":
    main()
