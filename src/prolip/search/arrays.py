"""A gallery: Gaussians by row as arrays, in memory or mapped from files, and the vectors that rank them."""
from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from prolip.gaussian import Gaussian
from prolip.losses import Factors
from prolip.scores import Score, Side

#: Rows that a search looks at at once.
BLOCK = 32_768


class GaussianArrays(NamedTuple):
    """N Gaussians and their vectors.

    mean: (N, D) float32; log_var: (N, D) float32, None for points; vector: (N, P + 1) float32, [v, b] of a score that
    factors; reach, lift: max |v| and max(b, 0); alive: (N,) bool, None where nothing was deleted; block: rows that are
    looked at at once.
    """

    mean: np.ndarray
    log_var: np.ndarray | None
    vector: np.ndarray
    reach: float
    lift: float
    alive: np.ndarray | None = None
    block: int = BLOCK

    def blocks(self, first: int = 0, deleted: bool = False) -> Iterator[np.ndarray]:
        """The rows from `first` on, block by block (n,); deleted: those that were deleted, too."""
        for start in range(first, len(self.mean), self.block):
            rows = np.arange(start, min(start + self.block, len(self.mean)))
            kept = rows if self.alive is None or deleted else rows[self.alive[rows]]
            if len(kept):
                yield kept

    def gaussian(self, rows: np.ndarray) -> Gaussian:
        """Those of some rows (M,), in memory."""
        mean = torch.from_numpy(self.mean[rows])
        log_var = None if self.log_var is None else torch.from_numpy(self.log_var[rows])
        return Gaussian(mean, torch.full_like(mean, -torch.inf) if log_var is None else log_var)

    def factors(self, rows: np.ndarray) -> Factors:
        """The vectors of some rows (M,), in memory."""
        both = torch.from_numpy(self.vector[rows])
        return Factors(both[:, :-1], both[:, -1])


def make_arrays(score: Score, z: Gaussian, side: Side = "image") -> GaussianArrays:
    """Those of Gaussians in memory; score: what their vectors are of, which factors."""
    mean, log_var = (x.detach().float().contiguous() for x in z)
    factors = score.factors(Gaussian(mean, log_var), side)
    assert factors is not None
    vector = torch.cat([factors.vector, factors.offset.unsqueeze(-1)], -1).numpy()
    reach, lift = float(factors.vector.norm(dim=-1).max()), max(0.0, float(factors.offset.max()))
    return GaussianArrays(mean.numpy(), None if log_var.isneginf().all() else log_var.numpy(), vector, reach, lift)
