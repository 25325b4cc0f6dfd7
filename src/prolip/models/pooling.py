"""Pooling of token features to one vector: the generalised pooling operator of VSE-infinity."""
from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from prolip.gaussian import upcast, without_autocast

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
        """How much the k-th largest counts, from which tokens are some: (B, K) booleans -> (B, K) float32, 0 past n.

        The forward pass over the positions is the same for all n; the backward one begins at each row's own last.
        """
        count = valid.sum(1, keepdim=True)
        places = torch.arange(valid.shape[1], device=valid.device)
        positions = sinusoids(valid.shape[1], self.score.in_features, valid.device).to(self.score.weight.dtype)
        inside = places < count
        turned = (count - 1 - places).clamp(min=0)  # place t of the backward pass is token n - 1 - t
        with without_autocast(valid.device):
            ahead = self.forward_gru(positions.unsqueeze(0))[0]
            back = self.backward_gru(positions[turned])[0]
            back = back.gather(1, turned.unsqueeze(2).expand_as(back))
            score = self.score((ahead + back) / 2).squeeze(2) / TEMPERATURE
        return score.masked_fill(~inside, -torch.inf).softmax(1)

    def forward(self, features: Tensor, valid: Tensor | None = None) -> Tensor:
        """Token features (B, K, D), and which of them count, (B, K) booleans (all; at least one a row) -> (B, D).

        float32 whatever the autocast dtype.
        """
        features = upcast(features)
        if valid is None:
            weights = self.weights(features.new_ones(1, features.shape[1], dtype=torch.bool))
            ordered = features.sort(1, descending=True).values
        else:
            weights, hidden = self.weights(valid), ~valid.unsqueeze(2)
            ordered = features.masked_fill(hidden, -torch.inf).sort(1, descending=True).values
            ordered = ordered.masked_fill(ordered.isneginf(), 0.0)
        with without_autocast(features.device):
            return (weights.to(features.dtype).unsqueeze(1) @ ordered).squeeze(1)


def sinusoids(length: int, width: int, device: torch.device) -> Tensor:
    """Sines and cosines of places 0 .. length - 1 at wavelengths from 2 pi to 20,000 pi (Vaswani et al. 2017)."""
    rate = torch.exp(torch.arange(0, width, 2, device=device) * (-math.log(10_000.0) / width))
    angle = torch.arange(length, device=device).unsqueeze(1) * rate
    return torch.stack([angle.sin(), angle.cos()], 2).flatten(1)
