"""A model's parameters, FLOPs and shapes, counted on the meta device: nothing is allocated, nothing is a formula."""
from __future__ import annotations

import math
import os
from functools import lru_cache
from typing import Any, NamedTuple

import open_clip
import torch
from open_clip.model import CLIP, CustomTextCLIP
from torch import Tensor, nn

from prolip.flops import FORWARD_AND_BACKWARD, forward_flops, image_sides
from prolip.methods import find_method
from prolip.methods.base import Objective
from prolip.models.prolip import ProLIP
from prolip.models.registry import get_model_config, list_models
from prolip.utils.flags import FlagError, did_you_mean


class Pass(NamedTuple):
    """One kind of pass through a tower, for one row.

    flops: of the forward pass, multiply and add counted apart; tokens, width, hidden (of the MLP), layers, heads: of
    the tower's blocks; float_stream: whether the residual stream is float32 under autocast; inputs: elements of the
    input that the first layer keeps; share: rows per row of the batch.
    """

    name: str
    flops: int
    tokens: int
    width: int
    hidden: int
    layers: int
    heads: int
    float_stream: bool
    inputs: int
    share: float


class Model(NamedTuple):
    """Counts of a model. cast: parameters that autocast copies to bf16; largest: those of its largest block."""

    name: str
    parameters: int
    cast: int
    largest: int
    dim: int
    pixels: int
    passes: tuple[Pass, ...]

    @property
    def flops(self) -> float:
        """Model FLOPs of one sample, forward and backward, without what is computed again."""
        return FORWARD_AND_BACKWARD * sum(part.flops * part.share for part in self.passes)


def count_of_run(name: str, method: str, local_batch: int) -> Model:
    """The counts of a model trained with a method at a batch per GPU, which rounds the rows of its further views."""
    ours = name in list_models()
    if not ours and name not in open_clip.list_models():
        known = [*list_models(), *open_clip.list_models()]
        remedy = did_you_mean(name, known, f"give one of {', '.join(list_models())}")
        if os.path.exists(name) or ":" in name:
            remedy = "a plan takes the name of an architecture, which a run's config.json has under model.model"
        raise FlagError(f"--model {name!r} is neither ours nor OpenCLIP's: {remedy}")
    config, objective = find_method(method)[:2] if ours else (dict, Objective)
    wanted = objective.passes(config(), local_batch, getattr(build(name), "num_patches", 0))
    passes = [measure(name, part.kind, part.keep)._replace(share=part.rows / local_batch) for part in wanted]
    return count(name)._replace(passes=tuple(passes))


@lru_cache(maxsize=8)
def count(name: str) -> Model:
    """The counts of a bundled model, without its passes."""
    model = build(name)
    every = [sum(p.numel() for p in block.parameters()) for tower in (model.visual, getattr(model, "text", model))
             for block in blocks_of(tower)]
    if isinstance(model, ProLIP):
        dim = model.embed_dim
    else:  # OpenCLIP's models do not say: read off a text
        dim = model.encode_text(torch.empty(1, model.context_length, dtype=torch.int64, device="meta")).shape[-1]
    cast = 0  # those of products and convolutions, which autocast copies to bf16 for the step; heads run in float32
    for path, module in model.named_modules():
        head = any(part in path for part in ("uncertainty", "text_projection"))
        if isinstance(module, (nn.Linear, nn.Conv2d)) and not head:
            cast += sum(p.numel() for p in module.parameters(recurse=False))
        elif isinstance(module, nn.MultiheadAttention):
            cast += sum(p.numel() for p in (module.in_proj_weight, module.in_proj_bias) if p is not None)
    total = sum(p.numel() for p in model.parameters())
    return Model(name, total, cast, max(every), dim, 3 * math.prod(image_sides(model)), ())


@lru_cache(maxsize=8)
def build(name: str) -> Any:
    """The model on the meta device, without gradients: FlopCounterMode cannot follow parameters without a graph."""
    with torch.device("meta"):
        if name in list_models():
            return ProLIP(get_model_config(name)[0]).requires_grad_(False)
        config = open_clip.get_model_config(name)
        if config is None or {"multimodal_cfg", "hf_model_name"} & {*config, *config.get("text_cfg", {})}:
            raise FlagError(f"--model {name} has a tower that is no plain transformer: give another model")
        kind = CustomTextCLIP if config.pop("custom_text", False) else CLIP
        return kind(**config).requires_grad_(False)


def blocks_of(tower: nn.Module) -> list[Any]:
    """The blocks of a tower's own transformer: the longest list of modules with attention, vision towers left out."""
    lists = [module for name, module in tower.named_modules()
             if isinstance(module, (nn.ModuleList, nn.Sequential)) and "visual" not in name.split(".")
             and len(module) and hasattr(module[0], "attn")]
    if not lists:
        raise FlagError(f"{type(tower).__name__} is no transformer of equal blocks: give a ViT")
    return list(max(lists, key=len))


@lru_cache(maxsize=32)
def measure(name: str, kind: str, keep: int | None) -> Pass:
    """One pass over one row of a bundled model: FLOPs of what runs, tokens by what meets the first block."""
    model = build(name)
    tower = model.visual if kind == "image" else getattr(model, "text", model)
    blocks = blocks_of(tower)
    seen: list[Tensor] = []
    handle = blocks[0].register_forward_pre_hook(lambda _, args, kwargs: seen.append((*args, *kwargs.values())[0]),
                                                 with_kwargs=True)
    flops = forward_flops(model, kind, keep)
    handle.remove()
    x = seen[0]
    linears = [module.out_features for module in blocks[0].mlp.modules() if isinstance(module, nn.Linear)]
    pixels = 3 * math.prod(image_sides(model)) if kind == "image" else 0
    return Pass(
        name=kind if keep is None else f"masked {kind}",
        flops=flops,
        tokens=x.numel() // x.shape[-1],
        width=x.shape[-1],
        hidden=max(linears),
        layers=len(blocks),
        heads=getattr(blocks[0].attn, "num_heads", 1),
        # OpenCLIP's text towers, and timm's, add bf16 to float32
        float_stream=kind == "text" or hasattr(model.visual, "trunk"),
        inputs=pixels if keep is None else pixels * keep // model.num_patches,
        share=1.0,
    )
