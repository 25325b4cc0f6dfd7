"""Token statistics before a tower's first block, next to its embedding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from prolip.gaussian import Gaussian, check_gaussian, upcast
from prolip.scores import Side


class Encoded(NamedTuple):
    """Images or texts at both ends of their tower, from one pass without a graph."""

    z: Gaussian  # (B, D), unit means
    #: (B, 2 W) float32, mean and standard deviation over the tokens, or places, that enter the first block, padding
    #: included; None where the tower has no blocks.
    token_stats: Tensor | None


def encode_with_stats(model: nn.Module, batch: Tensor, side: Side = "image") -> Encoded:
    """Encode a batch of pixels (B, 3, H, W), or token ids (B, L) for side "text", by a model or its wrapper."""
    tower, taken = tower_of(model, side), list[Tensor]()
    with ExitStack() as held, torch.no_grad():
        if tower is not None:
            taken = held.enter_context(first_tokens(tower))
        z = getattr(model, f"encode_{side}")(batch)
    check_gaussian(z, f"the output of encode_{side}")
    x = upcast(taken[0]) if taken else None
    return Encoded(z, None if x is None else torch.cat([x.mean(1), x.std(1, correction=0)], 1))


def tower_of(model: nn.Module, side: Side = "image") -> Any:
    """Return a model's tower, ours or OpenCLIP's (early ones are their text tower); None without known blocks."""
    inner = innermost(model)
    tower: Any = getattr(inner, "visual", None) if side == "image" else getattr(inner, "text", inner)
    tower = getattr(tower, "tower", tower)  # OpenCLIP's tower, next to its reader
    try:
        return tower if blocks_of(tower) else None
    except (AttributeError, StopIteration):
        return None


def blocks_of(tower: Any) -> Any:
    """Return the consecutive parts of OpenCLIP's tower: blocks, or stages of a pyramid."""
    from open_clip.hf_model import HFTextEncoder  # imported late: takes seconds
    from open_clip.modified_resnet import ModifiedResNet
    from open_clip.timm_model import TimmModel

    if isinstance(tower, HFTextEncoder):
        lists = [list(part) for part in tower.transformer.modules() if isinstance(part, nn.ModuleList)]
        return max(lists, key=len)
    if isinstance(tower, ModifiedResNet):
        return [tower.layer1, tower.layer2, tower.layer3, tower.layer4]
    if isinstance(tower, TimmModel):
        return next(getattr(tower.trunk, name) for name in ("blocks", "stages", "layers") if hasattr(tower.trunk, name))
    return tower.transformer.resblocks


def as_tokens(x: Tensor, tower: Any) -> Tensor:
    """Return the values between the blocks of a tower, ours or OpenCLIP's, as tokens (B, L, W)."""
    trunk = getattr(getattr(tower, "tower", tower), "trunk", None)
    channels = -1 if getattr(trunk, "output_fmt", "") == "NHWC" else 1
    return x.movedim(channels, -1).flatten(1, 2) if x.ndim == 4 else x


@contextmanager
def first_tokens(tower: Any) -> Iterator[list[Tensor]]:
    """Collect the inputs of the first block of a tower in each pass inside: tokens (B, L, W)."""
    taken: list[Tensor] = []

    def take(_: nn.Module, args: tuple, named: dict[str, Any]) -> None:
        taken.append(as_tokens((*args, *named.values())[0], tower))

    handle = blocks_of(tower)[0].register_forward_pre_hook(take, with_kwargs=True)
    try:
        yield taken
    finally:
        handle.remove()


def innermost(model: nn.Module) -> nn.Module:
    while isinstance(inner := getattr(model, "model", None), nn.Module):
        model = inner
    return model
