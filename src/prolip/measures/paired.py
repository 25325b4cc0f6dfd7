"""Measures between two Gaussians, pair by pair: f(p, q) with the leading dimensions of p and q broadcast.

Every formula is written in quantities that neither overflow nor cancel for log_var in [-40, 10], in value and in
gradient. v is sigma^2 = exp(log_var) throughout.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from prolip.gaussian import Gaussian, check_pair

__all__ = ["bhattacharyya", "csd_distance", "csd_similarity", "elk", "inclusion_test", "inclusion_test_per_dim", "js"]
__all__ += ["kl", "log_inclusion", "mean_cosine", "wasserstein2"]

INCLUSION_FORMS = ("exact", "printed")


def check_paired(p: Gaussian, q: Gaussian, names: tuple[str, str] = ("p", "q")) -> tuple[Gaussian, Gaussian]:
    """Apply `check_pair`, and require leading dimensions that broadcast. Raises TypeError and ValueError."""
    p, q = check_pair(p, q, names)
    try:
        torch.broadcast_shapes(p.mean.shape, q.mean.shape)
    except RuntimeError:
        shapes = f"{tuple(p.mean.shape)} and {tuple(q.mean.shape)} are not pairs"
        remedy = "give shapes that broadcast, or use the pairwise_ function for all pairs"
        raise ValueError(f"{shapes}: {remedy}") from None
    return p, q


def _square_distance(p: Gaussian, q: Gaussian) -> Tensor:
    return (p.mean - q.mean).square()


def _exp_difference(a: Tensor, b: Tensor, a_minus_b: Tensor) -> Tensor:
    """Return exp(a) - exp(b) without cancellation, given a - b."""
    # The product does not cancel for near values; farther apart its *gradients* would (sinh against cosh).
    near = 2 * (0.5 * (a + b)).exp() * torch.sinh(0.5 * a_minus_b)
    return torch.where(a_minus_b.abs() < 0.25, near, a.exp() - b.exp())


def inclusion_test_per_dim(inner: Gaussian, outer: Gaussian, eps: float = 0.0, form: str = "exact") -> Tensor:
    """Return H per dimension, ProLIP (4), > 0 where outer includes inner: (..., D), (..., D) -> (..., D).

    H = log_inclusion(inner, outer) - log_inclusion(outer, inner). With x = log v2 - log v1, A = log(v1 + 2 v2) and
    B = log(v2 + 2 v1), 1 being inner and 2 outer:

        H = x/2 - (A - B)/2 + exp(eps) (m1 - m2)^2 (exp(-B) - exp(-A)),   (A - B)/2 = artanh(tanh(x/2) / 3).

    Every term is odd in x, and none cancels near x = 0. form="printed" adds x/2: the misprinted normalisation of ProLIP
    (3), which the released runs were trained with. eps: the exponent of ProLIP 3.3.
    """
    if form not in INCLUSION_FORMS:
        raise ValueError(f"inclusion form {form!r} is unknown: use one of {', '.join(map(repr, INCLUSION_FORMS))}")
    inner, outer = check_paired(inner, outer, ("inner", "outer"))
    x = outer.log_var - inner.log_var
    half = torch.atanh(torch.tanh(0.5 * x) / 3)
    a = torch.logaddexp(inner.log_var, outer.log_var + math.log(2))
    b = torch.logaddexp(outer.log_var, inner.log_var + math.log(2))
    distance = math.exp(eps) * _square_distance(inner, outer) * _exp_difference(-b, -a, 2 * half)
    return (0.5 * x if form == "exact" else x) - half + distance


def inclusion_test(inner: Gaussian, outer: Gaussian, eps: float = 0.0, form: str = "exact") -> Tensor:
    """Return H = log_inclusion(inner, outer) - log_inclusion(outer, inner), ProLIP (4): (..., D), (..., D) -> (...).

    > 0 where outer includes inner; antisymmetric. H tests one pair: it also grows with the distance of the means where
    outer is wider. To rank or search use `log_inclusion`.
    """
    return inclusion_test_per_dim(inner, outer, eps, form).sum(-1)


def log_inclusion(inner: Gaussian, outer: Gaussian, eps: float = 0.0) -> Tensor:
    """Return log int p_inner^2 p_outer + D log(2 pi), ProLIP (3) and A.4: (..., D), (..., D) -> (...).

    sum_d -1/2 log v1 - 1/2 log(v1 + 2 v2) - exp(eps) (m1 - m2)^2 / (v1 + 2 v2). eps = 0 gives the integral; training
    uses other values.
    """
    inner, outer = check_paired(inner, outer, ("inner", "outer"))
    log_sum = torch.logaddexp(inner.log_var, outer.log_var + math.log(2))
    distance = math.exp(eps) * _square_distance(inner, outer) * (-log_sum).exp()
    return -(0.5 * (inner.log_var + log_sum) + distance).sum(-1)


def csd_distance(p: Gaussian, q: Gaussian) -> Tensor:
    """Return E|z1 - z2|^2 = |m1 - m2|^2 + trace1 + trace2, PCME++ (1): (..., D), (..., D) -> (...)."""
    p, q = check_paired(p, q)
    return _square_distance(p, q).sum(-1) + (p.trace + q.trace)


def csd_similarity(p: Gaussian, q: Gaussian) -> Tensor:
    """Return m1.m2 - (trace1 + trace2)/2, for unit means 1 - csd_distance/2, ProLIP (A.1)."""
    p, q = check_paired(p, q)
    return (p.mean * q.mean).sum(-1) - 0.5 * (p.trace + q.trace)


def mean_cosine(p: Gaussian, q: Gaussian) -> Tensor:
    """Return the cosine of the means without the variances, the deterministic baseline: (..., D), (..., D) -> (...)."""
    p, q = check_paired(p, q)
    return torch.nn.functional.cosine_similarity(p.mean, q.mean, dim=-1)


def wasserstein2(p: Gaussian, q: Gaussian) -> Tensor:
    """Return |m1 - m2|^2 + |sigma1 - sigma2|^2, squared 2-Wasserstein, PCME++ 2.2: (..., D), (..., D) -> (...)."""
    p, q = check_paired(p, q)
    a, b = 0.5 * p.log_var, 0.5 * q.log_var
    return (_square_distance(p, q) + _exp_difference(a, b, a - b).square()).sum(-1)


def _expm1_minus(x: Tensor) -> Tensor:
    """Return exp(x) - 1 - x; near 0 as 2 sinh(x/2)^2 + (sinh x - x), whose four series terms are exact to 1e-16."""
    s = x * x
    bracket = x * s / 6 * (1 + s / 20 * (1 + s / 42 * (1 + s / 72)))
    near = 2 * torch.sinh(0.5 * x).square() + bracket
    return torch.where(x.abs() < 0.1, near, torch.expm1(x) - x)


def kl(p: Gaussian, q: Gaussian) -> Tensor:
    """Return KL(p || q) = sum_d 1/2 [v1/v2 - 1 - log(v1/v2) + (m1 - m2)^2 / v2], PCME (B.1) with its -1.

    (..., D), (..., D) -> (...). Exactly 0 at p = q.
    """
    p, q = check_paired(p, q)
    distance = _square_distance(p, q) * (-q.log_var).exp()
    return 0.5 * (_expm1_minus(p.log_var - q.log_var) + distance).sum(-1)


def js(p: Gaussian, q: Gaussian) -> Tensor:
    """Return (KL(p || q) + KL(q || p)) / 2, PCME (B.2), there called Jensen-Shannon: (..., D), (..., D) -> (...).

    The logarithms cancel and v1/v2 + v2/v1 - 2 is 4 sinh((l1 - l2)/2)^2, hence
    sum_d sinh((l1 - l2)/2)^2 + 1/4 (m1 - m2)^2 (1/v1 + 1/v2).
    """
    p, q = check_paired(p, q)
    precisions = (-p.log_var).exp() + (-q.log_var).exp()
    return (torch.sinh(0.5 * (p.log_var - q.log_var)).square() + 0.25 * _square_distance(p, q) * precisions).sum(-1)


def elk(p: Gaussian, q: Gaussian) -> Tensor:
    """Return -log int p q - D/2 log(2 pi), ELK (expected likelihood kernel), PCME (B.4): (..., D), (..., D) -> (...).

    sum_d 1/2 [(m1 - m2)^2 / (v1 + v2) + log(v1 + v2)]; not 0 at p = q, and negative for narrow Gaussians.
    """
    p, q = check_paired(p, q)
    log_sum = torch.logaddexp(p.log_var, q.log_var)
    return 0.5 * (_square_distance(p, q) * (-log_sum).exp() + log_sum).sum(-1)


def bhattacharyya(p: Gaussian, q: Gaussian) -> Tensor:
    """Return the Bhattacharyya distance -log int sqrt(p q), PCME (B.5), 0 at p = q: (..., D), (..., D) -> (...).

    sum_d 1/4 [(m1 - m2)^2 / (v1 + v2) + 2 log((s2/s1 + s1/s2)/2)], and the logarithm is
    log cosh((l1 - l2)/2) = 1/2 log1p(sinh((l1 - l2)/2)^2), accurate for l1 near l2.
    """
    p, q = check_paired(p, q)
    distance = _square_distance(p, q) * (-torch.logaddexp(p.log_var, q.log_var)).exp()
    widths = torch.log1p(torch.sinh(0.5 * (p.log_var - q.log_var)).square())
    return 0.25 * (distance + widths).sum(-1)
