"""What tests of objectives compare."""

from __future__ import annotations

import torch


def gradients(objective: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of every gradient by its parameter's name."""
    return {n: p.grad.clone() for n, p in objective.named_parameters() if p.grad is not None}


def assert_close(actual: dict, expected: dict, tolerance: float = 1e-10) -> None:
    """The same names, and values that differ by less than `tolerance` of the largest, or of 1."""
    assert actual.keys() == expected.keys()
    for name in (name for name, x in expected.items() if x.numel()):
        difference, size = (actual[name] - expected[name]).abs().max(), expected[name].abs().max()
        assert difference <= tolerance * max(1.0, size), f"{name} differs by up to {difference:.2e}"
