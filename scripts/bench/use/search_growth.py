"""`search.py --grow`: the cost to add a row and to answer a query while an index grows, next to faiss alone.

One folder holds the `--items` rows, added as `prolip search build` adds them by default. At each size of `--at` every
search is measured: exact, and by each of `--index-types`, whose approximate index is built from all rows and deleted
before the next. *faiss alone* is one faiss call on the mapped data of the index: its vectors, or the same approximate
index with the same effort. Each result is saved in the folder at once, so the same command resumes a killed run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "scripts")]

import faiss
import numpy as np
import torch
import torch.nn.functional as F

from bench.common import forget_peak, held
from prolip.gaussian import Gaussian
from prolip.scores import CSDScore, index_vectors
from prolip.search import ann
from prolip.search.ann import BESIDE, FLAT, HNSW, ITEM, IndexSpec
from prolip.search.index import CHUNK, Part, SearchIndex
from prolip.search.store import NEAR
from prolip.utils.outputs import check_output, replacing

RESULTS = "results.json"
#: Options that must be equal to resume a run.
SAME = ("dim", "queries", "clusters", "trace", "trace_spread", "top", "seed")
#: Queries that run one by one, and at once; most rows of a piece, after which its cost is saved.
ALONE, TOGETHER, PIECE = 8, 64, 131_072
ADD, LAST, EXACTLY, BUILD, FAISS = "add", "add, last piece", "exactly", ", build", ", faiss alone"
COLUMNS = {
    "effort": "effort",
    "rate": "rows/s",
    "written": "bytes a row",
    "alone": "1 query, ms",
    "together": f"{TOGETHER} queries, ms",
    "recall": "recall",
    "peak": "peak GB",
    "own": "own GB",
    "files": "files open",
}
PLACES = {"alone": 2, "together": 1, "recall": 4, "peak": 2, "own": 2}
Row = dict[str, Any]


def gaussians(count: int, args: argparse.Namespace, number: int) -> Gaussian:
    """Return rows of the synthetic gallery, or queries. number: the part's, which seeds its randomness."""
    g = torch.Generator().manual_seed(1_000_003 * args.seed + number)
    centres = torch.randn(args.clusters, args.dim, generator=torch.Generator().manual_seed(args.seed))
    own = F.normalize(centres, dim=1)[torch.randint(0, args.clusters, (count,), generator=g)]
    mean = F.normalize(own + torch.randn(count, args.dim, generator=g) / args.dim**0.5, dim=1)
    trace = args.trace * (args.trace_spread * torch.randn(count, 1, generator=g)).exp()
    within = 0.3 * torch.randn(count, args.dim, generator=g)
    return Gaussian(mean, (trace / args.dim).log() + within - 0.045)


def written() -> int:
    """Return the bytes that this process has written."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar"))


def files_in(folder: Path) -> int:
    """Count the open descriptors of this process in a folder; mapped files need none."""
    links = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the descriptor of the listing itself
            links.append(os.readlink(f"/proc/self/fd/{number}"))
    return sum(link.startswith(f"{folder.resolve()}{os.sep}") for link in links)


class Results:
    """Results saved in a file, a row per (items, by). ValueError for a folder with other options."""

    def __init__(self, folder: Path, args: argparse.Namespace):
        self.path, own = folder / RESULTS, {name: getattr(args, name) for name in SAME}
        kept: dict[str, Any] = (
            json.loads(self.path.read_bytes()) if self.path.exists() else {"options": own, "rows": []}
        )
        if other := [
            f"--{name.replace('_', '-')} {value}" for name, value in kept["options"].items() if own[name] != value
        ]:
            raise ValueError(f"{folder} holds a run with {' '.join(other)}. Give the same, or another --folder")
        self.options, self.rows = kept["options"], kept["rows"]

    def find(self, items: int, by: str) -> Row | None:
        return next((row for row in self.rows if (row["items"], row["by"]) == (items, by)), None)

    def add(self, items: int, by: str, row: Row) -> None:
        """Save a row, replacing an earlier one, and print it."""
        self.rows = [x for x in self.rows if (x["items"], x["by"]) != (items, by)] + [{"items": items, "by": by} | row]
        with replacing(self.path) as temporary:
            temporary.write_text(json.dumps({"options": self.options, "rows": self.rows}), encoding="utf-8")
        print(line(f"{items:,}", by, row), flush=True)


def line(items: str, by: str, row: Row) -> str:
    """Format a row of the table, with a dash for a missing value."""
    cells = [
        value if isinstance(value, str) else f"{value:,.{PLACES.get(name, 0)}f}"
        for name in COLUMNS
        for value in [row.get(name, "-")]
    ]
    return f"| {items} | {by} | {' | '.join(cells)} |"


def clock(args: argparse.Namespace) -> float:
    """Return seconds: wall-clock, or processor time with --processor-time."""
    return time.process_time() if args.processor_time else time.perf_counter()


@contextmanager
def measured(row: Row, args: argparse.Namespace, rows: int = 0) -> Iterator[Row]:
    """Record peak memory and the process's own memory at the end; for `rows` also speed and bytes.

    The block may record seconds to subtract in "aside".
    """
    forget_peak()
    before, started, row["aside"] = written(), clock(args), 0.0
    yield row
    seconds = clock(args) - started - row.pop("aside")
    row |= {"peak": held("VmHWM") / 1e9, "own": held("RssAnon") / 1e9}
    if rows:
        row |= {"rate": rows / seconds, "written": (written() - before) / rows}


# --- adding ----------------------------------------------------------------------------------------------------------
def parts(args: argparse.Namespace, start: int, end: int, row: Row) -> Iterator[Part]:
    """Yield rows of the gallery in appends of CHUNK from any start. The time to create them is recorded in "aside"."""
    while start < end:
        made = clock(args)
        number, skipped = divmod(start, CHUNK)
        z = gaussians(CHUNK, args, number + 1).select(slice(skipped, min(CHUNK, skipped + end - start)))
        start += len(z.mean)
        items = [{"key": str(key)} for key in range(start - len(z.mean), start)]
        row["aside"] += clock(args) - made
        yield Part(items, z, start)


def add(index: SearchIndex, results: Results, items: int, args: argparse.Namespace) -> None:
    """Add rows up to `items` in pieces. Record the cost of all, with big merges of keys, and of the last piece."""
    while (held := len(index.store)) < items:
        end = min(items, held + min(PIECE, max(CHUNK, items // 8)))
        with measured(row := Row(), args, end - held):
            index.append("synthetic", parts(args, held, end, row))
        row["files"] = files_in(index.store.folder)
        whole = results.find(items, ADD) or {"rows": 0, "seconds": 0.0, "bytes": 0.0, "peak": 0.0}
        totals = {
            "rows": whole["rows"] + end - held,
            "seconds": whole["seconds"] + (end - held) / row["rate"],
            "bytes": whole["bytes"] + (end - held) * row["written"],
        }
        means = {"rate": totals["rows"] / totals["seconds"], "written": totals["bytes"] / totals["rows"]}
        results.add(items, LAST, row)
        results.add(items, ADD, row | totals | means | {"peak": max(row["peak"], whole["peak"])})


# --- asking ----------------------------------------------------------------------------------------------------------
def asked(search: Callable[[Gaussian], torch.Tensor], args: argparse.Namespace) -> tuple[Row, np.ndarray]:
    """Return the median milliseconds of queries, and the rows that all of them find (Q, k)."""
    queries, row = gaussians(args.queries, args, 0), Row()

    def taken(some: slice) -> float:
        started = clock(args)
        search(queries.select(some))
        return 1000 * (clock(args) - started)

    with measured(row, args):
        found = search(queries).numpy()  # also loads the data, so that later searches find it in memory
        row["alone"] = float(np.median([taken(slice(i, i + 1)) for i in range(min(ALONE, args.queries))]))
        row["together"] = float(np.median([taken(slice(0, TOGETHER)) for _ in range(args.rounds)]))
    return row, found


def recall(found: np.ndarray, want: np.ndarray) -> float:
    return float((found[:, :, None] == want[:, None]).any(1).mean())


def measure(index: SearchIndex, kind: str, effort: int, results: Results, args: argparse.Namespace) -> None:
    """Search the index and then faiss alone, unless already saved. The first exact search is the reference."""
    items, folder = len(index.store), index.store.folder
    place = folder.parent / f"want-{items}.npy"

    def by_us(queries: Gaussian) -> torch.Tensor:
        return index.search(queries, args.top, effort or None, exactly=not effort).rows

    def by_faiss(queries: Gaussian) -> torch.Tensor:
        if effort:
            assert index._near is not None
            return ann.search(index._near, index.query_vectors(queries), args.top, effort)[0]
        vectors = index_vectors(index.score, queries, gallery=False, side="text")
        assert vectors is not None
        held = index.store.gallery.vector
        return torch.from_numpy(faiss.knn(vectors.numpy(), held, args.top, metric=faiss.METRIC_INNER_PRODUCT)[1])

    for by, search in ((kind, by_us), (kind + FAISS, by_faiss)):
        if results.find(items, by) is None:
            row, found = asked(search, args)
            if not place.exists():
                with replacing(place) as temporary, temporary.open("wb") as file:
                    np.save(file, found)
            row |= {"recall": recall(found, np.load(place)), "files": files_in(folder)}
            results.add(items, by, row | ({"effort": in_words(kind, items)} if effort else {}))


def effort_of(kind: str, items: int) -> int:
    """Return the default effort of a search: candidates in a graph, or lists to read."""
    return 128 if kind == HNSW else max(8, IndexSpec(kind).lists_for(items) // 16)


def in_words(kind: str, items: int) -> str:
    lists = "candidates" if kind == HNSW else f"of {IndexSpec(kind).lists_for(items):,} lists"
    return f"{effort_of(kind, items):,} {lists}"


def turned(folder: Path, kind: str) -> SearchIndex:
    """Return the index with another kind of approximate index, not built yet."""
    store = SearchIndex(folder).store
    files = {name: entry for name, entry in store.values["files"].items() if not name.startswith(NEAR)}
    store.write(kind=asdict(IndexSpec(kind)), near=None, files=files)
    return SearchIndex(folder)


def approximately(folder: Path, kind: str, results: Results, args: argparse.Namespace) -> None:
    """Build the approximate index of all rows, search it, and delete it, unless already saved."""
    index = SearchIndex(folder)
    items = len(index.store)
    if results.find(items, kind + FAISS):
        return
    index = index if index.kind.name == kind else turned(folder, kind)  # a killed run left a part of it
    missing = items - (SearchIndex(folder)._read().ntotal if index.store.values["near"] else 0)  # released at once
    with measured(row := Row(), args, missing):
        index.finish()
    if missing:
        results.add(items, kind + BUILD, row)
    measure(index, kind, effort_of(kind, items), results, args)
    del index
    forget_peak()  # the next measurement must not include this memory
    turned(folder, FLAT)


# --- all -------------------------------------------------------------------------------------------------------------
def room(args: argparse.Namespace, kinds: list[str]) -> int:
    """Return bytes on disk of all rows, and of the largest approximate index twice, as one replaces the other."""
    largest = max((IndexSpec(kind).memory_per_item(args.dim + 1) for kind in kinds), default=0.0)
    return int(args.items * (4 * (2 * args.dim + 1) + ITEM + BESIDE + 2 * largest))


def extrapolated(rows: list[Row], by: str, items: int) -> Row:
    """Extrapolate a row to `items` with a line through all results, without recall and files.

    The line is over N for memory and the cost of a query or a row; over log N for times of `hnsw`; and over sqrt(N),
    the number of lists, for building a row of lists. A cost that falls with N is replaced by its mean.
    """
    kind, builds, out = by.split(",")[0], by.endswith(BUILD), Row()
    for name in ("rate", "written", "alone", "together", "peak", "own"):
        known = [(row["items"], row[name]) for row in rows if row["by"] == by and name in row]
        if len(known) < 2:
            continue
        at, values = (np.array(x, dtype=float) for x in zip(*known))
        times = name in ("rate", "alone", "together")
        scale = np.log if times and kind == HNSW else np.sqrt if times and builds else np.asarray
        costs = 1 / values if name == "rate" else values
        slope, start = np.polyfit(scale(at), costs, 1)
        cost = float(costs.mean() if slope < 0 else slope * scale(items) + start)
        out[name] = 1 / cost if name == "rate" else cost
    return out | ({"effort": in_words(kind, items)} if kind not in (ADD, EXACTLY) and not builds else {})


def table(results: Results, at: list[int], upto: int | None) -> list[str]:
    """Return the table of all results in order, and the extrapolation to `upto` items."""
    head = f"| items | by | {' | '.join(COLUMNS.values())} |"
    lines = [head, f"|--:|---|{'--:|' * len(COLUMNS)}"]
    rows = [row for row in results.rows if row["items"] in at]
    lines += [line(f"{row['items']:,}", row["by"], row) for row in sorted(rows, key=lambda row: row["items"])]
    if upto:
        last = [row["by"] for row in rows if row["items"] == max(at)]
        lines += [line(f"{upto:,} (extrapolated)", by, extrapolated(rows, by, upto)) for by in last]
    return lines


def grow(args: argparse.Namespace, folder: Path) -> None:
    """Measure an index at 1/10, 1/5, 1/2 and all of the items, or at each of `--at`, and print one table."""
    at = sorted({*(args.at or [args.items // share for share in (10, 5, 2)]), args.items})
    if at[-1] != args.items or at[0] < ann.LEAST:
        raise ValueError(f"--at {at}: give {ann.LEAST} or more of each, and at most --items {args.items}")
    kinds, name = [kind for kind in args.index_types if kind != FLAT], f"{args.dim} dimensions"
    mark = f"<!-- {name}: by scripts/bench/use/search.py -->"
    if args.write and args.write.read_text(encoding="utf-8").count(mark) != 2:
        raise ValueError(f"{args.write} must have two lines {mark}. Put them around the table")
    there = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    check_output(folder, folder=True, size=max(0, room(args, kinds) - there))
    folder.mkdir(parents=True, exist_ok=True)
    results, place = Results(folder, args), folder / "index"
    print(
        f"{args.items:,} items, {args.dim} dimensions, {args.queries} queries, recall@{args.top}, {args.threads}"
        f" threads, faiss {faiss.__version__}",
        flush=True,
    )
    if not (place / "index.json").exists():
        SearchIndex.create(place, CSDScore(), args.dim)
    for items in at:
        held = len(SearchIndex(place).store)
        if held < items:
            add(turned(place, FLAT), results, items, args)
        if held <= items:
            measure(SearchIndex(place), EXACTLY, 0, results, args)
            for kind in kinds:
                approximately(place, kind, results, args)
    lines = table(results, at, args.extrapolate)
    print("", *lines, sep="\n")
    if args.write:
        from studies.tables import write

        write(args.write, {name: lines}, "bench/use/search")
