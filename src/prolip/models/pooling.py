"""Pooling of token features to one vector: the generalised pooling operator of VSE-infinity."""
from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from prolip.gaussian import upcast, without_autocast
from prolip.models.recurrence import run_grus

#: Temperature of the weights, width of positions and GRU, as Chen et al. 2021 have them.
TEMPERATURE, WIDTH = 0.1, 32


class GeneralisedPooling(nn.Module):
    """GPO (Chen et al. 2021, arXiv 2011.04305): sum_k w_k v_(k), v_(k) the k-th largest value in each dimension.

    w = softmax(s / 0.1), s_k = u . (forward GRU + backward GRU)_k / 2 over sinusoidal positions 1 .. n: weights that
    depend on the number n of tokens alone, between mean (equal) and maximum (all on the first).
    """

    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.forward_gru = nn.GRU(width, width, batch_first=True)
        self.backward_gru = nn.GRU(width, width, batch_first=True)
        self.score = nn.Linear(width, 1, bias=False)

    def weights(self, valid: Tensor) -> Tensor:
        """How much the k-th largest counts, from which tokens are some: (B, K) booleans -> (B, K) float32, 0 past n."""
        return pooling_weights([self], valid)[0]

    def forward(self, features: Tensor, valid: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        """Token features (B, K, D), and which of them count, (B, K) booleans (all; at least one a row) -> (B, D).

        weights: those of `valid`, if they are known. float32 whatever the autocast dtype.
        """
        x = upcast(features).mT.contiguous()
        if weights is None:
            weights = self.weights(x.new_ones(1, x.shape[2], dtype=torch.bool) if valid is None else valid)
        with torch.no_grad():
            order = ascending(x if valid is None else x.masked_fill(~valid.unsqueeze(1), -torch.inf))
        with without_autocast(x.device):  # what is left out comes first and has weight 0
            return (x.gather(2, order) @ weights.flip(1).to(x.dtype).unsqueeze(2)).squeeze(2)


def pooling_weights(pools: Sequence[GeneralisedPooling], valid: Tensor) -> list[Tensor]:
    """The weights of several poolings of the same tokens, from which are some: (B, K) booleans -> (B, K) each.

    The forward passes over the positions are the same for all n; backward ones begin at each row's own last.
    """
    count = valid.sum(1, keepdim=True)
    places = torch.arange(valid.shape[1], device=valid.device)
    positions = sinusoids(valid.shape[1], pools[0].score.in_features, valid.device).to(pools[0].score.weight.dtype)
    turned = (count - 1 - places).clamp(min=0)  # place t of the backward pass is token n - 1 - t
    found = []
    with without_autocast(valid.device):
        forward = run_grus([pool.forward_gru for pool in pools], positions.unsqueeze(0))
        backward = run_grus([pool.backward_gru for pool in pools], positions[turned])
        for pool, ahead, back in zip(pools, forward, backward):
            back = back.gather(1, turned.unsqueeze(2).expand_as(back))
            score = pool.score((ahead + back) / 2).squeeze(2) / TEMPERATURE
            found.append(score.masked_fill(places >= count, -torch.inf).softmax(1))
    return found


def ascending(x: Tensor) -> Tensor:
    """The order of the last dimension, least first. On a CPU NumPy's, which is vectorised: a sixth of torch's time."""
    if x.device.type == "cpu" and not (torch.compiler.is_compiling() or torch.jit.is_tracing()):
        return torch.from_numpy(np.argsort(x.numpy(), axis=-1))
    return x.argsort(-1)


def sinusoids(length: int, width: int, device: torch.device) -> Tensor:
    """Sines and cosines of places 0 .. length - 1 at wavelengths from 2 pi to 20,000 pi (Vaswani et al. 2017)."""
    rate = torch.exp(torch.arange(0, width, 2, device=device) * (-math.log(10_000.0) / width))
    angle = torch.arange(length, device=device).unsqueeze(1) * rate
    return torch.stack([angle.sin(), angle.cos()], 2).flatten(1)
