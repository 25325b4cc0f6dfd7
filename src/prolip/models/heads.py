"""Heads from a tower's last tokens to a Gaussian: norms, projections, pooling, in float32 under any autocast."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prolip.gaussian import upcast, without_autocast

#: Temperature of the pooling weights, width of positions and GRU (Chen et al. 2021).
TEMPERATURE, WIDTH = 0.1, 32


class Tokens(NamedTuple):
    """A tower's tokens, the input of a method's head."""

    last: Tensor  # (B, K, W), the last block's output for patches, positions of a pyramid, or words
    valid: Tensor | None = None  # tokens that count, (B, K) bool; None for all
    pooled: Tensor | None = None  # (B, W), the token that becomes the mean; None for other pooling
    before: Tensor | None = None  # the last block's input, shaped like `last`; None without a reader

    def features(self) -> tuple[Tensor, Tensor | None]:
        """Return the pooled token (if any) and the last ones, (B, 1 + K, W), with a mask of tokens that count."""
        if self.pooled is None:
            return self.last, self.valid
        valid = None if self.valid is None else F.pad(self.valid, (1, 0), value=True)
        return torch.cat([self.pooled.unsqueeze(1), self.last], 1), valid


def blank_others(x: Tensor, keep: Tensor, grid: Sequence[int], patch: Sequence[int]) -> Tensor:
    """Set every patch except `keep` (B, K) to 0, the mean colour. grid: rows, columns; patch: sides in pixels."""
    kept = x.new_zeros(x.shape[0], grid[0] * grid[1]).scatter_(1, keep, 1.0).view(-1, 1, *grid)
    return x * kept.repeat_interleave(patch[0], 2).repeat_interleave(patch[1], 3)


def own_words(ids: Tensor, pad_id: int) -> Tensor:
    """Return a mask of tokens (B, L) before the padding at the end; the first token always counts."""
    place = torch.arange(ids.shape[1], device=ids.device)
    return place <= torch.where(ids != pad_id, place, 0).amax(1, keepdim=True)


def layer_norm(norm: Any, x: Tensor) -> Tensor:
    """Apply an `nn.LayerNorm` in float32 (float64 stays)."""
    x = upcast(x)
    with without_autocast(x.device):
        bias = None if norm.bias is None else upcast(norm.bias)
        return F.layer_norm(x, norm.normalized_shape, upcast(norm.weight), bias, norm.eps)


def project(x: Tensor, projection: nn.Linear | nn.Parameter) -> Tensor:
    """Compute x W + b in float32 (float64 stays), for both forms of OpenCLIP's projections."""
    x = upcast(x)
    with without_autocast(x.device):
        if isinstance(projection, nn.Linear):
            bias = None if projection.bias is None else upcast(projection.bias)
            return F.linear(x, upcast(projection.weight), bias)
        return x @ upcast(projection)


class LogVarianceHead(nn.Linear):
    """log sigma^2 = W u + b, ProLIP section 3.1: b starts at `init_bias`, W at N(0, gain^2 / width).

    u is layer-normalised, |u|^2 = width, so W u has standard deviation `gain` in every dimension, and the variances
    start at exp(b + gain^2 / 2) on average.
    """

    def __init__(self, width: int, embed_dim: int, init_bias: float = -10.0, gain: float = 0.1):
        self.init_bias, self.gain = init_bias, gain
        super().__init__(width, embed_dim)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.gain * self.in_features**-0.5)
        nn.init.constant_(self.bias, self.init_bias)

    def forward(self, x: Tensor) -> Tensor:
        return project(x, self)


class GeneralisedPooling(nn.Module):
    """GPO (Chen et al. 2021, arXiv 2011.04305): sum_k w_k v_(k), v_(k) the k-th largest value in each dimension.

    w = softmax(s / 0.1), s_k = u . (forward GRU + backward GRU)_k / 2 over sinusoidal positions 1 .. n: the weights
    depend only on the number n of tokens.
    """

    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.forward_gru = nn.GRU(width, width, batch_first=True)
        self.backward_gru = nn.GRU(width, width, batch_first=True)
        self.score = nn.Linear(width, 1, bias=False)

    def weights(self, tokens: int, counts: Tensor) -> Tensor:
        """Return the weight of the k-th largest of n values, for each n of (N, 1) integers: (N, tokens), 0 after n."""
        places = torch.arange(tokens, device=counts.device)
        positions = sinusoids(tokens, self.score.in_features, counts.device).to(self.score.weight.dtype)
        turned = (counts - 1 - places).clamp(min=0)  # position t of the backward pass is token n - 1 - t
        # one row per possible number of tokens, not per sample: they share the forward pass
        ahead, back = self.forward_gru(positions.unsqueeze(0))[0], self.backward_gru(positions[turned])[0]
        back = back.gather(1, turned.unsqueeze(2).expand_as(back))
        score = self.score((ahead + back) / 2).squeeze(2) / TEMPERATURE
        return score.masked_fill(places >= counts, -torch.inf).softmax(1)

    def forward(self, features: Tensor, valid: Tensor | None = None) -> Tensor:
        """Pool token features (B, K, D), with a mask (B, K) of at least one token a row, to (B, D) in float32."""
        x = upcast(features).mT.contiguous()
        with torch.no_grad():
            sortable = x if valid is None else x.masked_fill(~valid.unsqueeze(1), -torch.inf)
            if x.device.type == "cpu" and not (torch.compiler.is_compiling() or torch.jit.is_tracing()):
                order = torch.from_numpy(np.argsort(sortable.numpy(), axis=-1))  # vectorised: a sixth of torch's time
            else:
                order = sortable.argsort(-1)
        with without_autocast(x.device):  # masked values come first and have weight 0
            counts = torch.arange(1, x.shape[2] + 1, device=x.device).unsqueeze(1)
            weights = self.weights(x.shape[2], counts[-1:] if valid is None else counts)
            weights = weights if valid is None else weights[valid.sum(1) - 1]
            return (x.gather(2, order) @ weights.flip(1).to(x.dtype).unsqueeze(2)).squeeze(2)


def sinusoids(length: int, width: int, device: torch.device) -> Tensor:
    """Return sines and cosines of positions 0 .. length - 1 at wavelengths 2 pi to 20,000 pi (Vaswani et al. 2017)."""
    rate = torch.exp(torch.arange(0, width, 2, device=device) * (-math.log(10_000.0) / width))
    angle = torch.arange(length, device=device).unsqueeze(1) * rate
    return torch.stack([angle.sin(), angle.cos()], 2).flatten(1)
