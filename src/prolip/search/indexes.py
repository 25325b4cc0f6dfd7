"""Approximate indexes: what faiss finds fast in P + 1 dimensions, and how many bytes that takes.

All of them hold `prolip.scores.distance_vectors` and rank by L2, also where an inner product would do: graphs and cells
of vectors whose lengths differ much find little by inner products.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import faiss
import numpy as np
import torch
from torch import Tensor

from prolip.scores import distance_vectors
from prolip.search.exact import BLOCK, GaussianArrays

FLAT, IVF, HNSW, PQ = KINDS = ("flat", "ivf", "hnsw", "pq")
#: faiss by what it takes, which its stubs do not say of parameters.
FAISS: Any = faiss
#: Items below which all are looked at: faiss learns a centre of 39 vectors or more, and finds few of a few.
LEAST = 40
#: Dimensions that half a byte of `pq` stands for, and vectors that a list's centre is learnt from.
PER_CODE, PER_LIST = 4, 64
#: Links M of a point in a graph, 2 M in its lowest layer, of which a point has 1/M in the next higher one; candidates
#: that are looked at while it is built.
LINKS, BUILDING = 32, 128
#: Bytes of an id in a list; of a link; of a row's key, path and captions, about; of its hash, row and end of line.
ID, LINK, ITEM, BESIDE = 8, 4, 120, 24


@dataclass(frozen=True)
class Kind:
    """One of KINDS; lists: of `ivf` and `pq`, 0: as `lists_for`."""

    name: str = FLAT
    lists: int = 0

    def __post_init__(self) -> None:
        if self.name not in KINDS:
            raise ValueError(f"an index of the kind {self.name!r} is unknown: use one of {', '.join(KINDS)}")
        if self.lists < 0:
            raise ValueError(f"{self.lists} lists: give 0 or more")


def lists_for(rows: int) -> int:
    """4 sqrt(N) lists, and no more than PER_LIST rows for each allow."""
    return max(1, min(round(4 * math.sqrt(rows)), rows // PER_LIST))


def make(kind: Kind, width: int, sample: np.ndarray, rows: int) -> faiss.Index:
    """An empty index of vectors (n, width), trained on a sample of them where its kind learns."""
    lists = min(kind.lists or lists_for(rows), len(sample))
    if kind.name == HNSW:
        graph = faiss.IndexHNSWFlat(width, LINKS, faiss.METRIC_L2)
        graph.hnsw.efConstruction = BUILDING
        return graph
    codes = "Flat" if kind.name == IVF else f"PQ{padded(width) // PER_CODE}x4fs"
    size = width if kind.name == IVF else padded(width)
    index: Any = faiss.index_factory(size, f"IVF{lists},{codes}", faiss.METRIC_L2)
    index.cp.min_points_per_centroid = 1  # it warns below 39
    if kind.name == PQ:
        index.pq.cp.min_points_per_centroid = 1
    index.train(fitted(index, sample))
    return index


def padded(width: int) -> int:
    """The next multiple of PER_CODE: zeros change no distance."""
    return -(-width // PER_CODE) * PER_CODE


def fitted(index: faiss.Index, vectors: np.ndarray) -> np.ndarray:
    """Vectors with the zeros that an index was made with."""
    return np.pad(vectors, ((0, 0), (0, index.d - vectors.shape[1]))) if index.d > vectors.shape[1] else vectors


def vectors_of(gallery: GaussianArrays, rows: np.ndarray, constant: float) -> np.ndarray:
    """What an index holds of some rows, (n, P + 1)."""
    return distance_vectors(gallery.factors(rows), constant).numpy()


def sample_of(gallery: GaussianArrays, count: int, constant: float, seed: int = 0) -> np.ndarray:
    """Vectors of `count` rows drawn at random, or of all where there are fewer."""
    rows = np.sort(np.random.default_rng(seed).permutation(len(gallery.mean))[:count])
    return vectors_of(gallery, rows, constant)


def sample_size(kind: Kind, rows: int) -> int:
    """How many vectors its kind learns from."""
    return 1 if kind.name == HNSW else min(rows, max(4096, PER_LIST * (kind.lists or lists_for(rows))))


def search(
    index: faiss.Index, asked: Tensor, count: int, effort: int, alive: np.ndarray | None = None
) -> tuple[Tensor, Tensor]:
    """Rows that are near queries [u, 0], (Q, P + 1) -> (Q, count) int64, -1 where there are fewer, and L2 squared.

    effort: lists that are read, or candidates that a graph is walked with, `count` at least; alive: (N,) bool, rows
    that may be found, None: all.
    """
    kept = None if alive is None else FAISS.IDSelectorBitmap(np.packbits(alive, bitorder="little"))
    if isinstance(index, faiss.IndexHNSW):
        given = FAISS.SearchParametersHNSW(efSearch=max(effort, count), sel=kept)
    else:
        given = FAISS.SearchParametersIVF(nprobe=effort, sel=kept)
    vectors = fitted(index, np.ascontiguousarray(asked.numpy(), dtype=np.float32))
    found, rows = index.search(vectors, count, params=given)
    return torch.from_numpy(rows), torch.from_numpy(found)


def memory_per_item(kind: Kind, width: int) -> float:
    """Bytes of an item that a search keeps in memory, without what is the same for any number of them.

    flat: nothing but what the system keeps of the mapped vectors.
    """
    if kind.name == FLAT:
        return 0.0
    if kind.name == HNSW:
        return 4 * width + LINK * (2 * LINKS + LINKS / (LINKS - 1)) + 12
    return ID + (4 * width if kind.name == IVF else padded(width) / PER_CODE / 2)


def table(items: int, dim: int, probabilistic: bool = True) -> str:
    """How much room an index by csd takes, a row for every kind; on disk also variances and what is known of an item.

    Most memory while building, beside the process and its model: the sample that it learns from, in three copies
    (vectors, with zeros, normal to its centres), its centres and rows, and a block.
    """
    rows = [
        "| kind | memory per item, bytes | memory, GB | disk, GB | most memory while building, GB | lists |",
        "|---|---|---|---|---|---|",
    ]
    width = dim + 1
    for kind in map(Kind, KINDS):
        memory = memory_per_item(kind, width)
        disk = (4 * (width + dim * probabilistic) + ITEM + BESIDE + memory) * items
        sample = 0 if kind.name == FLAT else 3 * 4 * padded(width) * sample_size(kind, items)
        most = sample + memory * items + 6 * 4 * width * BLOCK
        held = f"{memory:.0f} | {memory * items / 1e9:.2f}" if kind.name != FLAT else "0 (mapped) | 0"
        lists = lists_for(items) if kind.name in (IVF, PQ) else "-"
        rows.append(f"| {kind.name} | {held} | {disk / 1e9:.1f} | {most / 1e9:.1f} | {lists} |")
    return "\n".join(rows)
