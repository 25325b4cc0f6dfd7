"""What a model makes of its inputs before its blocks look at them, beside what it makes of them in the end.

Noise and blank pictures have ordinary means, and first tokens like no others: the last projection keeps only what
compares images with texts. So have texts in words that were never trained on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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
    inner = innermost(model)
    tower: Any = getattr(inner, "visual", None) if side == "image" else getattr(inner, "text", inner)
    tower = getattr(tower, "tower", tower)  # OpenCLIP's, beside its reader
    try:
        return tower if blocks_of(tower) else None
    except (AttributeError, StopIteration):
        return None


def blocks_of(tower: Any) -> Any:
    """The parts of OpenCLIP's tower that follow each other: blocks, or stages of a pyramid."""
    from open_clip.hf_model import HFTextEncoder  # late: they take seconds
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
    """What passes between the blocks of a tower, of ours or of OpenCLIP's, as tokens (B, L, W)."""
    trunk = getattr(getattr(tower, "tower", tower), "trunk", None)
    channels = -1 if getattr(trunk, "output_fmt", "") == "NHWC" else 1
    return x.movedim(channels, -1).flatten(1, 2) if x.ndim == 4 else x


@contextmanager
def first_tokens(tower: Any) -> Iterator[list[Tensor]]:
    """What the first block of OpenCLIP's tower, or of our own, takes in each pass inside: tokens (B, L, W)."""
    taken: list[Tensor] = []

    def take(_: nn.Module, args: tuple, named: dict[str, Any]) -> None:
        taken.append(as_tokens((*args, *named.values())[0], tower))

    handle = blocks_of(tower)[0].register_forward_pre_hook(take, with_kwargs=True)
    try:
        yield taken
    finally:
        handle.remove()


def innermost(model: nn.Module) -> nn.Module:
    """The model inside of those that give it variances, or none."""
    while isinstance(inner := getattr(model, "model", None), nn.Module):
        model = inner
    return model


def spread(tokens: Tensor) -> Tensor:
    """Mean and standard deviation over tokens, (B, L, W) -> (B, 2 W)."""
    x = upcast(tokens)
    return torch.cat([x.mean(1), x.std(1, correction=0)], 1)
