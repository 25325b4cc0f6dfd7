"""Approximate indexes: what faiss finds fast in P + 1 dimensions, and how many bytes that takes.

All of them hold `prolip.scores.distance_vectors` and rank by L2, also where an inner product would do: graphs and cells
of vectors whose lengths differ much find little by inner products.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import faiss
import numpy as np
import torch
from torch import Tensor

from prolip.losses import Factors
from prolip.scores import distance_vectors
from prolip.search.chunks import Chunk, gather_vectors

FLAT, IVF, HNSW, PQ = KINDS = ("flat", "ivf", "hnsw", "pq")
#: faiss by what it takes, which its stubs do not say of parameters.
FAISS: Any = faiss
#: Items below which all are looked at: faiss learns a centre of 39 vectors or more, and finds few of a few.
LEAST = 40
#: Dimensions that half a byte of `pq` stands for, and vectors that a list's centre is learnt from.
PER_CODE, PER_LIST = 4, 64
#: Bytes of an id in a list; of a link of a graph, which has 2 M of them in its lowest layer and M in each other.
ID, LINK = 8, 4


@dataclass(frozen=True)
class Kind:
    """One of KINDS with its settings; 0: as `lists_for`, 32 links, 128 candidates while a graph is built."""

    name: str = FLAT
    lists: int = 0
    links: int = 32
    building: int = 128

    def __post_init__(self) -> None:
        if self.name not in KINDS:
            raise ValueError(f"an index of the kind {self.name!r} is unknown: use one of {', '.join(KINDS)}")
        if self.lists < 0 or self.links < 2 or self.building < 1:
            given = f"{self.lists} lists, {self.links} links, {self.building} candidates"
            raise ValueError(f"{given}: give 0, 2 and 1 or more")

    def effort(self, rows: int) -> int:
        """What is looked at by default: lists of `ivf` and `pq`, candidates of `hnsw`."""
        return 128 if self.name == HNSW else max(8, (self.lists or lists_for(rows)) // 16)


def lists_for(rows: int) -> int:
    """4 sqrt(N) lists, and no more than PER_LIST rows for each allow."""
    return max(1, min(round(4 * math.sqrt(rows)), rows // PER_LIST))


def make(kind: Kind, width: int, sample: np.ndarray, rows: int) -> faiss.Index:
    """An empty index of vectors (n, width), trained on a sample of them where its kind learns."""
    lists = min(kind.lists or lists_for(rows), len(sample))
    if kind.name == HNSW:
        graph = faiss.IndexHNSWFlat(width, kind.links, faiss.METRIC_L2)
        graph.hnsw.efConstruction = kind.building
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


def vectors_of(chunk: Chunk, constant: float) -> np.ndarray:
    """What an index holds of a chunk, (n, P + 1)."""
    return distance_vectors(chunk.factors, constant).numpy()


def sample_of(chunks: Sequence[Chunk], count: int, constant: float, seed: int = 0) -> np.ndarray:
    """Vectors of `count` rows drawn at random, or of all where there are fewer."""
    total = sum(len(chunk.mean) for chunk in chunks)
    rows = np.sort(np.random.default_rng(seed).permutation(total)[:count])
    both = torch.from_numpy(gather_vectors(chunks, rows))
    return distance_vectors(Factors(both[:, :-1], both[:, -1]), constant).numpy()


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
    options = {}
    if alive is not None:
        options["sel"] = FAISS.IDSelectorBitmap(np.packbits(alive, bitorder="little"))
    if isinstance(index, faiss.IndexHNSW):
        given = FAISS.SearchParametersHNSW(efSearch=max(effort, count), **options)
    else:
        given = FAISS.SearchParametersIVF(nprobe=effort, **options)
    vectors = fitted(index, np.ascontiguousarray(asked.numpy(), dtype=np.float32))
    found, rows = index.search(vectors, count, params=given)
    return torch.from_numpy(rows), torch.from_numpy(found)


def memory_per_item(kind: Kind, width: int) -> float:
    """Bytes of an item that a search keeps in memory, without what is the same for any number of them.

    flat: nothing but what the system keeps of the mapped vectors; the links of a graph are those of its layers, of
    which a point has 1/M in the next higher one.
    """
    if kind.name == FLAT:
        return 0.0
    if kind.name == HNSW:
        return 4 * width + LINK * (2 * kind.links + kind.links / (kind.links - 1)) + 12
    return ID + (4 * width if kind.name == IVF else padded(width) / PER_CODE / 2)
