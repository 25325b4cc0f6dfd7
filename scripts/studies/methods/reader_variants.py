"""Readers with other inputs from their tower, as methods for scripts/studies/methods/towers.py.

    PYTHONPATH=scripts PROLIP_METHODS=reader_variants prolip train --method prolip-apart ...

prolip-apart: no gradient of the variances enters the tower. prolip-levels: the reader uses the tokens of all blocks,
not only the input of the last. Both are ProLIP's method; their saved models have our reader.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from prolip.methods import METHODS as OURS
from prolip.methods.base import Context
from prolip.methods.prolip import ProLIPConfig, ProLIPObjective


class Apart(ProLIPObjective):
    """ProLIP with a reader that sends no gradient to tokens and means."""

    def __init__(self, model: Any, config: ProLIPConfig, context: Context):
        super().__init__(model, config, context)
        for tower in model.towers().values():
            tower.reader.register_forward_pre_hook(without_gradient)


class Levels(ProLIPObjective):
    """ProLIP with a reader that attends to the outputs of all blocks in one softmax."""

    def __init__(self, model: Any, config: ProLIPConfig, context: Context):
        super().__init__(model, config, context)
        for tower in model.towers().values():
            levels: list[Tensor] = []
            for block in tower.blocks:
                block.register_forward_hook(partial(keep, levels))
            tower.reader.register_forward_pre_hook(partial(with_levels, levels))


def without_gradient(_: nn.Module, inputs: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Detach the inputs: tokens, means and the token mask."""
    return tuple(x if x is None else x.detach() for x in inputs)


def keep(levels: list[Tensor], _: nn.Module, __: Any, out: Tensor) -> None:
    """Store the output of a block."""
    levels.append(out)


def with_levels(
    levels: list[Tensor], _: nn.Module, inputs: tuple[Tensor, Tensor, Tensor | None]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Join the last K tokens of every level, (B, K, W) -> (B, levels K, W); an image tower's class token is first."""
    tokens, mean, valid = inputs
    every = torch.cat([level[:, -tokens.shape[1] :] for level in levels], 1)
    count = len(levels)
    levels.clear()
    return every, mean, None if valid is None else valid.repeat(1, count)


METHODS = {
    "prolip-apart": OURS["prolip"]._replace(objective=Apart),
    "prolip-levels": OURS["prolip"]._replace(objective=Levels),
}
