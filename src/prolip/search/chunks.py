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
    factors, whose first columns are the mean where v is; reach, lift: max |v| and max(b, 0); alive: (n,) bool, None
    where nothing was deleted.
    """

    start: int
    mean: np.ndarray
    log_var: np.ndarray | None
    vector: np.ndarray | None
    reach: float = 0.0
    lift: float = 0.0
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
        assert self.vector is not None
        both = torch.from_numpy(np.array(self.vector))
        return Factors(both[:, :-1], both[:, -1])

    @property
    def living(self) -> np.ndarray:
        """Its rows that are not deleted, counted from its first."""
        return np.arange(len(self.mean)) if self.alive is None else np.flatnonzero(self.alive)


def make_chunk(score: Score | None, z: Gaussian, start: int = 0, side: Side = "image") -> Chunk:
    """A chunk in memory; score: what its vectors are of, None where no index serves it."""
    mean, log_var = (np.ascontiguousarray(x.detach().float().numpy()) for x in z)
    points = bool(np.isneginf(log_var).all())
    own = Gaussian(torch.from_numpy(mean), torch.from_numpy(log_var))
    factors = None if score is None else score.factors(own, side)
    if factors is None:
        return Chunk(start, mean, None if points else log_var, None)
    vector = torch.cat([factors.vector, factors.offset.unsqueeze(-1)], -1).numpy()
    reach, lift = float(factors.vector.norm(dim=-1).max()), max(0.0, float(factors.offset.max()))
    return Chunk(start, mean, None if points else log_var, vector, reach, lift)


def gather(chunks: Sequence[Chunk], rows: np.ndarray) -> Gaussian:
    """The Gaussians of rows of the gallery, (M,) -> (M, D)."""
    mean = torch.empty(len(rows), chunks[0].mean.shape[1])
    log_var = torch.full_like(mean, -torch.inf)
    for number, places in places_of(chunks, rows):
        z = chunks[number].gaussian(rows[places] - chunks[number].start)
        mean[places], log_var[places] = z
    return Gaussian(mean, log_var)


def gather_vectors(chunks: Sequence[Chunk], rows: np.ndarray) -> np.ndarray:
    """The vectors of rows of the gallery, (M,) -> (M, P + 1)."""
    first = chunks[0].vector
    assert first is not None
    out = np.empty((len(rows), first.shape[1]), dtype=np.float32)
    for number, places in places_of(chunks, rows):
        chunk = chunks[number]
        assert chunk.vector is not None
        out[places] = chunk.vector[rows[places] - chunk.start]
    return out


def places_of(chunks: Sequence[Chunk], rows: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """Which of `rows` lie in which chunk: (chunk, places in `rows`)."""
    owner = np.searchsorted([chunk.start for chunk in chunks], rows, side="right") - 1
    order = np.argsort(owner, kind="stable")
    found, firsts = np.unique(owner[order], return_index=True)
    return list(zip(found.tolist(), np.split(order, firsts[1:])))
