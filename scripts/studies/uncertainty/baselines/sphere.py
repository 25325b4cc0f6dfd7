"""Distributions on the unit sphere in many dimensions: von Mises-Fisher densities, power spherical samples."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Dirichlet

# (k, n, coefficient of p^n in U_k) of the uniform expansion in the order, DLMF 10.41.10
DEBYE = (
    (1, 1, 3 / 24),
    (1, 3, -5 / 24),
    (2, 2, 81 / 1152),
    (2, 4, -462 / 1152),
    (2, 6, 385 / 1152),
    (3, 3, 30375 / 414720),
    (3, 5, -369603 / 414720),
    (3, 7, 765765 / 414720),
    (3, 9, -425425 / 414720),
    (4, 4, 4465125 / 39813120),
    (4, 6, -94121676 / 39813120),
    (4, 8, 349922430 / 39813120),
    (4, 10, -446185740 / 39813120),
    (4, 12, 185910725 / 39813120),
)
LEAST_ORDER = 16  # from here its four terms are accurate to 1e-7


def vmf_log_normaliser(kappa: Tensor, dim: int) -> Tensor:
    """Compute log C_D(kappa) of the density C exp(kappa mu.x), C = kappa^v / ((2 pi)^(v + 1) I_v(kappa)), v = D/2 - 1.

    kappa: (...) >= 0, dim >= 2. log F_v = log(Gamma(v + 1) (2 / kappa)^v I_v(kappa)), 0 at kappa = 0, replaces log I:
    its terms have one sign, so nothing cancels in value or gradient (for small D by recurrence in v).
    """
    order, lifts = dim / 2 - 1, max(0, math.ceil(LEAST_ORDER - (dim / 2 - 1)))
    upper, log_f = _log_f(kappa, order + lifts + 1), _log_f(kappa, order + lifts)
    for v in (order + lift for lift in range(lifts, 0, -1)):
        # F_(v-1) = F_v + kappa^2 / (4 v (v + 1)) F_(v+1), DLMF 10.29.1
        ratio = kappa.square() / (4 * v * (v + 1)) * (upper - log_f).exp()
        upper, log_f = log_f, log_f + ratio.log1p()
    return math.lgamma(dim / 2) - math.log(2) - dim / 2 * math.log(math.pi) - log_f


def _log_f(kappa: Tensor, v: float) -> Tensor:
    """Compute log F_v by DLMF 10.41.3, relative to its value at 0, with s = sqrt(v^2 + kappa^2)."""
    x = (kappa / v).square()
    growth = v * x / ((1 + x).sqrt() + 1)  # s - v
    p = (1 + x).rsqrt()
    at_zero = 1 + sum(c / v**k for k, _, c in DEBYE)
    series = sum((c * (p**n - 1) / v**k for k, n, c in DEBYE), torch.zeros_like(p))
    return growth - v * (growth / (2 * v)).log1p() - 0.25 * x.log1p() + (series / at_zero).log1p()


def power_spherical_sample(mean: Tensor, kappa: Tensor, count: int) -> Tensor:
    """Draw `count` points of densities proportional to (1 + mu.x)^kappa (De Cao and Aziz, 2020, algorithm 1).

    mean: (N, D) unit, D >= 2, kappa: (N,) -> (count, N, D). mu.x = 2 z - 1, z ~ Beta((D - 1)/2 + kappa, (D - 1)/2); the
    direction across mu is uniform.
    """
    half = (mean.shape[1] - 1) / 2
    shape = torch.stack([half + kappa, torch.full_like(kappa, half)], -1)
    z, rest = Dirichlet(shape, validate_args=False).rsample((count,)).unbind(-1)
    noise = torch.randn(count, *mean.shape, dtype=mean.dtype, device=mean.device)
    across = F.normalize(noise - (noise * mean).sum(-1, keepdim=True) * mean, dim=-1)
    # z and 1 - z are drawn together, so that neither loses digits near 1; sqrt has no gradient at 0.
    tiny = torch.finfo(mean.dtype).tiny
    return (z - rest).unsqueeze(-1) * mean + 2 * (z * rest).clamp_min(tiny).sqrt().unsqueeze(-1) * across
