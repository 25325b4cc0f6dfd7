"""Check that exact search ranks as brute force does on a model's own Gaussians, for every text and drawing.

    prolip eval emoji --model local-dir:runs/demo/model --data data/icons/lucide.tar --output icons
    python scripts/studies/use/search_recall.py icons

Each text searches for 10 drawings and each drawing for 10 texts by every score: csd and the cosine of means by flat
search, elk by buckets, the model's own score by its own kind of search. Brute force scores all pairs in float64 and
sorts them, equal scores by rising row. Exit code 1 if any order differs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from prolip.corpora.emoji.result import load
from prolip.gaussian import Gaussian
from prolip.methods import find_score
from prolip.scores import Score, Side
from prolip.search.index import Part, SearchIndex

#: Queries scored against all rows at a time.
STEP = 64


def built(folder: Path, score: Score, z: Gaussian, side: Side, rows: int) -> SearchIndex:
    """Build an index on disk, in several chunks."""
    index = SearchIndex.create(folder, score, z.mean.shape[1], side=side)
    keys = [{"key": str(row)} for row in range(len(z.mean))]
    parts = (slice(start, start + rows) for start in range(0, len(keys), rows))
    index.append("memory", (Part(keys[part], z.select(part), part.stop) for part in parts), rows)
    return index


def brute_force(score: Score, queries: Gaussian, z: Gaussian, side: Side, k: int) -> Iterator[Tensor]:
    """Yield the first k rows of each query, with all pairs scored in float64."""
    z = z.to(torch.float64)
    for start in range(0, len(queries.mean), STEP):
        some = queries.select(slice(start, start + STEP)).to(torch.float64)
        scores = score.pairwise(z, some).mT if side == "image" else score.pairwise(some, z)
        yield scores.sort(dim=1, descending=True, stable=True).indices[:, :k]


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="--output folder of prolip eval emoji")
    parser.add_argument("--scores", nargs="+", default=["csd", "mean", "elk"], help="scores of `find_score`")
    parser.add_argument("--top", type=int, default=10)
    parser.add_argument("--rows", type=int, default=1000, help="rows per chunk (default: 1000)")
    args = parser.parse_args()
    print("| Gaussians | score | queries | gallery | same order | search, s | all pairs, s |")
    print("|---|---|---|---|---|---|---|")
    differ = 0
    for folder in args.folders:
        result = load(folder)
        scores = {"own": result.score, **{name: find_score(name)() for name in args.scores}}
        for name, score in scores.items():
            differ += compare(f"{folder} | {name}", score, result.text, result.image, "image", args)
            differ += compare(f"{folder} | {name}", score, result.image, result.text, "text", args)
    sys.exit(1 if differ else 0)


def compare(what: str, score: Score, queries: Gaussian, z: Gaussian, side: Side, args: argparse.Namespace) -> int:
    """Print a row of the table, and return the number of queries that differ."""
    with tempfile.TemporaryDirectory() as place:
        index = built(Path(place) / "index", score, z, side, args.rows)
        started = time.perf_counter()
        found = index.search(queries, args.top, exactly=True).rows
        seconds = time.perf_counter() - started
    want = torch.cat(list(brute_force(score, queries, z, side, args.top)))
    same = int((found[:, : want.shape[1]] == want).all(1).sum())
    total = time.perf_counter() - started - seconds
    print(
        f"| {what} | {len(want):,} {'texts' if side == 'image' else 'drawings'} | {len(z.mean):,} |"
        f" {same:,} | {seconds:.1f} | {total:.1f} |",
        flush=True,
    )
    return len(want) - same


if __name__ == "__main__":
    main()
