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
        """The uncertainty of an input, sum_d sigma^2_d (ProLIP 4.3), (...)."""
        return self.log_var.exp().sum(-1)

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
        """`count` points of each Gaussian by reparameterisation, mean + sigma * noise: (count, ..., D)."""
        noise = torch.randn(
            (count, *self.mean.shape), dtype=self.mean.dtype, device=self.mean.device, generator=generator
        )
        return self.mean + (0.5 * self.log_var).exp() * noise


def upcast(x: Tensor) -> Tensor:
    """float64 stays, everything else becomes float32."""
    return x if x.dtype == torch.float64 else x.float()


def concatenate(gaussians: Iterable[Gaussian]) -> Gaussian:
    """Join along the first dimension."""
    means, log_vars = zip(*gaussians)
    return Gaussian(torch.cat(means), torch.cat(log_vars))


def mixture(z: Gaussian, weights: Tensor | None = None, normalise: bool = True) -> Gaussian:
    """A class as a mixture of its prompts, N(sum w mean, sum w sigma^2), ProLIP 4.2 (the variance is not divided by N).

    z: (..., N, D); weights: (..., N) summing to one, uniform without; normalise: bring the averaged mean back to unit
    length, as the released evaluation does. Returns (..., D). The average of variances is taken in the log domain.
    """
    z = z.float()
    if weights is None:
        count = z.mean.shape[-2]
        log_w = z.mean.new_full((count,), -torch.tensor(float(count)).log().item())
    else:
        if weights.shape != z.mean.shape[:-1]:
            raise ValueError(f"weights {tuple(weights.shape)} do not fit prompts {tuple(z.mean.shape[:-1])}: give (..., N)")
        log_w = weights.to(z.mean).log()
    mean = (log_w.exp().unsqueeze(-1) * z.mean).sum(-2)
    log_var = torch.logsumexp(log_w.unsqueeze(-1) + z.log_var, dim=-2)
    return Gaussian(F.normalize(mean, dim=-1) if normalise else mean, log_var)
