"""Weights of OpenCLIP's models for towers with readers, in both directions: its names are ours without `tower`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from open_clip.convert import convert_state_dict
from open_clip.model import convert_to_custom_text_state_dict, resize_pos_embed, resize_text_pos_embed
from timm.layers import resample_abs_pos_embed
from torch import Tensor

OURS = re.compile(r"(visual|text)\.tower\.")


def from_openclip(model: Any, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of any program that OpenCLIP converts under our names, positions of another size interpolated.

    Besides what OpenCLIP's `resize_pos_embed` does: those of timm's towers, of a ResNet's pool, of texts with [CLS].
    """
    visual, text = model.visual.tower, model.text.tower  # a model in the form that OpenCLIP's functions take
    view: Any = SimpleNamespace(visual=visual, text=text, logit_scale=model.logit_scale, logit_bias=model.logit_bias)
    found = convert_state_dict(view, dict(state))
    if "positional_embedding" in found:  # of OpenCLIP's first class, whose text tower is no part of its own
        found = convert_to_custom_text_state_dict(found)
    found.pop("text.transformer.embeddings.position_ids", None)  # not saved by transformers since version 4.31
    resize_pos_embed(found, view)
    trunk = getattr(view.visual, "trunk", None)
    for name in ("visual.trunk.pos_embed", "visual.attnpool.positional_embedding"):
        old, new = found.get(name), view.visual.state_dict().get(name.removeprefix("visual."))
        if old is None or new is None or old.shape[-2] == new.shape[-2]:
            continue
        special = 1 if trunk is None else 0 if trunk.no_embed_class else trunk.num_prefix_tokens
        grid = [math.isqrt(len(new) - 1)] * 2 if trunk is None else list(trunk.patch_embed.grid_size)
        rows = resample_abs_pos_embed(old.reshape(1, -1, old.shape[-1]), grid, num_prefix_tokens=special)
        found[name] = rows.reshape(*new.shape[:-1], -1)
    name = "text.positional_embedding"
    if getattr(view.text, "cls_emb", None) is None or name not in found:
        resize_text_pos_embed(found, view)
    else:
        words = {name: found[name][:-1]}
        own = SimpleNamespace(positional_embedding=view.text.positional_embedding[:-1])
        resize_text_pos_embed(words, SimpleNamespace(text=own))
        found[name] = torch.cat([words[name], found[name][-1:]])
    return {re.sub(r"^(visual|text)\.", r"\1.tower.", name): value for name, value in found.items()}


def to_openclip(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(tensors of OpenCLIP's model, under its names; those of readers and methods) of a whole state."""
    theirs, ours = {}, {}
    for name, value in state.items():
        if OURS.match(name):
            theirs[name.replace("tower.", "", 1)] = value
        elif name in ("logit_scale", "logit_bias") or name.startswith("text_decoder."):
            theirs[name] = value
        else:
            ours[name] = value
    return theirs, ours
