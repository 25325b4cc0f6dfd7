"""What a model makes of its inputs before its blocks look at them, beside what it makes of them in the end.

Noise and blank pictures have ordinary means, and first tokens like no others: the last projection keeps only what
compares images with texts. So have texts in words that were never trained on.
"""
from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from prolip.gaussian import Gaussian, check_gaussian, upcast
from prolip.scores import Side


class Hidden(NamedTuple):
    """Images or texts at both ends of their tower, by one pass and without a graph.

    z: (B, D) as the model encodes them, unit means; first: (B, 2 W) float32, mean and standard deviation over the
    tokens that the first block takes, padding included, None where the tower is no transformer of OpenCLIP or timm.
    """

    z: Gaussian
    first: Tensor | None


def encode_hidden(model: nn.Module, batch: Tensor, side: Side = "image") -> Hidden:
    """One batch of pixels (B, 3, H, W) through `model.encode_image`, or of token ids (B, L) through
    `model.encode_text`; models around a model are looked through.

    TypeError for a model whose inputs become no Gaussians.
    """
    blocks, taken = blocks_of(model, side), []
    hook = None if blocks is None else blocks.register_forward_pre_hook(lambda module, args: taken.append(args[0]))
    try:
        with torch.no_grad():
            z = getattr(model, f"encode_{side}")(batch)
            check_gaussian(z, f"what the model made of its {side}s")
            return Hidden(z, spread(taken[0]) if taken else None)
    finally:
        if hook is not None:
            hook.remove()


def blocks_of(model: nn.Module, side: Side = "image") -> nn.Module | None:
    """The blocks of a tower, which take tokens (B, L, W): OpenCLIP's or timm's; None where it has no such.

    OpenCLIP's first models have their text tower's parts beside the image tower.
    """
    from open_clip.transformer import Transformer  # late: both take seconds
    from timm.models import VisionTransformer

    inner = innermost(model)
    tower: Any = getattr(inner, "visual", None) if side == "image" else getattr(inner, "text", inner)
    tower = getattr(tower, "tower", tower)  # OpenCLIP's, beside its reader
    trunk = getattr(tower, "trunk", None)
    if isinstance(trunk, VisionTransformer):
        return trunk.blocks
    blocks = getattr(tower, "transformer", None)
    return blocks if isinstance(blocks, Transformer) else None


def innermost(model: nn.Module) -> nn.Module:
    """The model inside of those that give it variances, or none."""
    while isinstance(inner := getattr(model, "model", None), nn.Module):
        model = inner
    return model


def spread(tokens: Tensor) -> Tensor:
    """Mean and standard deviation over tokens, (B, L, W) -> (B, 2 W)."""
    x = upcast(tokens)
    return torch.cat([x.mean(1), x.std(1, correction=0)], 1)
