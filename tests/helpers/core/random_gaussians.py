"""Gaussians of random means and log variances around -1."""

import torch

from prolip.gaussian import Gaussian


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Gaussian:
    generator = torch.Generator().manual_seed(seed)
    mean, log_var = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return Gaussian(mean.to(dtype), (log_var - 1).to(dtype))
