"""Diagonal Gaussians: what every image and every text is mapped to."""
from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Gaussian(NamedTuple):
    """Diagonal Gaussians N(mean, diag exp(log_var)), ProLIP section 3.1.

    mean, log_var: (..., D), log_var is log sigma^2 (never log sigma).
    """

    mean: Tensor
    log_var: Tensor

    @property
    def var(self) -> Tensor:
        """sigma^2 = exp(log_var), (..., D)."""
        return self.log_var.exp()

    @property
    def trace(self) -> Tensor:
        """The uncertainty of an input, sum_d sigma^2_d (ProLIP 4.3), (...); in float32 for half-precision inputs."""
        return upcast(self.log_var).exp().sum(-1)

    def to(self, *args, **kwargs) -> Gaussian:
        """Both tensors through `Tensor.to`."""
        return Gaussian(self.mean.to(*args, **kwargs), self.log_var.to(*args, **kwargs))

    def float(self) -> Gaussian:
        """In float32, or float64 where it is float64 already: the dtype losses and measures run in."""
        return Gaussian(upcast(self.mean), upcast(self.log_var))

    def detach(self) -> Gaussian:
        """Without a graph."""
        return Gaussian(self.mean.detach(), self.log_var.detach())

    def select(self, rows) -> Gaussian:
        """Index the leading dimensions of both tensors (`z[i]` is taken: it indexes the tuple)."""
        return Gaussian(self.mean[rows], self.log_var[rows])

    def sample(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """`count` points of each Gaussian by reparameterisation, mean + sigma * noise: (count, ..., D).

        generator: on the device of the mean. The noise is drawn and the points returned in the dtype of the mean.
        """
        noise = torch.randn(
            (count, *self.mean.shape), dtype=self.mean.dtype, device=self.mean.device, generator=generator
        )
        return self.mean + (0.5 * self.log_var).exp() * noise


def upcast(x: Tensor) -> Tensor:
    """float64 stays, everything else becomes float32."""
    return x if x.dtype == torch.float64 else x.float()


def concatenate(gaussians: Iterable[Gaussian]) -> Gaussian:
    """Join along the first dimension. Raises ValueError for none."""
    parts = list(gaussians)
    if not parts:
        raise ValueError("no Gaussians to concatenate: give at least one (its tensors may have no rows)")
    return Gaussian(torch.cat([z.mean for z in parts]), torch.cat([z.log_var for z in parts]))


def mixture(z: Gaussian, weights: Tensor | None = None, normalise: bool = True) -> Gaussian:
    """A class as a mixture of its prompts, N(sum w mean, sum w sigma^2), ProLIP 4.2 (the variance is not divided by N).

    z: (..., N, D); weights: (..., N) >= 0 and summing to one, uniform without; normalise: bring the averaged mean back
    to unit length, as the released evaluation does. Returns (..., D) in float32 or float64. The average of variances is
    a log-sum-exp, for log variances of a dimension within 80 of each other. A weight of exactly 0 drops its prompt and
    has a finite gradient, what the prompt would contribute; weights that are all 0 describe no class: log_var is -inf.
    Raises ValueError for N = 0 and for weights of another shape.
    """
    z = z.float()
    if z.mean.dim() < 2 or z.mean.shape[-2] == 0:
        raise ValueError(f"a mixture needs prompts (..., N, D) with N >= 1, got {tuple(z.mean.shape)}")
    if weights is None:
        weights = z.mean.new_full(z.mean.shape[:-1], 1 / z.mean.shape[-2])
    elif weights.shape != z.mean.shape[:-1]:
        raise ValueError(
            f"weights {tuple(weights.shape)} do not fit prompts {tuple(z.mean.shape[:-1])}: give (..., N)"
        )
    weights = weights.to(z.mean).unsqueeze(-1)
    mean = (weights * z.mean).sum(-2)
    # No log of a weight: its gradient at 0 is infinite. The shift is a constant, it cancels in value and gradient.
    shift = z.log_var.detach().amax(-2, keepdim=True)
    shift = shift.masked_fill(shift.isneginf(), 0.0)  # points, of variance 0, mix to a point
    log_var = (weights * (z.log_var - shift).exp()).sum(-2).log() + shift.squeeze(-2)
    return Gaussian(F.normalize(mean, dim=-1) if normalise else mean, log_var)
