"""Similarities that factor: similarity_ij = u_i . v_j + a_i + b_j, what one row of either side brings to all its pairs.

Whatever factors is scored by matrix products in the loss of `contrastive.py`, on one rank or round the ring. A score
may have one function for both sides, as those here, or one for the queries and one for the gallery. KL and JS factor
too, in 2 D and 4 D dimensions, but subtract terms |mean|^2 / variance from each other, which float32 does not survive
where variances are small: they go the way of `tiled.py`, with elk and all that does not factor.
"""
from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from prolip.gaussian import Gaussian


class Factors(NamedTuple):
    """One side of a similarity_ij = vector_i . vector_j + offset_i + offset_j: vector (B, P), offset (B,)."""

    vector: Tensor
    offset: Tensor

    def select(self, part: slice) -> Factors:
        """Some of the rows."""
        return Factors(self.vector[part], self.offset[part])


def csd_factors(z: Gaussian) -> Factors:
    """`measures.csd_similarity`, mean_i.mean_j - (trace_i + trace_j)/2, ProLIP (A.1): (B, D) -> P = D."""
    return Factors(z.mean, -0.5 * z.trace)


def mean_factors(z: Gaussian) -> Factors:
    """`measures.mean_cosine`, the variances ignored: (B, D) -> P = D."""
    return Factors(F.normalize(z.mean, dim=-1), z.mean.new_zeros(len(z.mean)))


def wasserstein2_factors(z: Gaussian) -> Factors:
    """-1/2 `measures.wasserstein2`, PCME++ 2.2: (B, D) -> P = 2 D.

    mean_i.mean_j + sigma_i.sigma_j - (|mean_i|^2 + trace_i + |mean_j|^2 + trace_j)/2; its absolute error is that of
    `measures.pairwise_wasserstein2`.
    """
    return Factors(torch.cat([z.mean, (0.5 * z.log_var).exp()], -1), -0.5 * (z.mean.square().sum(-1) + z.trace))
