"""Near-duplicates among millions of images by their signatures: 32 bytes a sample, no embedding kept."""
from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from prolip.curate.tables import BITS, SIGNATURE, read_table

#: Signatures that are compared with all others; more are compared within cells.
FLAT, CELL, PROBES = 100_000, 500, 16
BLOCK = 4096


def radius_of(cosine: float) -> int:
    """Bits by which signatures at this cosine differ on average, arccos(c) / pi of BITS."""
    if not 0 < cosine <= 1:
        raise ValueError(f"--duplicates {cosine}: give the cosine from which images count as one, such as 0.97")
    return math.floor(BITS * math.acos(cosine) / math.pi)


def read_signatures(paths: Sequence[Path]) -> np.ndarray:
    """Of all samples, (N, BITS / 8) uint8; zeros for those that have none."""
    parts = []
    for path in paths:
        column = read_table(path, [SIGNATURE]).columns[SIGNATURE]
        parts.append(b"".join(value if value is not None else bytes(BITS // 8) for value in column))
    return np.frombuffer(b"".join(parts), np.uint8).reshape(-1, BITS // 8)


def duplicates_of(signatures: np.ndarray, quality: np.ndarray, usable: np.ndarray, radius: int) -> np.ndarray:
    """The sample that each one repeats, -1 for what stays, (N,) int64.

    The best first: whatever is within `radius` bits of one that stays repeats it. quality: (N,), larger is better, ties
    by place; usable: (N,) booleans, others repeat nothing and are repeated by nothing. Exact for up to FLAT different
    signatures; of more, those in PROBES cells are looked at.
    """
    repeats = np.full(len(signatures), -1)
    rows = np.flatnonzero(usable)
    if not len(rows):
        return repeats
    rows = rows[np.lexsort((rows, -np.nan_to_num(quality[rows], nan=-np.inf)))]  # best first
    different, first, group = np.unique(signatures[rows], axis=0, return_index=True, return_inverse=True)
    group = group.reshape(-1)
    repeats[rows] = rows[first[group]]  # the best of those with the same signature
    repeats[rows[first]] = -1
    stays = np.ones(len(different), dtype=bool)
    near = neighbours(different, radius)
    for one in np.argsort(first):
        if stays[one] and one in near:
            others = near[one][stays[near[one]] & (first[near[one]] > first[one])]
            stays[others] = False
            repeats[rows[first[others]]] = rows[first[one]]
    # whoever repeats what does not stay repeats what that repeats
    chained = repeats >= 0
    further = repeats[repeats[chained]]
    repeats[chained] = np.where(further >= 0, further, repeats[chained])
    return repeats


def neighbours(different: np.ndarray, radius: int) -> dict[int, np.ndarray]:
    """Signature -> the others within `radius` bits, of those that have any."""
    flat = faiss.IndexBinaryFlat(BITS)
    index: Any = flat
    if len(different) > FLAT:
        index = faiss.IndexBinaryIVF(flat, BITS, len(different) // CELL)
        index.nprobe = PROBES
        sample = np.random.default_rng(0).choice(len(different), min(len(different), 50 * index.nlist), replace=False)
        index.train(np.ascontiguousarray(different[np.sort(sample)]))
    index.add(different)
    found = {}
    for start in range(0, len(different), BLOCK):
        limits, _, places = index.range_search(np.ascontiguousarray(different[start : start + BLOCK]), radius + 1)
        for row in np.flatnonzero(np.diff(limits) > 1):
            others = places[limits[row] : limits[row + 1]]
            found[start + row] = np.sort(others[others != start + row])
    return found
