"""Approximate indexes: faiss by L2 among `prolip.scores.distance_vectors`, and their memory."""

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
#: faiss with its parameter classes, which its stubs lack.
FAISS: Any = faiss
LEAST = 40  # with fewer items a search reads all: faiss needs 39 vectors to learn a centre
PER_CODE, PER_LIST = 4, 64  # dimensions in half a byte of `pq`, and vectors used to learn the centre of a list
#: Links M of a point in a graph (2 M in its lowest layer; 1/M of the points are in the next), and candidates visited
#: while building it.
LINKS, BUILDING = 32, 128
#: Bytes: of an id in a list; of a link; about, of a row's key, path and captions; of its hash, row and line end.
ID, LINK, ITEM, BESIDE = 8, 4, 120, 24


@dataclass(frozen=True)
class IndexSpec:
    """The type of an index. name: one of KINDS; lists: of `ivf` and `pq`, 0: 4 sqrt(items)."""

    name: str = FLAT
    lists: int = 0

    def __post_init__(self) -> None:
        if self.name not in KINDS:
            raise ValueError(f"an index of the type {self.name!r} is unknown: use one of {', '.join(KINDS)}")

    def lists_for(self, rows: int) -> int:
        """Return the lists of an index of this many rows: 4 sqrt(rows) by default, with at least PER_LIST rows each."""
        return self.lists or max(1, min(round(4 * math.sqrt(rows)), rows // PER_LIST))

    def sample_size(self, rows: int) -> int:
        """Return the number of vectors that the index learns from."""
        return 1 if self.name == HNSW else min(rows, max(4096, PER_LIST * self.lists_for(rows)))

    def memory_per_item(self, width: int) -> float:
        """Return the bytes per item that a search keeps in memory; for `flat`, only the cache of mapped vectors."""
        if self.name == FLAT:
            return 0.0
        if self.name == HNSW:
            return 4 * width + LINK * (2 * LINKS + LINKS / (LINKS - 1)) + 12
        return ID + (4 * width if self.name == IVF else padded(width) / PER_CODE / 2)


def make(spec: IndexSpec, gallery: GaussianArrays, constant: float) -> faiss.Index:
    """Return an empty index, trained on a random sample of the gallery if its type learns."""
    rows, width = len(gallery.mean), gallery.vector.shape[1]
    if spec.name == HNSW:
        graph = faiss.IndexHNSWFlat(width, LINKS, faiss.METRIC_L2)
        graph.hnsw.efConstruction = BUILDING
        return graph
    sample = np.sort(np.random.default_rng(0).permutation(rows)[: spec.sample_size(rows)])
    lists = min(spec.lists_for(rows), len(sample))
    codes = "Flat" if spec.name == IVF else f"PQ{padded(width) // PER_CODE}x4fs"
    index: Any = faiss.index_factory(width if spec.name == IVF else padded(width), f"IVF{lists},{codes}")
    index.cp.min_points_per_centroid = 1  # it warns below 39
    if spec.name == PQ:
        index.pq.cp.min_points_per_centroid = 1
    index.train(fitted(index, vectors_of(gallery, sample, constant)))
    return index


def padded(width: int) -> int:
    """Return the next multiple of PER_CODE; zeros do not change distances."""
    return -(-width // PER_CODE) * PER_CODE


def fitted(index: faiss.Index, vectors: np.ndarray) -> np.ndarray:
    """Return vectors padded with zeros to the index's width."""
    return np.pad(vectors, ((0, 0), (0, index.d - vectors.shape[1]))) if index.d > vectors.shape[1] else vectors


def vectors_of(gallery: GaussianArrays, rows: np.ndarray, constant: float) -> np.ndarray:
    return distance_vectors(gallery.factors(rows), constant).numpy()


def search(
    index: faiss.Index, asked: Tensor, count: int, probe: int, alive: np.ndarray | None = None
) -> tuple[Tensor, Tensor]:
    """Return rows near queries [u, 0], (Q, P + 1) -> (Q, count), -1 if there are fewer, and squared L2 distances."""
    kept = None if alive is None else FAISS.IDSelectorBitmap(np.packbits(alive, bitorder="little"))
    if isinstance(index, faiss.IndexHNSW):
        given = FAISS.SearchParametersHNSW(efSearch=max(probe, count), sel=kept)
    else:
        given = FAISS.SearchParametersIVF(nprobe=probe, sel=kept)
    vectors = fitted(index, np.ascontiguousarray(asked.numpy(), dtype=np.float32))
    found, rows = index.search(vectors, count, params=given)
    return torch.from_numpy(rows), torch.from_numpy(found)


def table(items: int, dim: int, probabilistic: bool = True) -> str:
    """Return the memory and disk space of an index by csd, a row per type. Building needs three samples and a block."""
    lines = [
        "| type | bytes per item | memory, GB | disk, GB | building, GB | lists |",
        "|---|---|---|---|---|---|",
    ]
    width = dim + 1
    for spec in map(IndexSpec, KINDS):
        memory = spec.memory_per_item(width)
        disk = (4 * (width + dim * probabilistic) + ITEM + BESIDE + memory) * items
        sample = 0 if spec.name == FLAT else 3 * 4 * padded(width) * spec.sample_size(items)
        most = sample + memory * items + 6 * 4 * width * BLOCK
        held = f"{memory:.0f} | {memory * items / 1e9:.2f}" if spec.name != FLAT else "0 (mapped) | 0"
        lists = spec.lists_for(items) if spec.name in (IVF, PQ) else "-"
        lines.append(f"| {spec.name} | {held} | {disk / 1e9:.1f} | {most / 1e9:.1f} | {lists} |")
    return "\n".join(lines)
