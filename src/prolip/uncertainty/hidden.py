"""What a model makes of images before its blocks look at them, beside what it makes of them in the end.

Noise and blank pictures have ordinary means, and first tokens like no others: the last projection keeps only what
compares images with texts.
"""
from __future__ import annotations

from typing import Any, NamedTuple

import torch
from open_clip.transformer import Transformer
from timm.models import VisionTransformer
from torch import Tensor, nn

from prolip.gaussian import Gaussian, check_gaussian, upcast


class Hidden(NamedTuple):
    """Images at both ends of a model, by one pass and without a graph.

    z: (B, D) as the model encodes them, unit means; first: (B, 2 W) float32, mean and standard deviation over the
    tokens that the first block takes, None where the image tower is no transformer.
    """

    z: Gaussian
    first: Tensor | None


def encode_hidden(model: nn.Module, images: Tensor) -> Hidden:
    """One batch of pixels (B, 3, H, W) through `model.encode_image`; models around a model are looked through.

    TypeError for a model whose images become no Gaussians.
    """
    blocks, taken = blocks_of(model), []
    hook = None if blocks is None else blocks.register_forward_pre_hook(lambda module, args: taken.append(args[0]))
    try:
        with torch.no_grad():
            z = model.encode_image(images)  # type: ignore[operator]
            check_gaussian(z, "what the model made of its images")
            return Hidden(z, spread(taken[0]) if taken else None)
    finally:
        if hook is not None:
            hook.remove()


def blocks_of(model: nn.Module) -> nn.Module | None:
    """The blocks of the image tower, which take tokens (B, L, W): OpenCLIP's or timm's; None where it has no such."""
    visual: Any = getattr(innermost(model), "visual", None)
    trunk = getattr(visual, "trunk", None)
    if isinstance(trunk, VisionTransformer):
        return trunk.blocks
    blocks = getattr(visual, "transformer", None)
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
