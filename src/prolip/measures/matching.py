"""PCME's soft match probability by Monte Carlo, the only measure without a closed form."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from prolip.gaussian import Gaussian, as_scalar, without_autocast
from prolip.measures.paired import check_paired
from prolip.measures.pairwise import WORKSPACE, all_pairs, check_pairwise

__all__ = ["log_match_probability", "match_probability", "pairwise_log_match_probability", "pairwise_match_probability"]

DIRECT, PRODUCT = "donot_use_mm_for_euclid_dist", "use_mm_for_euclid_dist"
Number = float | Tensor


def _draw(z: Gaussian, samples: int, generator: torch.Generator | None) -> Tensor:
    """Draw `samples` points of each Gaussian: (..., J, D)."""
    if samples < 1:
        raise ValueError(f"samples is {samples}: give at least 1 sample of each Gaussian")
    return z.sample(samples, generator).movedim(0, -2)


def log_match_probability(
    p: Gaussian, q: Gaussian, scale: Number, bias: Number, samples: int = 8, generator: torch.Generator | None = None
) -> Tensor:
    """Return log of `match_probability`, finite where the probability underflows: (..., D), (..., D) -> (...).

    logsumexp over the J x J pairs of samples of log sigmoid(logit), minus log J^2, logit = -scale |z1 - z2|_2 + bias.
    generator: on the device of p; p is drawn before q. With scale and bias negated and the same generator state it is
    log(1 - probability) of the same estimate.
    """
    p, q = check_paired(p, q)
    scale, bias = as_scalar(scale, p.mean, "scale"), as_scalar(bias, p.mean, "bias")
    z1, z2 = _draw(p, samples, generator), _draw(q, samples, generator)
    with without_autocast(z1.device):
        logits = bias - scale * torch.cdist(z1, z2, compute_mode=DIRECT)
    return F.logsigmoid(logits).flatten(-2).logsumexp(-1) - 2 * math.log(samples)


def match_probability(p: Gaussian, q: Gaussian, scale: Number, bias: Number, *args: Any, **options: Any) -> Tensor:
    """Average sigmoid(-scale |z1 - z2|_2 + bias) over J x J samples, PCME (2) and (3): (..., D), (..., D) -> (...)."""
    return log_match_probability(p, q, scale, bias, *args, **options).exp()


def pairwise_log_match_probability(
    p: Gaussian, q: Gaussian, scale: Number, bias: Number, samples=8, generator=None, max_elements: int = WORKSPACE
) -> Tensor:
    """Compute `log_match_probability` of all pairs, each Gaussian sampled once: (B1, D), (B2, D) -> (B1, B2).

    With the same generator state and B1 = B2 its diagonal is the paired function. Distances come from a matrix product:
    with e = (1.5 D + 3) eps (|z1|^2 + |z2|^2) their error is at most sqrt(e), for coinciding points, and e / |z1 - z2|,
    0.017 at unit length in float32 and D = 768.
    """
    p, q = check_pairwise(p, q)
    scale, bias = as_scalar(scale, p.mean, "scale"), as_scalar(bias, p.mean, "bias")
    z1, z2 = _draw(p, samples, generator), _draw(q, samples, generator)

    def tile(x: Tensor, y: Tensor) -> Tensor:
        distances = torch.cdist(x.flatten(0, 1), y.flatten(0, 1), compute_mode=PRODUCT)
        logits = (bias - scale * distances).view(len(x), samples, len(y), samples)
        return F.logsigmoid(logits).logsumexp((1, 3)) - 2 * math.log(samples)

    return all_pairs(tile, (z1,), (z2,), samples**2, max_elements)


def pairwise_match_probability(
    p: Gaussian, q: Gaussian, scale: Number, bias: Number, *args: Any, **options: Any
) -> Tensor:
    """Compute `match_probability` of all pairs, from `pairwise_log_match_probability`: (B1, D), (B2, D) -> (B1, B2)."""
    return pairwise_log_match_probability(p, q, scale, bias, *args, **options).exp()
