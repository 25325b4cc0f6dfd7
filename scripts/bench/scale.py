"""What a run on thousands of ranks touches, counted on one machine: python scripts/bench/scale.py [--old CHECKOUT]

Ranks are simulated: rank 0 runs, what it broadcasts is kept, and the last rank runs with that. No other rank differs
from the last one. Phases:

  start   from the list of shards and of a test set to the first sample of a rank's first stream
  step    the third training step of a tiny model: what DDP and the loss exchange, texts gathered as on GPUs
  stop    what ranks agree on between steps, per step of --step-ms, and the most steps until all know a request
  save    a checkpoint, as far as training waits for it
  load    from the address of a checkpoint to its state

Columns: files looked up, opened and listed; bytes read from files and mapped; collectives; bytes of tensors sent and of
objects received by them; seconds of the processor.
"""
from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from collectives import FakeStore, Ledger, real_looking_ddp

ROOT = Path(__file__).resolve().parents[2]
RANKS = (2, 8, 64, 512, 4096)
#: Of a shard, as its index has them, and links to one file, of which file systems allow some 65,000.
SAMPLES, LINKS = 10_000, 10_000
TEST_SHARDS = 16
COLUMNS = ("looked up", "opened", "listed", "read", "mapped", "collectives", "sent", "received", "seconds")
PHASES = ("start", "step", "stop", "save", "load")
#: Machines hold so many ranks.
LOCAL = 8


# --- data -------------------------------------------------------------------------------------------------------------
def write_shard(path: Path) -> int:
    """A shard of two samples; its bytes."""
    from PIL import Image

    picture = io.BytesIO()
    Image.new("RGB", (8, 8)).save(picture, "PNG")
    with tarfile.open(path, "w") as archive:
        for name, data in ((f"{key}.{end}", data) for key in "ab" for end, data in
                           (("png", picture.getvalue()), ("txt", b"a caption"))):  # fmt: skip
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path.stat().st_size


def write_data(folder: Path, shards: int) -> None:
    """Training shards with an index that says SAMPLES of each, and the shards of a test set."""
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


# --- counting ---------------------------------------------------------------------------------------------------------
class Calls:
    """Counts of this process's calls while `counting`: files looked up (stat, lstat), opened, and folders listed."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        self.on = False
        names = {"open": "opened", "os.listdir": "listed", "os.scandir": "listed"}
        sys.addaudithook(lambda event, _: self.count(names[event]) if event in names else None)
        for name in ("stat", "lstat"):
            setattr(os, name, self.counted(getattr(os, name)))
        self.map = torch.UntypedStorage.from_file
        torch.UntypedStorage.from_file = self.mapped

    def mapped(self, name: str, shared: bool, size: int) -> torch.UntypedStorage:
        """As torch, which maps a file; its bytes are counted."""
        if self.on:
            self.found["mapped"] += size
        return self.map(name, shared, size)

    def count(self, what: str) -> None:
        """One call more."""
        if self.on:
            self.found[what] += 1

    def counted(self, call: Any) -> Any:
        """The same function, which counts."""
        def counting(*args: Any, **options: Any) -> Any:
            self.count("looked up")
            return call(*args, **options)

        return counting

    @contextmanager
    def counting(self) -> Iterator[Counter[str]]:
        """The counts of the block, with bytes read (Linux alone tells them) and processor seconds."""
        self.found, self.own = Counter(), -bytes_read() + bytes_read()
        before, start = bytes_read(), time.process_time()
        self.on = True
        try:
            yield self.found
        finally:
            self.on = False
            self.found["seconds"] = time.process_time() - start  # type: ignore[assignment]
            self.found["read"] = bytes_read() - before - self.own


def bytes_read() -> int:
    """Bytes that this process has read from files and pipes so far; 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/io").read_text(encoding="utf-8").split()[1])
    except OSError:
        return 0


class Rank:
    """One rank of many while entered, by torch's fake group; objects are counted, and received as they would be.

    sent: what rank 0 broadcasts goes there, and other ranks take it from there, in the same order.
    """

    OBJECTS = ("broadcast_object_list", "all_gather_object", "gather_object", "barrier", "new_group",
               "destroy_process_group")  # fmt: skip

    def __init__(self, rank: int, ranks: int, sent: list[bytes]):
        self.rank, self.ranks, self.sent, self.waiting = rank, ranks, sent, iter(list(sent))
        self.found: Counter[str] = Counter()
        self.real = {name: getattr(dist, name) for name in self.OBJECTS}

    def __enter__(self) -> Rank:
        dist.init_process_group("fake", rank=self.rank, world_size=self.ranks, store=FakeStore())
        for name in self.OBJECTS:
            setattr(dist, name, getattr(self, name))
        return self

    def __exit__(self, *_: Any) -> None:
        for name, real in self.real.items():
            setattr(dist, name, real)
        dist.destroy_process_group()

    def broadcast_object_list(self, box: list[Any], *_: Any, **__: Any) -> None:
        self.found["collectives"] += 1
        if self.rank == 0:
            self.sent.append(pickle.dumps(list(box)))
        else:
            box[:] = pickle.loads(data := next(self.waiting))
            self.found["received"] += len(data)

    def all_gather_object(self, boxes: list[Any], value: Any, **_: Any) -> None:
        self.found["collectives"] += 1
        data = pickle.dumps(value)
        self.found["received"] += len(data) * (self.ranks - 1)
        boxes[:] = [pickle.loads(data) for _ in range(self.ranks)]

    def gather_object(self, value: Any, boxes: list[Any] | None = None, **_: Any) -> None:
        if boxes is None:
            self.found["collectives"] += 1
        else:
            self.all_gather_object(boxes, value)

    def barrier(self, *_: Any, **__: Any) -> None:
        self.found["collectives"] += 1

    def new_group(self, *_: Any, **__: Any) -> None:
        """The group of a machine, whose first rank this one takes for rank 0."""
        self.found["collectives"] += 1

    def destroy_process_group(self, *_: Any) -> None:
        """There is none besides the fake one, which stays."""

    def add(self, ledger: Ledger, found: Counter[str]) -> None:
        """What was counted since the last time, of tensors and of objects, to the counts of files."""
        self.found["collectives"] += sum(ledger.counts.values())
        self.found["sent"] += sum(ledger.sent.values())
        found.update(self.found)
        self.found.clear()


# --- start ------------------------------------------------------------------------------------------------------------
def settings(folder: Path, shards: int) -> Any:
    """A run on the shards, whose buffer opens one of them for a first sample, evaluated on the test set."""
    from training.main import parse

    data = ["--train-data", f"{folder}/{{000000..{shards - 1:06d}}}.tar", "--val-data", f"shards:{folder}/test"]
    return parse([*data, "--workers", "1", "--batch-size", "8", "--shuffle-buffer", "1", "--model", "ProLIP-ViT-test"])


def begin(config: Any, rank: int, ranks: int) -> None:
    """The start of a run on one rank, as far as it touches data, up to a first sample."""
    from prolip.data.faults import FaultCounter
    from prolip.data.order.streams import Place
    from training.parallel.distributed import World
    from training.run import open_loader
    from training.validation import open_validation

    world, model = World(rank=rank, world_size=ranks), SimpleNamespace(image_size=8, context_length=8)
    loader = open_loader(config, world, 8, model, lambda image: torch.zeros(3, 8, 8), lambda texts, **_: None)
    open_validation(config, None, None, world)
    next(loader._chunks.source.stream(Place(0, 0, rank, ranks), FaultCounter()))


def count_start(folder: Path, args: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Ranks -> the counts of rank 0 and of the last one."""
    calls, results, config = Calls(), {}, settings(folder, args.shards)
    begin(config, 0, 1)  # imports what is imported late
    for ranks in args.ranks:
        sent: list[bytes] = []
        pair = []
        for rank in (0, ranks - 1):
            with Rank(rank, ranks, sent) as place, calls.counting() as found, Ledger(ranks) as ledger:
                begin(config, rank, ranks)
                place.add(ledger, found)
            pair.append({name: found[name] for name in COLUMNS})
        results[str(ranks)] = pair
    return results


# --- a run ------------------------------------------------------------------------------------------------------------
def words_of(folder: Path, *more: str) -> list[str]:
    """A run of synthetic images that evaluates nothing."""
    run = ["--dataset-type", "synthetic", "--train-num-samples", "65536", "--model", "ProLIP-ViT-test"]
    run += ["--workers", "0", "--batch-size", "2", "--max-steps", "8", "--warmup", "1", "--save-frequency", "0"]
    run += ["--precision", "fp32", "--device", "cpu", "--init-logit-bias", "-5"]
    return [*run, "--output", str(folder), "--name", "run", *more]


def count_run(folder: Path, args: argparse.Namespace) -> dict[str, dict[str, list[dict[str, float]]]]:
    """Phase -> ranks -> the counts of rank 0 and of the last one."""
    calls, results = Calls(), {phase: {} for phase in PHASES[1:]}
    phases_of(folder / "warm", Rank(0, 2, []), calls, args)  # imports what is imported late
    for ranks in args.ranks:
        sent: list[bytes] = []
        for rank in (0, ranks - 1):
            for phase, found in phases_of(folder / f"{ranks}", Rank(rank, ranks, sent), calls, args).items():
                results[phase].setdefault(str(ranks), []).append({name: found[name] for name in (*COLUMNS, LATE)})
    return results


def phases_of(folder: Path, place: Rank, calls: Calls, args: argparse.Namespace) -> dict[str, Counter[str]]:
    """The phases of a run on one rank."""
    import training.run
    from prolip.losses import contrastive
    from training.loop import on_device, save, training_step
    from training.main import parse
    from training.parallel.distributed import World

    names = {"local_rank": place.rank % LOCAL, "local_size": min(LOCAL, place.ranks)}
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
        run.fed.loader.set_epoch(0)
        for step, batch in zip(range(3), run.fed.loader):
            batch = on_device(run.fed, batch, step, world.device)
            counted("step", partial(training_step, run.trained, batch, step))
        late = counted("stop", partial(agree, run, args))
        found["stop"] = Counter({name: value / STEPS for name, value in found["stop"].items()} | {LATE: late})
        run.at.step = 3
        counted("save", partial(save, run))
        if run.kept.saver is not None:
            run.kept.saver.settle(final=True)
        address = str(folder / "run/checkpoints/step_3.pt")
        training.run.close(run)
        if hasattr(training.run, "read_checkpoint"):
            counted("load", partial(training.run.read_checkpoint, address, world))
        else:
            counted("load", partial(training.run.load_checkpoint, address))
    return found


#: Steps over which agreeing is counted, and where the most of them between a request and its answer stand.
STEPS, LATE = 200, "steps until known"


def agree(run: Any, args: argparse.Namespace) -> int:
    """Exchange what is asked between STEPS steps of so many milliseconds; asked again as soon as it was answered."""
    from training.parallel import distributed

    real, now, asked, late = getattr(distributed, "time", None), time.monotonic(), 0, 0
    distributed.time = SimpleNamespace(monotonic=lambda: now)
    try:
        for step in range(STEPS):
            now += args.step_ms / 1000
            stop, *_ = run.health.agreement.exchange(15 if step >= asked else 0, 0, 0)
            if stop:
                late, asked = max(late, step - asked), step + 7  # so that a request comes at any place between answers
    finally:
        distributed.time = real
    return late


def show(value: float) -> str:
    """A count, or a mean of counts, or seconds."""
    return f"{value:,.0f}" if value == int(value) else f"{value:,.3g}"


def print_table(title: str, results: dict[str, list[dict[str, float]]]) -> None:
    """Rank 0, one other rank, and all of them together."""
    columns = [*COLUMNS, LATE] if title.startswith("Stop") else COLUMNS
    print(f"\n{title}\n\n| ranks | of | {' | '.join(columns)} |\n|---:|---" + "|---:" * len(columns) + "|")
    for ranks, (first, other) in results.items():
        every = {name: first[name] + (int(ranks) - 1) * other[name] for name in COLUMNS} | {LATE: other.get(LATE)}
        for who, counts in (("rank 0", first), ("another", other), ("all", every)):
            print(f"| {int(ranks):,} | {who} | {' | '.join(show(counts[name]) for name in columns)} |")


def compare(args: argparse.Namespace) -> None:
    """The tables of an older checkout and of this one."""
    with tempfile.TemporaryDirectory() as name:
        if "start" in args.phases:
            write_data(Path(name), args.shards)
        for number, checkout in enumerate(filter(None, (args.old, ROOT))):
            environment = os.environ | {"PYTHONPATH": str(Path(checkout).resolve() / "src"), "OMP_NUM_THREADS": "1"}
            words = [*args.phases, "--shards", args.shards, "--ranks", *args.ranks, "--step-ms", args.step_ms]
            command = [sys.executable, __file__, *words, "--in", name, "--run", Path(name) / f"run{number}"]
            done = subprocess.run([str(word) for word in command], env=environment, stdout=subprocess.PIPE, text=True)
            if done.returncode:
                raise SystemExit(f"counting in {checkout} ended with {done.returncode}: the lines above say why")
            which = "this commit" if checkout == ROOT else "the older checkout"
            for phase, results in json.loads(done.stdout.splitlines()[-1]).items():
                about = f" on {args.shards:,} shards" if phase == "start" else ""
                print_table(f"{phase.capitalize()}{about}, {which}", results)


def parse_flags(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("phases", nargs="*", metavar="PHASE", help=f"what is counted: {', '.join(PHASES)}; default: all")
    add("--shards", type=int, default=5000, help="training shards; default: %(default)s")
    add("--ranks", type=int, nargs="+", default=RANKS, help="numbers of ranks; default: %(default)s")
    add("--step-ms", type=float, default=74, help="milliseconds of a step, for stop; default: %(default)s, ViT-B/16's")
    add("--old", metavar="CHECKOUT", help="of an older commit, whose tables come first")
    for name in ("--in", "--run"):  # of a process that counts
        add(name, dest=name.strip("-") + "_folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    args.phases = args.phases or list(PHASES)
    if unknown := set(args.phases) - set(PHASES):
        parser.error(f"no phase is called {', '.join(sorted(unknown))}: there are {', '.join(PHASES)}")
    if min(args.ranks) < 2 or args.shards < max(args.ranks):
        parser.error(f"--shards {args.shards} for --ranks {max(args.ranks)}: give as many shards or more, and 2 ranks")
    if args.old and not (Path(args.old) / "src" / "training").is_dir():
        parser.error(f"--old {args.old} holds no src/training: give the root of a checkout")
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse_flags(arguments)
    if args.in_folder is None:
        compare(args)
        return
    results = {"start": count_start(args.in_folder, args)} if "start" in args.phases else {}
    if {*args.phases} - {"start"}:
        results |= count_run(args.run_folder, args)
    print("\n" + json.dumps({phase: found for phase, found in results.items() if phase in args.phases}))


if __name__ == "__main__":
    main()
