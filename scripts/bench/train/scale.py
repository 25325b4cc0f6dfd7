"""Files, bytes and collectives of a run on thousands of ranks, counted on one machine.

    python scripts/bench/train/scale.py --old CHECKOUT --write docs/benchmarks/scale.md

Ranks are simulated: rank 0 runs and its broadcasts are saved, then the last rank runs with them. All other ranks equal
the last one. Phases:

  start   from the list of shards and of a test set to the first sample of a rank's first stream
  step    the third training step of a tiny model: exchanges of DDP and the loss, texts gathered as on GPUs
  stop    agreement of ranks between steps, per step of --step-ms, and the most steps until all know a request
  save    the part of a checkpoint that training waits for
  load    from the address of a checkpoint to its state
  kinds   the collectives of a step of --model by what they carry, with DDP and with FSDP2

Columns: files looked up, opened and listed; bytes read from files and mapped; collectives; bytes of tensors they send
and of objects they receive; processor seconds. With --old a cell says "before → after".
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "scripts")]

import torch

from bench.train.collectives import COLLECTIVES, Calls, Ledger, Rank, real_looking_ddp
from prolip.utils.outputs import replacing

RANKS = (2, 8, 64, 512, 4096)
#: Samples of a shard in its index, and links to one file: file systems allow about 65,000.
SAMPLES, LINKS = 10_000, 10_000
TEST_SHARDS = 16
COLUMNS = ("looked up", "opened", "listed", "read", "mapped", "collectives", "sent", "received", "seconds")
Counts = dict[str, list[Mapping[str, float]]]
PHASES = ("start", "step", "stop", "save", "load", "kinds")
#: Ranks per machine.
LOCAL = 8


# --- data -------------------------------------------------------------------------------------------------------------
def write_shard(path: Path) -> int:
    """Write a shard of two samples and return its size in bytes."""
    from PIL import Image

    picture = io.BytesIO()
    Image.new("RGB", (8, 8)).save(picture, "PNG")
    with tarfile.open(path, "w") as archive:
        for name, data in (
            (f"{key}.{end}", data) for key in "ab" for end, data in (("png", picture.getvalue()), ("txt", b"a caption"))
        ):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path.stat().st_size


def write_data(folder: Path, shards: int) -> None:
    """Write training shards with an index of SAMPLES for each, and the shards of a test set."""
    entries = {}
    for number in range(shards):
        path = folder / f"{number:06d}.tar"
        if number % LINKS:
            os.link(folder / f"{number - number % LINKS:06d}.tar", path)
        else:
            size = write_shard(path)
        entries[path.name] = {"samples": SAMPLES, "bytes": size, "sha256": f"{number:064x}"}
    (folder / "index.json").write_text(json.dumps({"format": "prolip shard index 1", "shards": entries}))
    (folder / "test").mkdir()
    for number in range(TEST_SHARDS):
        write_shard(folder / "test" / f"{number}.tar")


# --- start ------------------------------------------------------------------------------------------------------------
def settings(folder: Path, shards: int) -> Any:
    """Return a run on the shards, evaluated on the test set. Its buffer opens one shard for a first sample."""
    from training.main import parse

    data = ["--train-data", f"{folder}/{{000000..{shards - 1:06d}}}.tar", "--val-data", f"shards:{folder}/test"]
    return parse([*data, "--workers", "1", "--batch-size", "8", "--shuffle-buffer", "1", "--model", "ProLIP-ViT-test"])


def begin(config: Any, rank: int, ranks: int) -> None:
    """Start a run on one rank as far as it touches data, up to a first sample."""
    from prolip.data.faults import FaultCounter
    from prolip.data.order import Place
    from training.evaluate import open_validation
    from training.parallel import World
    from training.run import open_loader

    world, model = World(rank=rank, world_size=ranks), SimpleNamespace(image_size=8, context_length=8)
    loader = open_loader(config, world, 8, model, lambda image: torch.zeros(3, 8, 8), lambda texts, **_: None)
    open_validation(config, None, None, world)
    next(loader._chunks.source.stream(Place(0, 0, rank, ranks), FaultCounter()))


def count_start(folder: Path, args: argparse.Namespace) -> Counts:
    """Return ranks -> the counts of rank 0 and of the last one."""
    calls, config = Calls(), settings(folder, args.shards)
    results: Counts = {}
    begin(config, 0, 1)  # triggers late imports
    for ranks in args.ranks:
        sent: list[bytes] = []
        pair: list[Mapping[str, float]] = []
        for rank in (0, ranks - 1):
            with Rank(rank, ranks, sent) as place, calls.counting() as found, Ledger(ranks) as ledger:
                begin(config, rank, ranks)
                place.add(ledger, found)
            pair.append({name: found[name] for name in COLUMNS})
        results[str(ranks)] = pair
    return results


# --- a run ------------------------------------------------------------------------------------------------------------
def words_of(folder: Path, *more: str) -> list[str]:
    """Return the arguments of a run on synthetic images without evaluation."""
    run = ["--dataset-type", "synthetic", "--train-num-samples", "65536"]
    run += [] if "--model" in more else ["--model", "ProLIP-ViT-test"]
    run += ["--workers", "0", "--batch-size", "2", "--max-steps", "8", "--warmup", "1", "--save-frequency", "0"]
    run += ["--precision", "fp32", "--device", "cpu", "--init-logit-bias", "-5"]
    return [*run, "--output", str(folder), "--name", "run", *more]


def count_run(folder: Path, args: argparse.Namespace) -> dict[str, Counts]:
    """Return phase -> ranks -> the counts of rank 0 and of the last one."""
    calls = Calls()
    results: dict[str, Counts] = {phase: {} for phase in PHASES[1:-1]}
    phases_of(folder / "warm", Rank(0, 2, []), calls, args)  # triggers late imports
    for ranks in args.ranks:
        sent: list[bytes] = []
        for rank in (0, ranks - 1):
            for phase, found in phases_of(folder / f"{ranks}", Rank(rank, ranks, sent), calls, args).items():
                results[phase].setdefault(str(ranks), []).append({name: found[name] for name in (*COLUMNS, LATE)})
    return results


def phases_of(folder: Path, place: Rank, calls: Calls, args: argparse.Namespace) -> dict[str, Counter[str]]:
    """Return the counts of each phase of a run on one rank."""
    import training.run
    from prolip.losses import contrastive
    from training.loop import on_device, save, training_step
    from training.main import parse
    from training.parallel import World

    names: dict[str, Any] = {"local_rank": place.rank % LOCAL, "local_size": min(LOCAL, place.ranks)}
    fields = World.__dataclass_fields__
    world = World(rank=place.rank, world_size=place.ranks, **{k: v for k, v in names.items() if k in fields})
    found: dict[str, Counter[str]] = {}

    def counted(phase: str, work: Callable[[], Any]) -> Any:
        with calls.counting() as counts, Ledger(place.ranks) as ledger:
            out = work()
            place.add(ledger, counts)
        found[phase] = counts
        return out

    contrastive.choose_exchange = lambda *_: "gather"  # as on GPUs
    with place, real_looking_ddp(), ExitStack() as held:
        config = parse(words_of(folder))
        run = training.run.build(config, world, folder / "run", 2, held)
        place.found.clear()
        run.data.loader.set_epoch(0)
        for step, batch in zip(range(3), run.data.loader):
            batch = on_device(run.data, batch, step, world.device)
            counted("step", partial(training_step, run.trained, batch, step))
        late = counted("stop", partial(agree, run, args))
        found["stop"] = Counter({name: value / STEPS for name, value in found["stop"].items()} | {LATE: late})
        run.at.step = 3
        counted("save", partial(save, run))
        if run.outputs.saver is not None:
            run.outputs.saver.settle(final=True)
        address = str(folder / "run/checkpoints/step_3.pt")
        training.run.close(run)
        counted("load", partial(training.run.read_checkpoint, address, world))
    return found


#: Steps over which agreement is counted, and the key of the most steps between a request and its answer.
STEPS, LATE = 200, "steps until known"


def agree(run: Any, args: argparse.Namespace) -> int:
    """Exchange requests between STEPS steps of --step-ms milliseconds; a new request follows each answer."""
    from training import parallel as distributed

    now, asked, late = time.monotonic(), 0, 0
    with patch.object(distributed, "time", SimpleNamespace(monotonic=lambda: now), create=True):
        for step in range(STEPS):
            now += args.step_ms / 1000
            stop, *_ = run.health.consensus.exchange(15 if step >= asked else 0, 0, 0)
            if stop:
                late, asked = max(late, step - asked), step + 7  # so that requests come at varying steps
    return late


# --- kinds of collectives ---------------------------------------------------------------------------------------------
#: Function that calls a collective -> its content, and who waits for it.
CARRIERS = {
    "score_gathered": ("vectors of texts, and their gradients", "the device, for the slowest rank"),
    "send": ("gradients, a bucket of 25 MB each", "the device, after its backward pass, for the last bucket"),
    "unshard": ("parameters of a block", "the device, if they arrive after the end of the block before"),
    "foreach_reduce": ("gradients of a block", "the device, after its backward pass, for the last block"),
    "average_gradient": ("gradients of scale and bias", "the device"),
    "norm": ("norms of gradients", "the device"),
    "_post": ("requests to stop or save, every 0.25 s", "none"),
}


class Carried(Ledger):
    """Ledger that also counts by the content of a collective. Fails for one that CARRIERS lacks."""

    def __init__(self, ranks: int) -> None:
        super().__init__(ranks)
        self.number, self.bytes = Counter[tuple[str, str]](), Counter[tuple[str, str]]()

    def note(self, name: str, args: tuple) -> None:
        before = self.sent.total()
        super().note(name, args)
        if (collective := COLLECTIVES[name]) is None:
            return
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame.f_code.co_name not in CARRIERS:
            frame = frame.f_back
        if frame is None:
            raise RuntimeError(f"no row describes the collective {name} of a step. Add its function to CARRIERS")
        row = frame.f_code.co_name, collective[0]
        self.number[row] += 1
        self.bytes[row] += self.sent.total() - before


def count_kinds(folder: Path, args: argparse.Namespace) -> dict[str, dict[str, list[list[Any]]]]:
    """Return DDP, FSDP2 -> ranks -> rows (function, collective, count, bytes) of the second step on rank 0."""
    import training.run
    from prolip.losses import contrastive
    from training.loop import on_device, training_step
    from training.main import parse
    from training.parallel import World

    contrastive.choose_exchange = lambda *_: "gather"  # as on GPUs
    results: dict[str, dict[str, list[list[Any]]]] = {}
    for way, flags in (("DDP", []), ("FSDP2", ["--fsdp"])):
        for ranks in args.ranks:
            place = folder / f"{way}{ranks}"
            world = World(rank=0, world_size=ranks, local_size=min(LOCAL, ranks))
            with Rank(0, ranks, []), real_looking_ddp(), ExitStack() as held:
                config = parse(words_of(place, "--model", args.model, *flags))
                run = training.run.build(config, world, place / "run", 2, held)
                run.data.loader.set_epoch(0)
                first, second = (
                    on_device(run.data, batch, step, world.device) for step, batch in zip(range(2), run.data.loader)
                )
                training_step(run.trained, first, 0)
                with Carried(ranks) as ledger:
                    training_step(run.trained, second, 1)
                    run.health.consensus.exchange(0, 0, 0)
                training.run.close(run)
            rows = [[*row, number, ledger.bytes[row]] for row, number in ledger.number.items()]
            results.setdefault(way, {})[str(ranks)] = rows
    return results


def kinds_table(model: str, ways: dict[str, dict[str, list[list[Any]]]]) -> list[str]:
    """Return the table, a row for each kind of collective."""
    ranks = list(next(iter(ways.values())))
    heads = [f"bytes, {int(number):,} ranks" for number in ranks]
    lines = [
        f"## Collectives of a step of {model}, 2 samples a rank",
        "",
        f"| with | carries | collective | a step | {' | '.join(heads)} | who waits |",
        "|---|---|---|---:" + "|---:" * len(ranks) + "|---|",
    ]
    for way, counted in ways.items():
        by = {number: {(row[0], row[1]): row[2:] for row in rows} for number, rows in counted.items()}
        for function, kind in by[ranks[0]]:
            what, waits = CARRIERS[function]
            found = [by[number][function, kind] for number in ranks]
            times = " / ".join(dict.fromkeys(show(number) for number, _ in found))
            sent = " | ".join(show(bytes_) for _, bytes_ in found)
            lines.append(f"| {way} | {what} | {kind} | {times} | {sent} | {waits} |")
    return lines


# --- tables -----------------------------------------------------------------------------------------------------------
TOP = """# What a run on thousands of ranks touches

Which files, bytes and collectives does a run use, and which of them grow with the number of ranks? This page counts
them for simulated ranks, one at a time, on one machine. Rank 0 lists the shards for all ranks, so look-ups hardly grow
with the ranks: each rank adds one. The gathered texts of a step, the data positions of a checkpoint and FSDP2's padding
still grow. In practice, the file system does not limit the start of a large run, and the exchange between ranks may.

![Shard look-ups of all ranks at the start, before and after](../images/bench_scale.png)

*Look-ups of all ranks at the start, from the first table.*

The command that writes this page counts in six phases of a run:

    {command}

{about}

Nothing here ran on a GPU or over a network. *another* is the last rank, *all* is rank 0 and all others. A cell shows
"before → after". Seconds are processor time. Three numbers grow with the ranks:

- **Texts of a step.** Every rank gathers them.
- **Data positions of a checkpoint,** about 400 bytes a rank. Rank 0 receives them to save. To load, every rank reads
  them from the one map of its machine.
- **FSDP2's padding.** FSDP2 cuts the first dimension of a parameter into one part per rank. So 768 rows travel as
  4,096 on 4,096 ranks.
"""


def show(value: float) -> str:
    """Format a count, a mean of counts, or seconds."""
    return f"{value:,.0f}" if value == int(value) else f"{value:,.3g}"


def phase_table(title: str, before: Counts | None, after: Counts) -> list[str]:
    """Return the table of rank 0, one other rank, and all of them together, without columns of zeros."""

    def three(results: Counts) -> dict[tuple[str, str], Mapping[str, float]]:
        rows: dict[tuple[str, str], Mapping[str, float]] = {}
        for ranks, (first, other) in results.items():
            every = {name: first[name] + (int(ranks) - 1) * other[name] for name in COLUMNS}
            every |= {LATE: other[LATE]} if LATE in other else {}
            rows |= {(ranks, "rank 0"): first, (ranks, "another"): other, (ranks, "all"): every}
        return rows

    sides = [three(results) for results in (before, after) if results is not None]
    names = [*COLUMNS, LATE] if title.startswith("Stop") else list(COLUMNS)
    names = [name for name in names if any(row[name] for side in sides for row in side.values())]
    lines = [f"## {title}", "", f"| ranks | of | {' | '.join(names)} |", "|---:|---" + "|---:" * len(names) + "|"]
    for ranks, who in sides[-1]:
        cells = [" → ".join(dict.fromkeys(show(side[ranks, who][name]) for side in sides)) for name in names]
        lines.append(f"| {int(ranks):,} | {who} | {' | '.join(cells)} |")
    return lines


def compare(args: argparse.Namespace) -> None:
    """Print the tables of this checkout, next to those of an older one."""
    found = []
    with tempfile.TemporaryDirectory() as name:
        if "start" in args.phases:
            write_data(Path(name), args.shards)
        for number, checkout in enumerate(filter(None, (args.old, ROOT))):
            phases = [phase for phase in args.phases if checkout == ROOT or phase != "kinds"]
            if not phases:
                continue
            environment = os.environ | {"PYTHONPATH": str(Path(checkout).resolve() / "src"), "OMP_NUM_THREADS": "1"}
            words = [*phases, "--shards", args.shards, "--ranks", *args.ranks, "--step-ms", args.step_ms]
            words += ["--model", args.model, "--in", name, "--run", Path(name) / f"run{number}"]
            child = [sys.executable, __file__, *words]
            done = subprocess.run([str(word) for word in child], env=environment, stdout=subprocess.PIPE, text=True)
            if done.returncode:
                raise SystemExit(f"counting in {checkout} ended with {done.returncode}. See the lines above")
            found.append(json.loads(done.stdout.splitlines()[-1]))
    lines: list[str] = []
    for phase in args.phases:
        title = phase.capitalize() + (f" on {args.shards:,} shards" if phase == "start" else "")
        before = found[0].get(phase) if len(found) > 1 else None
        after = found[-1][phase]
        lines += kinds_table(args.model, after) if phase == "kinds" else phase_table(title, before, after)
        lines.append("")
    tables = "\n".join(lines)
    if args.write is None:
        print(tables)
        return
    about = (__doc__ or "").partition("Phases:\n\n")[2].partition("\n\nColumns")[0]
    about = re.sub(r"(?m)^  (\w+) +", r"- *\1*: ", about)
    command = (
        f"python scripts/bench/train/scale.py {'--old CHECKOUT ' if args.old else ''}--write docs/benchmarks/scale.md"
    )
    with replacing(args.write) as temporary:
        temporary.write_text(TOP.format(command=command, about=about) + "\n" + tables, encoding="utf-8")


def parse_flags(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("phases", nargs="*", metavar="PHASE", help=f"phases to count: {', '.join(PHASES)}; default: all")
    add("--shards", type=int, default=5000, help="training shards; default: %(default)s")
    add("--ranks", type=int, nargs="+", default=RANKS, help="numbers of ranks; default: %(default)s")
    add("--step-ms", type=float, default=74, help="milliseconds of a step, for stop; default: %(default)s, ViT-B/16's")
    add("--model", default="ProLIP-ViT-B-16", help="model for kinds; default: %(default)s")
    add("--old", metavar="CHECKOUT", help="checkout of an older commit, counted for comparison")
    add("--write", type=Path, metavar="PAGE", help="page to write; default: print the tables")
    for name in ("--in", "--run"):  # for a child process that counts
        add(name, dest=name.strip("-") + "_folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    args.phases = args.phases or list(PHASES)
    if unknown := set(args.phases) - set(PHASES):
        parser.error(f"unknown phase {', '.join(sorted(unknown))}. Give {', '.join(PHASES)}")
    if min(args.ranks) < 2 or args.shards < max(args.ranks):
        parser.error(f"--shards {args.shards} for --ranks {max(args.ranks)}: give as many shards or more, and 2 ranks")
    if args.old and not (Path(args.old) / "src" / "training").is_dir():
        parser.error(f"--old {args.old} holds no src/training. Give the root of a checkout")
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse_flags(arguments)
    if args.in_folder is None:
        compare(args)
        return
    results: dict[str, Any] = {"start": count_start(args.in_folder, args)} if "start" in args.phases else {}
    if "kinds" in args.phases:
        results["kinds"] = count_kinds(args.run_folder, args)
    if {*args.phases} - {"start", "kinds"}:
        results |= count_run(args.run_folder, args)
    print("\n" + json.dumps({phase: found for phase, found in results.items() if phase in args.phases}))


if __name__ == "__main__":
    main()
