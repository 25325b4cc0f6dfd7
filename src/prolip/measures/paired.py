"""Measures between two Gaussians, pair by pair: f(p, q) with the leading dimensions of p and q broadcast.

Every formula is written in quantities that neither overflow nor cancel for log_var in [-40, 10]: the difference of the
log variances, log(v1 + v2) and (m1 - m2)^2. So equal inputs give exactly 0 where the measure is 0 there, symmetric
measures are symmetric and `inclusion_test` antisymmetric to the last bit, and nothing is clamped. Inputs below float32
are computed in float32. v is sigma^2 = exp(log_var) throughout.
"""
from __future__ import annotations

import math

import torch
from torch import Tensor

from prolip.gaussian import Gaussian

FORMS = ("exact", "printed")


def check(p: Gaussian, q: Gaussian) -> tuple[Gaussian, Gaussian]:
    """Both in float32 (or float64), once it is sure that they have one width D. Raises ValueError."""
    for z in (p, q):
        if z.mean.shape != z.log_var.shape:
            raise ValueError(
                f"mean {tuple(z.mean.shape)} and log_var {tuple(z.log_var.shape)} differ: a Gaussian has one variance "
                "per dimension; expand log_var to the shape of mean"
            )
    if p.mean.shape[-1:] != q.mean.shape[-1:]:
        raise ValueError(
            f"Gaussians of shape {tuple(p.mean.shape)} and {tuple(q.mean.shape)} differ in their last dimension D: "
            "compare embeddings of one model"
        )
    return p.float(), q.float()


def _check_paired(p: Gaussian, q: Gaussian) -> tuple[Gaussian, Gaussian]:
    """`check`, and leading dimensions that broadcast. Raises ValueError."""
    p, q = check(p, q)
    try:
        torch.broadcast_shapes(p.mean.shape, q.mean.shape)
    except RuntimeError:
        raise ValueError(
            f"{tuple(p.mean.shape)} and {tuple(q.mean.shape)} are not pairs: give shapes that broadcast, or use the "
            "pairwise_ function for all combinations"
        ) from None
    return p, q


def _square_distance(p: Gaussian, q: Gaussian) -> Tensor:
    """(m1 - m2)^2 per dimension."""
    return (p.mean - q.mean).square()


def inclusion_test_per_dim(inner: Gaussian, outer: Gaussian, eps: float = 0.0, form: str = "exact") -> Tensor:
    """H before its sum over dimensions: > 0 where `inner` is included in `outer`, ProLIP (4): (..., D), (..., D) -> (..., D).

    H = log_inclusion(inner, outer) - log_inclusion(outer, inner). With x = log(v_outer / v_inner) and
    t = tanh(x/2) = (v_outer - v_inner) / (v_outer + v_inner), the two logarithms and the two fractions join into

        H = x/2 - artanh(t/3) + exp(eps) (m1 - m2)^2 * 4t / ((9 - t^2) (v1 + v2)),

    where no term cancels another and each is odd in x: swapping the arguments flips the sign, bit for bit.
    form="printed" adds x/2: the misprinted normalisation of ProLIP (3), which the released runs were trained with.
    eps is the exponent of ProLIP 3.3 and touches the mean distance only. Raises ValueError for another form.
    """
    if form not in FORMS:
        raise ValueError(f"inclusion form {form!r} is unknown: use one of {', '.join(map(repr, FORMS))}")
    inner, outer = _check_paired(inner, outer)
    x = outer.log_var - inner.log_var
    t = torch.tanh(0.5 * x)
    precision = (-torch.logaddexp(inner.log_var, outer.log_var)).exp()
    distance = math.exp(eps) * _square_distance(inner, outer) * precision
    log_ratio = 0.5 * x if form == "exact" else x
    return log_ratio - torch.atanh(t / 3) + distance * (4 * t / (9 - t * t))
