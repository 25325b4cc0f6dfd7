"""Small networks on frozen features, and the loop that fits them in seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from prolip.gaussian import upcast

STEPS, BATCH = 400, 256


class Head(nn.Module):
    """Standardised features through one hidden layer, (N, W) -> (N, outputs); 0 for all until it is trained."""

    centre: Tensor
    spread: Tensor

    def __init__(self, features: Tensor, outputs: int = 1, hidden: int = 256) -> None:
        super().__init__()
        self.register_buffer("centre", features.mean(0))
        # Otherwise a feature that hardly varies would be amplified to noise.
        spread = features.std(0, correction=0)
        self.register_buffer("spread", spread.clamp_min(max(1e-2 * spread.mean().item(), 1e-12)))
        self.layers = nn.Sequential(nn.Linear(features.shape[1], hidden), nn.GELU(), nn.Linear(hidden, outputs))
        self.to(features)
        for parameter in self.layers[-1].parameters():
            nn.init.zeros_(parameter)

    def forward(self, features: Tensor) -> Tensor:
        return self.layers((features - self.centre) / self.spread)


def minimise(loss: Callable[[Tensor], Tensor], parameters: Iterable[nn.Parameter], rows: int) -> None:
    """Minimise loss(BATCH of the rows), drawn with replacement, by STEPS of AdamW with a falling rate.

    Raises ValueError for fewer than two rows, FloatingPointError for a loss that is not finite.
    """
    if rows < 2:
        raise ValueError(f"{rows} sample to compare, but a head needs at least two")
    optimiser = torch.optim.AdamW(parameters, lr=2e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, STEPS)
    for step in range(STEPS):
        value = loss(torch.randint(rows, (min(BATCH, rows),)))
        if not value.isfinite():
            raise FloatingPointError(f"the loss is {value.item()} at step {step} of {STEPS}. Check the features")
        optimiser.zero_grad()
        value.backward()
        optimiser.step()
        schedule.step()


def bank_of(means: Tensor, rows: Tensor, most: int = 2048) -> Tensor:
    """Draw the inputs that a sample is compared with from the pairs, by frequency, (K, D)."""
    return upcast(means[rows[torch.randperm(len(rows))[:most].to(rows.device)]])
