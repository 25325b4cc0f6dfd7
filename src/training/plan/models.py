"""A model's parameters, FLOPs and shapes, counted on the meta device: nothing is allocated, nothing is a formula."""
from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import open_clip
import torch
from open_clip.model import CLIP, CustomTextCLIP
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from prolip.factory import get_model_config, list_models
from prolip.masking import count_kept_patches, count_masked_rows
from prolip.methods.prolip import ProLIPConfig
from prolip.model import ProLIP
from training.flags import FlagError, nearest

# The backward pass multiplies twice for each product of the forward pass.
PASSES = 3


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
        return PASSES * sum(part.flops * part.share for part in self.passes)


def describe(name: str, method: str, local_batch: int) -> Model:
    """The counts of a model trained with a method at a batch per GPU, which rounds the number of masked rows."""
    ours = name in list_models()
    if not ours and name not in open_clip.list_models():
        known = [*list_models(), *open_clip.list_models()]
        near = nearest(name, known)
        remedy = f"did you mean {' or '.join(near)}?" if near else f"give one of {', '.join(list_models())}"
        if os.path.exists(name) or ":" in name:
            remedy = "a plan takes the name of an architecture, which a run's config.json has under model.model"
        raise FlagError(f"--model {name!r} is neither ours nor OpenCLIP's: {remedy}")
    return with_shares(count(name), ours and method == "prolip", local_batch)


def flops_per_sample(config: Mapping[str, Any], masked_views: bool, local_batch: int) -> float:
    """Model FLOPs of one sample, forward and backward, of a ProLIP configuration as a run has it."""
    with torch.device("meta"):
        model = ProLIP(config).requires_grad_(False)
    return with_shares(count_model("", model), masked_views, local_batch).flops


def with_shares(model: Model, masked_views: bool, local_batch: int) -> Model:
    """The counts with every kind of pass weighted by its rows."""
    if masked_views:
        masked = count_masked_rows(local_batch, ProLIPConfig().mask_fraction) / local_batch
        shares = {"image": 1.0, "masked image": masked, "text": 1 + masked}
    else:
        shares = {"image": 1.0, "masked image": 0.0, "text": 1.0}
    passes = [part._replace(share=shares[part.name]) for part in model.passes]
    return model._replace(passes=tuple(part for part in passes if part.share))


@lru_cache(maxsize=8)
def count(name: str) -> Model:
    """The counts of a bundled model, every kind of pass with share 1."""
    return count_model(name, build(name))


def count_model(name: str, model: Any) -> Model:
    """The counts of a model on the meta device."""
    size = model.visual.image_size
    height, width = (size, size) if isinstance(size, int) else size
    image = torch.empty(1, 3, height, width, device="meta")
    text = torch.empty(1, model.context_length, dtype=torch.int64, device="meta")
    is_timm = hasattr(model.visual, "trunk")
    passes = [
        measure("image", model.visual, lambda: model.encode_image(image), image.numel(), is_timm),
        measure("text", getattr(model, "text", model), lambda: model.encode_text(text), 0, True),
    ]
    if isinstance(model, ProLIP):
        kept = count_kept_patches(model.num_patches, ProLIPConfig().mask_ratio)
        keep = torch.empty(1, kept, dtype=torch.int64, device="meta")
        inputs = image.numel() * kept // model.num_patches
        passes.insert(
            1, measure("masked image", model.visual, lambda: model.encode_image(image, keep=keep), inputs, is_timm)
        )
    every = [sum(p.numel() for p in block.parameters()) for tower in (model.visual, getattr(model, "text", model))
             for block in blocks_of(tower)]
    return Model(
        name, sum(p.numel() for p in model.parameters()), count_cast(model), max(every), embed_dim(model),
        image.numel(), tuple(passes),
    )


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


def embed_dim(model: Any) -> int:
    """Width of the common space."""
    return model.embed_dim if isinstance(model, ProLIP) else open_clip_dim(model)


def open_clip_dim(model: Any) -> int:
    """Width of the common space of OpenCLIP's models, read off a text."""
    text = torch.empty(1, model.context_length, dtype=torch.int64, device="meta")
    return model.encode_text(text).shape[-1]


def blocks_of(tower: nn.Module) -> list[Any]:
    """The blocks of a tower's own transformer: the longest list of modules with attention, vision towers left out."""
    lists = [module for name, module in tower.named_modules()
             if isinstance(module, (nn.ModuleList, nn.Sequential)) and "visual" not in name.split(".")
             and len(module) and hasattr(module[0], "attn")]
    if not lists:
        raise FlagError(f"{type(tower).__name__} is no transformer of equal blocks: give a ViT")
    blocks = max(lists, key=len)
    return list(blocks)


def measure(name: str, tower: nn.Module, run: Callable[[], Any], inputs: int, float_stream: bool) -> Pass:
    """One pass over one row: FLOPs from the operations that run, tokens from what meets the first block."""
    blocks = blocks_of(tower)
    seen: list[Tensor] = []
    handle = blocks[0].register_forward_pre_hook(lambda _, args, kwargs: seen.append((*args, *kwargs.values())[0]),
                                                 with_kwargs=True)
    counter = FlopCounterMode(display=False)
    with counter:
        run()
    handle.remove()
    x = seen[0]
    linears = [module.out_features for module in blocks[0].mlp.modules() if isinstance(module, nn.Linear)]
    heads = getattr(blocks[0].attn, "num_heads", 1)
    tokens = x.numel() // x.shape[-1]
    return Pass(name, counter.get_total_flops(), tokens, x.shape[-1], max(linears), len(blocks), heads, float_stream,
                inputs, 1.0)


def count_cast(model: nn.Module) -> int:
    """Parameters of products and convolutions, which autocast copies to bf16 for the step; heads run in float32."""
    total = 0
    for name, module in model.named_modules():
        head = any(part in name for part in ("uncertainty", "text_projection"))
        if isinstance(module, (nn.Linear, nn.Conv2d)) and not head:
            total += sum(p.numel() for p in module.parameters(recurse=False))
        elif isinstance(module, nn.MultiheadAttention):
            total += sum(p.numel() for p in (module.in_proj_weight, module.in_proj_bias) if p is not None)
    return total
