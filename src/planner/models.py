"""A model's parameters, FLOPs and shapes, counted on the meta device: nothing is allocated, nothing is a formula."""
from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from prolip.flops import FORWARD_AND_BACKWARD, forward_flops, image_sides
from prolip.methods import find_method
from prolip.models.prolip import ProLIP
from prolip.models.registry import get_model_config, list_models
from prolip.utils.flags import FlagError, did_you_mean


class Pass(NamedTuple):
    """One kind of pass through a tower, for one row.

    flops: of the forward pass, multiply and add counted apart; tokens, width, hidden (of the MLP), layers, heads: of
    the tower's blocks; inputs: elements that the first layer keeps; share: rows per row of the batch.
    """

    name: str
    flops: int
    tokens: int
    width: int
    hidden: int
    layers: int
    heads: int
    inputs: int
    share: float


class Model(NamedTuple):
    """Counts of a model. cast: parameters that autocast copies to bf16; largest: those of its largest block."""

    name: str
    parameters: int
    cast: int
    largest: int
    dim: int
    passes: tuple[Pass, ...]

    @property
    def flops(self) -> float:
        """Model FLOPs of one sample, forward and backward, without what is computed again."""
        return FORWARD_AND_BACKWARD * sum(part.flops * part.share for part in self.passes)


def count_of_run(name: str, method: str, local_batch: int) -> Model:
    """Count a model trained with a method at a batch per GPU, which rounds the rows of its further views."""
    model, (config, objective) = build(name), find_method(method)[:2]
    wanted = objective.passes(config(), local_batch, model.num_patches)
    copied = (nn.Linear, nn.Conv2d, nn.MultiheadAttention)  # to bf16, for the step, by autocast; heads run in float32
    cast = [module for path, module in model.named_modules()
            if isinstance(module, copied) and "uncertainty" not in path and "text_projection" not in path]
    return Model(
        name,
        parameters=size_of(model),
        cast=sum(size_of(module, recurse=False) for module in cast),
        largest=max(size_of(tower.transformer.resblocks[0]) for tower in (model.visual, model.text)),
        dim=model.embed_dim,
        passes=tuple(measure(name, part.kind, part.keep)._replace(share=part.rows / local_batch) for part in wanted),
    )


def size_of(module: nn.Module, recurse: bool = True) -> int:
    """Count a module's parameters."""
    return sum(p.numel() for p in module.parameters(recurse))


@lru_cache(maxsize=8)
def build(name: str) -> Any:
    """Build a bundled model on the meta device, without gradients."""
    if name not in list_models():
        remedy = did_you_mean(name, list_models(), f"give one of {', '.join(list_models())}")
        raise FlagError(f"--model {name!r} is no bundled architecture: {remedy}")
    with torch.device("meta"):
        return ProLIP(get_model_config(name)[0]).requires_grad_(False)


@lru_cache(maxsize=32)
def measure(name: str, kind: str, keep: int | None) -> Pass:
    """Measure one pass over one row: FLOPs by running it, tokens by the input of the first block."""
    model, seen = build(name), list[Tensor]()
    blocks = (model.visual if kind == "image" else model.text).transformer.resblocks
    handle = blocks[0].register_forward_pre_hook(lambda _, args, kwargs: seen.append((*args, *kwargs.values())[0]),
                                                 with_kwargs=True)
    flops = forward_flops(model, kind, keep)
    handle.remove()
    pixels = 3 * math.prod(image_sides(model)) if kind == "image" else 0
    return Pass(
        kind if keep is None else f"masked {kind}",
        flops,
        tokens=seen[0].numel() // seen[0].shape[-1],
        width=seen[0].shape[-1],
        hidden=blocks[0].mlp.c_fc.out_features,
        layers=len(blocks),
        heads=blocks[0].attn.num_heads,
        inputs=pixels if keep is None else pixels * keep // model.num_patches,
        share=1.0,
    )
