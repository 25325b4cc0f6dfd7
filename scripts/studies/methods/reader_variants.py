"""Readers with other inputs from their tower, as methods that scripts/studies/methods/towers.py compares with ours.

    PYTHONPATH=scripts PROLIP_METHODS=reader_variants prolip train --method prolip-apart ...

prolip-apart: no gradient of the variances enters the tower. prolip-levels: the tokens of all blocks are read, not only
those that the last one takes. Both are ProLIP's method; a saved model of theirs has the reader of ours.
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
    """The reader learns from tokens and means as they are."""

    def __init__(self, model: Any, config: ProLIPConfig, context: Context):
        super().__init__(model, config, context)
        for tower in model.towers().values():
            tower.reader.register_forward_pre_hook(without_gradient)


class Levels(ProLIPObjective):
    """The reader attends to what every block makes, in one softmax over all of it."""

    def __init__(self, model: Any, config: ProLIPConfig, context: Context):
        super().__init__(model, config, context)
        for tower in model.towers().values():
            levels: list[Tensor] = []
            for block in tower.blocks:
                block.register_forward_hook(partial(keep, levels))
            tower.reader.register_forward_pre_hook(partial(with_levels, levels))


def without_gradient(_: nn.Module, inputs: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Tokens, means and which tokens count."""
    return tuple(x if x is None else x.detach() for x in inputs)


def keep(levels: list[Tensor], _: nn.Module, __: Any, out: Tensor) -> None:
    """What a block makes."""
    levels.append(out)


def with_levels(
    levels: list[Tensor], _: nn.Module, inputs: tuple[Tensor, Tensor, Tensor | None]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Tokens (B, K, W) -> (B, levels K, W), of the last K places of a level: an image tower's class token is first."""
    tokens, mean, valid = inputs
    every = torch.cat([level[:, -tokens.shape[1] :] for level in levels], 1)
    count = len(levels)
    levels.clear()
    return every, mean, None if valid is None else valid.repeat(1, count)


METHODS = {
    "prolip-apart": OURS["prolip"]._replace(objective=Apart),
    "prolip-levels": OURS["prolip"]._replace(objective=Levels),
}
