"""Recall@k against queries per second of every approximate index, and of the papers' two steps, in one plot.

    PYTHONPATH=src python scripts/bench/use/search.py --output search.png                       # 20,000 x 64
    PYTHONPATH=src python scripts/bench/use/search.py --items 1000000 --dim 768 --index-types flat ivf pq --only-ours
    PYTHONPATH=src python scripts/bench/use/search.py --grow --items 10000000 --dim 192 --folder FOLDER
    PYTHONPATH=src python scripts/bench/use/search.py --grow --items 1000000 --extrapolate 10000000 --folder OTHER

`--grow` measures an index while it grows instead: the cost to add a row and to answer a query, next to faiss alone
(`search_growth.py`).

Synthetic Gaussians have unit means in clusters and lognormal traces, so that some are far wider than others. The
reference is the csd order of exact search. Per kind of index, at several efforts:

- ours: one index of [mean, sqrt(trace)], whose L2 is csd; with pq, candidates are scored again from stored vectors;
- two steps (PCME++ C.5): an index of the means finds K candidates, which are ranked again by distance and stored
  trace; with pq, also from stored vectors. K is 10 to 1,000.

All queries run at once. In each of `--rounds` all settings of both ways take turns, and the median counts. Splitting
the queries between two settings of a way reaches every point between them, so a way reaches its upper hull. The last
lines compare the hull of ours with each undominated setting of two steps: the difference of recall in the same time,
with a 95% interval over resampled queries and rounds, the same for both ways.

Memory is the process's peak (VmHWM) within a step, including pages of mapped files that the system may drop, and its
own memory (RssAnon) at the end of the step.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "scripts")]

import faiss
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.common import forget_peak, held
from bench.use.search_growth import gaussians, grow
from prolip.gaussian import Gaussian
from prolip.scores import CSDScore, MeanScore, Score
from prolip.search.ann import HNSW, IVF, KINDS, PQ, IndexSpec
from prolip.search.exact import TopK
from prolip.search.index import Part, SearchIndex
from prolip.utils.style import IMAGE, TEXT, panels, styled

COLOURS = {IVF: IMAGE, HNSW: TEXT, PQ: "#4f9d69"}
#: Rows created and written at a time.
ROWS = 65_536
LISTS = (1, 2, 3, 4, 6, 8, 10, 12, 16, 24, 32, 64, 128)
EFFORTS = {IVF: LISTS, HNSW: (10, 16, 20, 24, 32, 48, 64, 80, 96, 112, 128, 256), PQ: LISTS}
CANDIDATES, AGAIN = (10, 20, 50, 100, 200, 500, 1000), (10, 20, 50, 100, 200, 500, 1000)


#: Name of a setting, and its search, which returns rows (Q, k).
Setting = tuple[str, Callable[[], torch.Tensor]]
#: Number of bootstrap draws of queries and rounds.
DRAWS = 1000


class Point(NamedTuple):
    """One setting: recall@k of each query (Q,), and seconds of all queries in each round (R,)."""

    setting: str
    found: np.ndarray
    seconds: np.ndarray

    @property
    def recall(self) -> float:
        return float(self.found.mean())

    @property
    def speed(self) -> float:
        """Return queries per second."""
        return len(self.found) / float(np.median(self.seconds))


def gallery(args: argparse.Namespace, position: int = 0) -> Iterator[Part]:
    """Yield the gallery from a position, which must be the start of a part."""
    for number, start in enumerate(range(0, args.items, ROWS)):
        if start < position:
            continue
        count = min(ROWS, args.items - start)
        yield Part([{"key": str(start + i)} for i in range(count)], gaussians(count, args, number + 1), start + count)


@contextlib.contextmanager
def step(name: str, report: bool = True) -> Iterator[None]:
    """Print the seconds of a step and its memory."""
    forget_peak()
    started = time.perf_counter()
    yield
    if report:
        peak, own = (held(field) / 1e9 for field in ("VmHWM", "RssAnon"))
        print(f"| {name} | {time.perf_counter() - started:.1f} | {peak:.2f} | {own:.2f} |", flush=True)


def build(folder: Path, score: Score, kind: str, args: argparse.Namespace) -> SearchIndex:
    """Build a new index, or resume the one that a killed run with the same options left in the folder."""
    is_new = not (folder / "index.json").exists()
    index = SearchIndex.create(folder, score, args.dim, IndexSpec(kind)) if is_new else SearchIndex(folder)
    source = index.source("synthetic")
    held = source["position"]
    if held:
        print(f"{folder.name}: resuming from {held:,} rows", flush=True)
    if not source["done"]:
        index.append("synthetic", gallery(args, held), ROWS)
    index.finish()
    return index


def measure(ways: list[list[Setting]], want: torch.Tensor, args: argparse.Namespace) -> list[list[Point]]:
    """Measure the settings of each way."""
    settings = [setting for way in ways for setting in way]
    clock = time.process_time if args.processor_time else time.perf_counter
    found = [(search().unsqueeze(2) == want.unsqueeze(1)).any(1).double().mean(1).numpy() for _, search in settings]
    seconds = np.zeros((len(settings), args.rounds))
    for number in range(args.rounds):
        for at in np.random.default_rng(number).permutation(len(settings)):
            started = clock()
            settings[at][1]()
            seconds[at, number] = clock() - started
    points = iter([Point(name, *figures) for (name, _), *figures in zip(settings, found, seconds)])
    return [[next(points) for _ in way] for way in ways]


def ours(index: SearchIndex, queries: Gaussian, args: argparse.Namespace) -> list[Setting]:
    def search(effort: int, again: int | None) -> torch.Tensor:
        return index.search(queries, args.top, effort, again).rows

    return [
        (f"effort {effort}" + (f", {again} again" if again else ""), partial(search, effort, again))
        for effort in EFFORTS[index.kind.name]
        for again in (AGAIN if index.kind.name == PQ else (None,))
    ]


def two_steps(means: SearchIndex, queries: Gaussian, args: argparse.Namespace) -> list[Setting]:
    """Return the settings of two steps: csd / 2 is 1 - cosine + half of both traces; means differ by 2 - 2 cosine."""
    traces = torch.cat([means.store.gallery.gaussian(rows).trace for rows in means.store.gallery.blocks()]).double()

    def search(effort: int, count: int) -> torch.Tensor:
        near = means.search(queries, count, effort, count)
        again = near.scores - 0.5 * traces[near.rows.clamp(min=0)]
        best = again.topk(min(args.top, count), dim=1).indices
        return TopK(near.rows.gather(1, best), again).rows

    counts = [count for count in CANDIDATES if args.top <= count <= args.items]
    return [
        (f"effort {effort}, K {count}", partial(search, effort, count))
        for effort in EFFORTS[means.kind.name]
        for count in counts
    ]


def front(points: list[Point]) -> list[Point]:
    """Return the points that no other beats in both recall and speed, by falling speed."""
    out: list[Point] = []
    for point in sorted(points, key=lambda p: (-p.speed, -p.recall)):
        if not out or point.recall > out[-1].recall:
            out.append(point)
    return out


def hull(recall: np.ndarray, seconds: np.ndarray, within: np.ndarray) -> np.ndarray:
    """Return the best recall in a time (P,) of settings (N,), or of two of them, each for a part of the queries.

    In less time than the fastest setting needs, only a part of the queries is answered.
    """
    recall, seconds = np.append(recall, 0.0), np.append(seconds, 0.0)
    early, late = seconds[:, None, None] <= within, seconds[None, :, None] > within
    gap = np.where(early & late, seconds[None, :, None] - seconds[:, None, None], np.inf)
    mixed = recall[:, None, None] + (within - seconds[:, None, None]) / gap * (recall[:, None] - recall[:, None, None])
    return np.where(early, mixed, -np.inf).max((0, 1))


def differences(one: list[Point], other: list[Point]) -> tuple[np.ndarray, np.ndarray]:
    """Return recall of `one` minus that of each of `other` (P,) in the same time, and the 95% interval (2, P)."""
    found, seconds = (np.stack([getattr(p, name) for p in one + other]) for name in ("found", "seconds"))
    generator, n, drawn = np.random.default_rng(0), len(one), []
    for number in range(DRAWS + 1):
        queries, rounds = (
            generator.integers(0, size, size) if number else np.arange(size)
            for size in (found.shape[1], seconds.shape[1])
        )
        recall, taken = found[:, queries].mean(1), np.median(seconds[:, rounds], axis=1)
        drawn.append(hull(recall[:n], taken[:n], taken[n:]) - recall[n:])
    return drawn[0], np.quantile(drawn[1:], (0.025, 0.975), axis=0)


def compare(kind: str, one: list[Point], other: list[Point]) -> str:
    """Report if the intervals allow that `one` has at least the recall of `other` at each speed."""
    other = front(other)
    apart, (low, high) = differences(one, other)
    at = int(apart.argmin())
    return (
        f"{kind}: ours at least as good as two steps at every speed: {'yes' if (high >= 0).all() else 'no'}"
        f" (recall above theirs, of {len(other)} settings: {apart.max():+.4f} to {apart[at]:+.4f}"
        f" [{low[at]:+.4f}, {high[at]:+.4f}] at {other[at].speed:,.0f} queries/s)"
    )


@styled
def plot(curves: dict[str, dict[str, list[Point]]], args: argparse.Namespace) -> Figure:
    """Plot recall against speed: ours in solid lines, two steps in dashed ones, a colour per kind of index."""
    figure, (ax,) = panels(1, 1, width=7.2, height=4.6)
    least = 0.5 / (args.queries * args.top)  # position of a recall of 1, to the right of one missed item
    for kind, way in ((kind, way) for kind, ways in curves.items() for way in ways):
        best = front(curves[kind][way])
        broken = way == "two steps"
        missed, speeds = [max(1 - p.recall, least) for p in best], [p.speed for p in best]
        ax.plot(
            missed,
            speeds,
            color=COLOURS[kind],
            marker="s" if broken else "o",
            markersize=4,
            linestyle=(0, (4, 2)) if broken else "-",
            label=f"{kind}, {way}",
        )
    finish(ax, args, least)
    return figure


def finish(ax: Axes, args: argparse.Namespace, least: float) -> None:
    """Label the axes. The recall axis shows the missed share in powers of ten, more to the left."""
    ax.set_yscale("log")
    ax.set_xscale("log")
    ax.set_xlim(1, least / 1.5)
    missed = [0.5] + [0.1**n for n in range(1, 9) if 0.1**n > 2 * least]
    ax.set_xticks([*missed, least], [f"{1 - share:.{max(1, round(-math.log10(share)))}f}" for share in missed] + ["1"])
    ax.minorticks_off()
    ax.set_xlabel(f"recall@{args.top} of csd's order")
    ax.set_ylabel(f"queries per {'processor second' if args.processor_time else 'second'}")
    ax.set_title(f"{args.items:,} Gaussians of {args.dim} dimensions, {torch.get_num_threads()} thread(s)")
    ax.legend(loc="lower left")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--items", type=int, default=20_000)
    add("--dim", type=int, default=64)
    add("--queries", type=int, default=500)
    add("--clusters", type=int, default=64)
    add("--trace", type=float, default=0.05, help="median trace (default: 0.05)")
    add("--trace-spread", type=float, default=1.0, help="standard deviation of the log trace (default: 1)")
    add("--top", type=int, default=10)
    add("--index-types", nargs="+", default=[IVF, HNSW, PQ], choices=KINDS)
    add("--only-ours", action="store_true", help="omit the papers' two steps")
    add("--grow", action="store_true", help="measure an index while it grows to --items")
    add(
        "--at",
        type=int,
        nargs="+",
        metavar="N",
        help="with --grow: items at which to measure all searches (default: 1/10, 1/5, 1/2 and all)",
    )
    add("--extrapolate", type=int, metavar="N", help="with --grow: also print an extrapolation to N items")
    add("--write", type=Path, metavar="PAGE", help="with --grow: write the table between the marks of a page")
    add("--rounds", type=int, default=3)
    add("--threads", type=int, default=2)
    add("--processor-time", action="store_true", help="use processor time of one thread, for a busy machine")
    add("--seed", type=int, default=0)
    add(
        "--folder",
        help="folder of the indexes; resumes a killed run with the same options (default: a temporary folder)",
    )
    add("--output", metavar="FILE", help="plot to write, PNG")
    args = parser.parse_args()
    if args.processor_time:
        args.threads = 1
    torch.set_num_threads(args.threads)
    faiss.omp_set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    with tempfile.TemporaryDirectory(prefix="bench_search_") as temporary:
        try:
            (grow if args.grow else run)(args, Path(args.folder or temporary))
        except ValueError as error:  # from options, a folder or a disk
            parser.error(str(error))


def run(args: argparse.Namespace, folder: Path) -> None:
    queries = gaussians(args.queries, args, 0)
    print(
        f"{args.items:,} items, {args.dim} dimensions, {args.queries} queries, {args.threads} threads, faiss"
        f" {faiss.__version__}\n\n| step | seconds | peak GB | own GB |\n|---|---|---|---|"
    )
    curves: dict[str, dict[str, list[Point]]] = {}
    want = None
    for kind in args.index_types:
        with step(f"{kind}, build"):
            index = build(folder / kind, CSDScore(), kind, args)
        if want is None:
            with step(f"{args.queries} queries exactly"):
                want = index.search(queries, args.top, exactly=True).rows
        if kind == "flat":
            continue
        with step(f"{kind}, {args.queries} queries"):
            index.search(queries, args.top)
        ways = {"ours": ours(index, queries, args)}
        if not args.only_ours:
            with step(f"{kind} of means, build"):
                means = build(folder / f"{kind}-means", MeanScore(), kind, args)
            ways["two steps"] = two_steps(means, queries, args)
        curves[kind] = dict(zip(ways, measure(list(ways.values()), want, args)))
    print("\n| index | way | recall | queries/s | setting |\n|---|---|---|---|---|")
    for kind, measured in curves.items():
        for way, points in measured.items():
            for p in front(points):
                print(f"| {kind} | {way} | {p.recall:.4f} | {p.speed:.0f} | {p.setting} |")
    for kind, measured in curves.items():
        if "two steps" in measured:
            print(compare(kind, measured["ours"], measured["two steps"]))
    if args.output and curves:
        plot(curves, args).savefig(args.output)


if __name__ == "__main__":
    main()
