"""Losses of single inputs and of matched pairs: the inclusion losses and VIB (spec section 3)."""
from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from prolip.gaussian import Gaussian, check_gaussian, check_pair, without_autocast
from prolip.measures import inclusion_test_per_dim


def inclusion_loss(
    inner: Gaussian,
    outer: Gaussian,
    scale: float = 10.0,
    eps: float = -10.0,
    form: str = "exact",
    reduction: str = "dim",
) -> Tensor:
    """-log sigmoid(scale H(inner in outer)) averaged over matched pairs, ProLIP eq. 5 and section 3.3 -> ().

    inner, outer: (..., D), pair by pair; eps: 1/sigma^2 is multiplied by exp(eps); form: see `measures.inclusion_test`.
    reduction "dim": H per dimension, averaged over dimensions too (the paper's runs); "pair": H summed over D (eq. 4).
    Zero pairs give 0 with a graph, as a rank may hold no masked rows. Raises ValueError for an unknown reduction and
    for shapes that are no pairs, TypeError for what is no Gaussian.
    """
    if reduction not in ("dim", "pair"):
        raise ValueError(f"reduction {reduction!r} is unknown: use 'dim' or 'pair'")
    check_pair(inner, outer, ("inner", "outer"))
    with without_autocast(inner.mean.device):
        h = inclusion_test_per_dim(inner, outer, eps=eps, form=form)
        if reduction == "pair":
            h = h.sum(-1)
        return mean_or_zero(-F.logsigmoid(scale * h))


def vib(z: Gaussian) -> Tensor:
    """KL(Z || N(0, I)) per dimension, mean over batch and D of 1/2 (mean^2 + v - log v - 1), ProLIP eq. 6 -> ().

    z: (..., D). v - 1 is expm1(log_var), exact to first order near v = 1. An empty batch gives 0 with a graph.
    Raises TypeError for what is no Gaussian, ValueError where mean and log_var differ in shape.
    """
    check_gaussian(z)
    with without_autocast(z.mean.device):
        z = z.float()
        return 0.5 * mean_or_zero(z.mean.square() + (z.log_var.expm1() - z.log_var))


def mean_or_zero(x: Tensor) -> Tensor:
    """The mean of all elements, 0 for none, with a graph either way."""
    return x.sum() / max(x.numel(), 1)
