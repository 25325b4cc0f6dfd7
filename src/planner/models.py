"""A model's parameters, FLOPs and shapes, counted on the meta device: nothing is allocated, nothing is a formula."""
from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import nn

from prolip.flops import FORWARD_AND_BACKWARD, forward_flops, image_sides
from prolip.methods import find_method
from prolip.models.prolip import ProLIP
from prolip.models.registry import get_model_config
from prolip.uncertainty.hidden import as_tokens
from prolip.utils.flags import FlagError

#: Parts of the names of heads, which run in float32.
EXACT = ("uncertainty", "text_projection", "log_var")


class Pass(NamedTuple):
    """One kind of pass through a tower, for one row.

    flops: of the forward pass, multiply and add counted apart; tokens, width, hidden (of the MLP), heads: of the
    tower's blocks, means over `layers` of them where they differ, as in a pyramid: of the tokens plainly, of the others
    by tokens, so that sums over the blocks are those of the tower; inputs: elements that the first layer keeps; share:
    rows per row of the batch.
    """

    name: str
    flops: int
    tokens: float
    width: float
    hidden: float
    layers: int
    heads: float
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
    wanted = objective.passes(config(), local_batch, model)
    copied = (nn.Linear, nn.Conv2d, nn.MultiheadAttention)  # to bf16, for the step, by autocast
    cast = [module for path, module in model.named_modules()
            if isinstance(module, copied) and not any(part in path for part in EXACT)]
    return Model(
        name,
        parameters=size_of(model),
        cast=sum(size_of(module, recurse=False) for module in cast),
        largest=max(size_of(block) for tower in (model.visual, model.text) for block in tower.blocks),
        dim=model.embed_dim,
        passes=tuple(measure(name, part.kind, part.keep)._replace(share=part.rows / local_batch) for part in wanted),
    )


def size_of(module: nn.Module, recurse: bool = True) -> int:
    """Count a module's parameters."""
    return sum(p.numel() for p in module.parameters(recurse))


@lru_cache(maxsize=8)
def build(name: str) -> Any:
    """Build a model by name on the meta device, without gradients."""
    try:
        config, _ = get_model_config(name)
    except (ValueError, FileNotFoundError) as error:
        raise FlagError(f"--model {name!r}: {error}") from error
    with torch.device("meta"):
        return ProLIP(config).requires_grad_(False)


@lru_cache(maxsize=32)
def measure(name: str, kind: str, keep: int | None) -> Pass:
    """Measure one pass over one row: FLOPs by running it, tokens by what each block gives.

    hidden: the widest input of a block's products, which is the MLP's.
    """
    model, seen = build(name), list[tuple[int, ...]]()
    tower = model.visual if kind == "image" else model.text

    def look(block: nn.Module, _: Any, output: Any) -> None:
        x = as_tokens(output[0] if isinstance(output, tuple) else output, tower)
        products = max(getattr(part, "in_features", getattr(part, "in_channels", 0)) for part in block.modules())
        heads = max(int(getattr(part, "num_heads", 0)) for part in block.modules())
        seen.append((x.shape[1], x.shape[2], products, heads))

    trunk = getattr(getattr(tower, "tower", None), "trunk", None)
    stem = getattr(getattr(trunk, "patch_embed", None), "backbone", None)  # ViTamin's stages before its blocks
    stages = [*getattr(stem, "stages", ()), *tower.blocks]
    handles = [block.register_forward_hook(look) for block in single_blocks(stages)]
    try:
        flops = forward_flops(model, kind, keep)
    except NotImplementedError as error:
        raise FlagError(f"--model {name!r}: {error}") from None
    finally:
        for handle in handles:
            handle.remove()
    pixels = 3 * math.prod(image_sides(model)) if kind == "image" else 0
    tokens = sum(block[0] for block in seen)
    width, hidden, heads = (sum(block[0] * block[i] for block in seen) / tokens for i in (1, 2, 3))
    return Pass(
        kind if keep is None else f"masked {kind}",
        flops,
        tokens=tokens / len(seen),
        width=width,
        hidden=hidden,
        layers=len(seen),
        heads=heads,
        inputs=pixels if keep is None or tower.has_reader else pixels * keep // model.num_patches,
        share=1.0,
    )


def single_blocks(stages: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """A tower's blocks; of the stages of a pyramid those within."""
    for stage in stages:
        yield from getattr(stage, "blocks", stage if isinstance(stage, nn.Sequential) else (stage,))
