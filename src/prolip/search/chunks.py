"""A gallery in parts: Gaussians of consecutive rows as arrays, in memory or mapped from files."""
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from prolip.gaussian import Gaussian
from prolip.losses import Factors
from prolip.scores import Score, Side


class Chunk(NamedTuple):
    """Rows `start` to `start + len(mean) - 1` of a gallery.

    mean: (n, D) float32; log_var: (n, D) float32, None for points; vector: (n, P + 1) float32, [v, b] of a score that
    factors; reach, lift: max |v| and max(b, 0); alive: (n,) bool, None where nothing was deleted.
    """

    start: int
    mean: np.ndarray
    log_var: np.ndarray | None
    vector: np.ndarray
    reach: float
    lift: float
    alive: np.ndarray | None = None

    def gaussian(self, rows: np.ndarray | slice = slice(None)) -> Gaussian:
        """Some of its rows, counted from its first, in memory."""
        mean = torch.from_numpy(np.array(self.mean[rows], dtype=np.float32))
        if self.log_var is None:
            return Gaussian(mean, torch.full_like(mean, -torch.inf))
        return Gaussian(mean, torch.from_numpy(np.array(self.log_var[rows], dtype=np.float32)))

    @property
    def factors(self) -> Factors:
        """Those of its vectors."""
        both = torch.from_numpy(np.array(self.vector))
        return Factors(both[:, :-1], both[:, -1])

    @property
    def living(self) -> np.ndarray:
        """Its rows that are not deleted, counted from its first."""
        return np.arange(len(self.mean)) if self.alive is None else np.flatnonzero(self.alive)


def make_chunk(score: Score, z: Gaussian, start: int = 0, side: Side = "image") -> Chunk:
    """A chunk in memory; score: what its vectors are of, which factors."""
    mean, log_var = (x.detach().float().contiguous() for x in z)
    factors = score.factors(Gaussian(mean, log_var), side)
    assert factors is not None
    vector = torch.cat([factors.vector, factors.offset.unsqueeze(-1)], -1).numpy()
    reach, lift = float(factors.vector.norm(dim=-1).max()), max(0.0, float(factors.offset.max()))
    return Chunk(start, mean.numpy(), None if log_var.isneginf().all() else log_var.numpy(), vector, reach, lift)


def gather(chunks: Sequence[Chunk], rows: np.ndarray) -> Gaussian:
    """The Gaussians of rows of the gallery, (M,) -> (M, D)."""
    mean = torch.empty(len(rows), chunks[0].mean.shape[1])
    log_var = torch.full_like(mean, -torch.inf)
    for chunk, places in places_of(chunks, rows):
        mean[places], log_var[places] = chunk.gaussian(rows[places] - chunk.start)
    return Gaussian(mean, log_var)


def gather_vectors(chunks: Sequence[Chunk], rows: np.ndarray) -> np.ndarray:
    """The vectors of rows of the gallery, (M,) -> (M, P + 1)."""
    out = np.empty((len(rows), chunks[0].vector.shape[1]), dtype=np.float32)
    for chunk, places in places_of(chunks, rows):
        out[places] = chunk.vector[rows[places] - chunk.start]
    return out


def places_of(chunks: Sequence[Chunk], rows: np.ndarray) -> list[tuple[Chunk, np.ndarray]]:
    """Which of `rows` lie in which chunk: (chunk, places in `rows`)."""
    owner = np.searchsorted([chunk.start for chunk in chunks], rows, side="right") - 1
    order = np.argsort(owner, kind="stable")
    found, firsts = np.unique(owner[order], return_index=True)
    return list(zip([chunks[number] for number in found], np.split(order, firsts[1:])))
