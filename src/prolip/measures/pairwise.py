"""Measures between all pairs of two sets of Gaussians: f(p, q) with p (B1, D) and q (B2, D) -> (B1, B2).

Four are matrix products; the others apply the paired formulas to tiles of pairs, in temporaries of `max_elements`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from prolip.gaussian import Gaussian, check_pair, without_autocast
from prolip.measures import paired

# Matrix-product forms subtract 2 m1.m2 from |m1|^2 + |m2|^2, so the *absolute* error of csd_distance and wasserstein2
# is bounded: by (D + 10) eps S, S = |m1|^2 + |m2|^2 + trace1 + trace2, for every order of summation (Jeannerod and Rump
# 2013); csd_similarity has a quarter of the bound. Pairs nearer than that are not ordered reliably: use the paired
# function for them.

__all__ = ["WORKSPACE", "pairwise_bhattacharyya", "pairwise_csd_distance", "pairwise_csd_similarity", "pairwise_elk"]
__all__ += ["pairwise_inclusion_test", "pairwise_js", "pairwise_kl", "pairwise_log_inclusion", "pairwise_mean_cosine"]
__all__ += ["pairwise_wasserstein2"]

WORKSPACE = 2**22  # default `max_elements`: 16 MiB per temporary tensor in float32


def check_pairwise(p: Gaussian, q: Gaussian, names: tuple[str, str] = ("p", "q")) -> tuple[Gaussian, Gaussian]:
    """Return two sets (B1, D) and (B2, D) in one dtype, float32 or float64. Raises TypeError and ValueError."""
    p, q = check_pair(p, q, names)
    if p.mean.dim() != 2 or q.mean.dim() != 2:
        got = f"pairwise measures take (B1, D) and (B2, D), got {tuple(p.mean.shape)} and {tuple(q.mean.shape)}"
        raise ValueError(f"{got}: flatten the leading dimensions, or use the paired function with broadcasting")
    return p, q


def all_pairs(
    f: Callable[..., Tensor], rows: Sequence[Tensor], cols: Sequence[Tensor], per_pair: int, max_elements: int
) -> Tensor:
    """Apply f to every row with every column, tile by tile: rows (B1, ...), cols (B2, ...) -> (B1, B2).

    f(*rows[i:i+b1], *cols[j:j+b2]) -> (b1, b2) may build tensors of b1 * b2 * per_pair elements; tiles are cut so that
    this stays within max_elements (or is one pair). With gradients each tile is checkpointed and computed again in the
    backward pass. f must be deterministic: draw random numbers before.
    """
    if max_elements < 1:
        raise ValueError(f"max_elements {max_elements} leaves no workspace: give 1 (one pair at a time) or more")
    b1, b2 = rows[0].shape[0], cols[0].shape[0]
    pairs = max(1, max_elements // max(1, per_pair))  # of the squarest tile
    height = max(1, min(b1, pairs // max(1, min(b2, int(pairs**0.5)))))
    width = max(1, min(b2, pairs // height))
    one_tile = height >= b1 and width >= b2

    def tile(*tensors: Tensor) -> Tensor:
        if one_tile or not torch.is_grad_enabled():
            return f(*tensors)
        return checkpoint(f, *tensors, use_reentrant=False, preserve_rng_state=False)

    # split, not slicing: its backward concatenates the tiles' gradients instead of padding each to the full size.
    row_blocks = list(zip(*(x.split(height) for x in rows)))
    col_blocks = list(zip(*(x.split(width) for x in cols)))
    with without_autocast(rows[0].device):
        return torch.cat([torch.cat([tile(*r, *c) for c in col_blocks], dim=1) for r in row_blocks])


def _products(x: Tensor, y: Tensor) -> Tensor:
    """Compute x @ y.T in the dtype of x, under autocast too: (B1, D), (B2, D) -> (B1, B2)."""
    with without_autocast(x.device):
        return x @ y.mT


def pairwise_csd_similarity(p: Gaussian, q: Gaussian) -> Tensor:
    """Compute `csd_similarity` of all pairs, one matrix product and two vectors: (B1, D), (B2, D) -> (B1, B2)."""
    p, q = check_pairwise(p, q)
    return _products(p.mean, q.mean) - 0.5 * (p.trace.unsqueeze(1) + q.trace)


def pairwise_csd_distance(p: Gaussian, q: Gaussian) -> Tensor:
    """Compute `csd_distance` of all pairs, one matrix product; absolute error as above: -> (B1, B2)."""
    p, q = check_pairwise(p, q)
    a, b = (z.mean.square().sum(-1) + z.trace for z in (p, q))
    return (a.unsqueeze(1) + b) - 2 * _products(p.mean, q.mean)


def pairwise_mean_cosine(p: Gaussian, q: Gaussian) -> Tensor:
    """Compute `mean_cosine` of all pairs: (B1, D), (B2, D) -> (B1, B2)."""
    p, q = check_pairwise(p, q)
    return _products(F.normalize(p.mean, dim=-1), F.normalize(q.mean, dim=-1))


def pairwise_wasserstein2(p: Gaussian, q: Gaussian) -> Tensor:
    """Compute `wasserstein2` of all pairs, two matrix products; absolute error as above: -> (B1, B2)."""
    p, q = check_pairwise(p, q)
    a, b = (z.mean.square().sum(-1) + z.trace for z in (p, q))
    sigmas = _products((0.5 * p.log_var).exp(), (0.5 * q.log_var).exp())
    return (a.unsqueeze(1) + b) - 2 * (_products(p.mean, q.mean) + sigmas)


def _all_pairs_of(measure: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the pairwise function of a paired measure, with its options."""

    def pairwise(p: Gaussian, q: Gaussian, max_elements: int = WORKSPACE, **options: Any) -> Tensor:
        p, q = check_pairwise(p, q)

        def tile(m1: Tensor, l1: Tensor, m2: Tensor, l2: Tensor) -> Tensor:
            sides = Gaussian(m1.unsqueeze(1), l1.unsqueeze(1)), Gaussian(m2.unsqueeze(0), l2.unsqueeze(0))
            return measure(*sides, **options)

        return all_pairs(tile, p, q, per_pair=p.mean.shape[-1], max_elements=max_elements)

    pairwise.__name__ = pairwise.__qualname__ = f"pairwise_{measure.__name__}"
    pairwise.__doc__ = f"Compute `{measure.__name__}` of all pairs (p_i, q_j), tiled: (B1, D), (B2, D) -> (B1, B2)."
    return pairwise


pairwise_kl, pairwise_js = _all_pairs_of(paired.kl), _all_pairs_of(paired.js)
pairwise_elk, pairwise_bhattacharyya = _all_pairs_of(paired.elk), _all_pairs_of(paired.bhattacharyya)
pairwise_log_inclusion = _all_pairs_of(paired.log_inclusion)
pairwise_inclusion_test = _all_pairs_of(paired.inclusion_test)
