"""What turns the last tokens of a tower into a Gaussian: norms and projections, in float32 whatever the autocast."""
from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from prolip.gaussian import upcast, without_autocast


def layer_norm(norm: Any, x: Tensor) -> Tensor:
    """An `nn.LayerNorm` applied in float32 (float64 stays), (..., width) -> (..., width)."""
    x = upcast(x)
    with without_autocast(x.device):
        bias = None if norm.bias is None else upcast(norm.bias)
        return F.layer_norm(x, norm.normalized_shape, upcast(norm.weight), bias, norm.eps)


def project(x: Tensor, projection: nn.Linear | nn.Parameter) -> Tensor:
    """x W + b in float32 (float64 stays), (..., width) -> (..., D), for both forms of OpenCLIP's projections."""
    x = upcast(x)
    with without_autocast(x.device):
        if isinstance(projection, nn.Linear):
            bias = None if projection.bias is None else upcast(projection.bias)
            return F.linear(x, upcast(projection.weight), bias)
        return x @ upcast(projection)


class LogVarianceHead(nn.Linear):
    """log sigma^2 = W u + b, ProLIP section 3.1: b starts at `init_bias`, W at N(0, gain^2 / width).

    u is layer-normalised, |u|^2 = width, so that W u has standard deviation `gain` in every dimension and the variances
    start at exp(b) exp(gain^2 / 2) on average: 1.65 exp(b) for a gain of 1, 1.005 exp(b) for 0.1.
    (..., width) -> (..., D).
    """

    def __init__(self, width: int, embed_dim: int, init_bias: float = -10.0, gain: float = 0.1):
        self.init_bias, self.gain = init_bias, gain
        super().__init__(width, embed_dim)

    def reset_parameters(self) -> None:
        """Draw the initial values again."""
        nn.init.normal_(self.weight, std=self.gain * self.in_features**-0.5)
        nn.init.constant_(self.bias, self.init_bias)

    def forward(self, x: Tensor) -> Tensor:
        """log sigma^2 in float32 (float64 stays)."""
        return project(x, self)
