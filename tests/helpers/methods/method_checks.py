"""Batches of objectives, what is compared of them, and a short run of a method."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import torch

from drawings import SHARDS
from prolip.methods.accumulate import accumulate_backward
from prolip.methods.base import Objective
from training.main import main


def captioned(rows: int) -> dict[str, torch.Tensor]:
    """Images in float64 and texts with padding; captions 2 and 3 of each four are of both of their images."""
    g, place = torch.Generator().manual_seed(1), torch.arange(rows)
    text = torch.randint(1, 1000, (rows, 12), generator=g)
    text[:, 8:] = 0
    return {
        "image": torch.randn(rows, 3, 32, 32, generator=g, dtype=torch.float64),
        "text": text,
        "caption_id": place,
        "caption_ids": torch.stack([place, torch.where(place % 4 == 2, place + 1, -1)], 1),
    }


def gradients(objective: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of every gradient by its parameter's name."""
    return {n: p.grad.clone() for n, p in objective.named_parameters() if p.grad is not None}


def assert_close(actual: dict, expected: dict, tolerance: float = 1e-10) -> None:
    """The same names, and values that differ by less than `tolerance` of the largest, or of 1."""
    assert actual.keys() == expected.keys()
    for name in (name for name, x in expected.items() if x.numel()):
        difference, size = (actual[name] - expected[name]).abs().max(), expected[name].abs().max()
        assert difference <= tolerance * max(1.0, size), f"{name} differs by up to {difference:.2e}"


def assert_is_formula(
    make: Callable, batch: dict, formula: Callable, tolerance: float = 1e-7
) -> tuple[dict, Objective]:
    """Loss and gradients of a made objective are those of formula(another, batch); its terms, and the other one."""
    objective, other = make(), make()
    terms, loss = accumulate_backward(objective, batch), formula(other, batch)
    loss.backward()
    assert_close({"loss": terms["loss"]}, {"loss": loss.detach()}, tolerance)
    assert_close(gradients(objective), gradients(other), 10 * tolerance)
    return terms, other


def trained(folder: Path, words: str) -> str:
    """The model that six steps of a method on drawings leave."""
    words += " --model ProLIP-ViT-test --caption-sampling name:2,keywords,group --batch-size 16 --max-steps 6"
    words += f" --warmup 2 --workers 0 --precision fp32 --output {folder} --name run"
    assert main([*shlex.split(words), "--train-data", SHARDS]) == 0
    return f"local-dir:{folder}/run/model"
