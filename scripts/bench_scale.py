"""What a run on thousands of ranks touches, counted on one machine: python scripts/bench_scale.py start [--old FOLDER]

Ranks are simulated: rank 0 runs, what it broadcasts is kept, and the last rank runs with that. No other rank differs
from the last one. Parts:

  start   files that a rank looks up, opens and lists, bytes that it reads and receives, and its processor seconds, from
          the list of shards and of a test set to the first sample of its first stream
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).parents[1]
RANKS = (2, 8, 64, 512, 4096)
#: Of a shard, as its index has them, and links to one file, of which file systems allow some 65,000.
SAMPLES, LINKS = 10_000, 10_000
TEST_SHARDS = 16
COLUMNS = ("looked up", "opened", "listed", "read", "received", "seconds")


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
        self.found = Counter()
        before, start = bytes_read(), time.process_time()
        self.on = True
        try:
            yield self.found
        finally:
            self.on = False
            self.found["seconds"] = time.process_time() - start  # type: ignore[assignment]
            self.found["read"] = bytes_read() - before


def bytes_read() -> int:
    """Bytes that this process has read from files and pipes so far; 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/io").read_text(encoding="utf-8").split()[1])
    except OSError:
        return 0


@contextmanager
def one_of(rank: int, ranks: int, sent: list[bytes], found: Counter[str]) -> Iterator[None]:
    """A process group that is this rank alone: what rank 0 broadcasts goes to `sent`, from which others take it."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    waiting = iter(list(sent))

    def broadcast(box: list[Any], *_: Any, **options: Any) -> None:
        if rank == 0:
            sent.append(pickle.dumps(list(box)))
        else:
            box[:] = pickle.loads(data := next(waiting))
            found["received"] += len(data)

    def gather(boxes: list[Any], value: Any, **options: Any) -> None:
        boxes[:] = [value] * ranks

    real = dist.broadcast_object_list, dist.all_gather_object
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    dist.broadcast_object_list, dist.all_gather_object = broadcast, gather
    try:
        yield
    finally:
        dist.broadcast_object_list, dist.all_gather_object = real
        dist.destroy_process_group()


# --- start ------------------------------------------------------------------------------------------------------------
def settings(folder: Path, shards: int) -> Any:
    """A run on the shards, whose buffer opens one of them for a first sample, evaluated on the test set."""
    from training.main import parse

    data = ["--train-data", f"{folder}/{{000000..{shards - 1:06d}}}.tar", "--val-data", f"shards:{folder}/test"]
    return parse([*data, "--workers", "1", "--batch-size", "8", "--shuffle-buffer", "1", "--model", "ProLIP-ViT-test"])


def begin(config: Any, rank: int, ranks: int) -> None:
    """The start of a run on one rank, as far as it touches data, up to a first sample."""
    import torch

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
            with calls.counting() as found, one_of(rank, ranks, sent, found):
                begin(config, rank, ranks)
            pair.append({name: found[name] for name in COLUMNS})
        results[str(ranks)] = pair
    return results


def print_start(label: str, results: dict[str, list[dict[str, float]]]) -> None:
    """A table: rank 0, one other rank, and all of them together."""
    print(f"\n{label}\n| ranks | of | {' | '.join(COLUMNS)} |\n" + "|---" * (len(COLUMNS) + 2) + "|")
    for ranks, (first, other) in results.items():
        every = {name: first[name] + (int(ranks) - 1) * other[name] for name in COLUMNS}
        for who, counts in (("rank 0", first), ("another", other), ("all", every)):
            cells = [f"{counts[name]:,.2f}" if name == "seconds" else f"{counts[name]:,}" for name in COLUMNS]
            print(f"| {int(ranks):,} | {who} | {' | '.join(cells)} |")


def start(args: argparse.Namespace) -> None:
    """The tables of this checkout and of an older one."""
    with tempfile.TemporaryDirectory() as name:
        write_data(Path(name), args.shards)
        for checkout in filter(None, (args.old, ROOT)):
            environment = os.environ | {"PYTHONPATH": str(Path(checkout).resolve() / "src"), "OMP_NUM_THREADS": "1"}
            words = ["start", "--shards", args.shards, "--ranks", *args.ranks, "--in", name]
            command = [sys.executable, __file__, *map(str, words)]
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            which = "this commit" if checkout == ROOT else "the older checkout"
            print_start(f"Start on {args.shards:,} shards, {which}", json.loads(done.stdout.splitlines()[-1]))


def parse_flags(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["start"], help="what is counted")
    parser.add_argument("--shards", type=int, default=5000, help="training shards; default: %(default)s")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="numbers of ranks; default: %(default)s")
    parser.add_argument("--old", help="a checkout of an older commit, whose table comes first")
    parser.add_argument("--in", dest="folder", help=argparse.SUPPRESS)  # of a process that counts
    args = parser.parse_args(arguments)
    if min(args.ranks) < 2 or args.shards < max(args.ranks):
        parser.error(f"--shards {args.shards} for --ranks {max(args.ranks)}: give as many shards or more, and 2 ranks")
    if args.old and not (Path(args.old) / "src" / "training").is_dir():
        parser.error(f"--old {args.old} holds no src/training: give the root of a checkout")
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse_flags(arguments)
    if args.folder:
        print(json.dumps(count_start(Path(args.folder), args)))
    else:
        start(args)


if __name__ == "__main__":
    main()
