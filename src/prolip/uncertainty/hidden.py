"""What a model makes of its inputs before its blocks look at them, beside what it makes of them in the end.

Noise and blank pictures have ordinary means, and first tokens like no others: the last projection keeps only what
compares images with texts. So have texts in words that were never trained on.
"""
from __future__ import annotations

from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from prolip.gaussian import Gaussian, check_gaussian, upcast
from prolip.scores import Side


class Hidden(NamedTuple):
    """Images or texts at both ends of their tower, by one pass and without a graph.

    z: (B, D) as the model encodes them, unit means; first: (B, 2 W) float32, mean and standard deviation over the
    tokens, or places, that the first block takes, padding included, None where the tower has no blocks.
    """

    z: Gaussian
    first: Tensor | None


def encode_hidden(model: nn.Module, batch: Tensor, side: Side = "image") -> Hidden:
    """One batch of pixels (B, 3, H, W) through `model.encode_image`, or of token ids (B, L) through
    `model.encode_text`; models around a model are looked through.

    TypeError for a model whose inputs become no Gaussians.
    """
    from prolip.models.readers import first_tokens  # late: it takes seconds

    tower, taken = tower_of(model, side), list[Tensor]()
    with ExitStack() as held, torch.no_grad():
        if tower is not None:
            taken = held.enter_context(first_tokens(tower))
        z = getattr(model, f"encode_{side}")(batch)
    check_gaussian(z, f"what the model made of its {side}s")
    return Hidden(z, spread(taken[0]) if taken else None)


def tower_of(model: nn.Module, side: Side = "image") -> Any:
    """OpenCLIP's tower, or one of ours, inside a model; None where it has no blocks that anybody knows.

    OpenCLIP's first models have their text tower's parts beside the image tower.
    """
    from prolip.models.readers import blocks_of  # late, as above

    inner = innermost(model)
    tower: Any = getattr(inner, "visual", None) if side == "image" else getattr(inner, "text", inner)
    tower = getattr(tower, "tower", tower)  # OpenCLIP's, beside its reader
    try:
        return tower if blocks_of(tower) else None
    except (AttributeError, StopIteration):
        return None


def innermost(model: nn.Module) -> nn.Module:
    """The model inside of those that give it variances, or none."""
    while isinstance(inner := getattr(model, "model", None), nn.Module):
        model = inner
    return model


def spread(tokens: Tensor) -> Tensor:
    """Mean and standard deviation over tokens, (B, L, W) -> (B, 2 W)."""
    x = upcast(tokens)
    return torch.cat([x.mean(1), x.std(1, correction=0)], 1)
