"""Weights of OpenCLIP's models for towers with readers, in both directions: its names are ours without `tower`."""
from __future__ import annotations

import os
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from open_clip.convert import convert_state_dict, load_big_vision_weights
from open_clip.model import convert_to_custom_text_state_dict, resize_pos_embed, resize_text_pos_embed
from torch import Tensor

TOWERS = ("visual", "text")
#: What transformers' towers have no longer saved since its version 4.31.
OBSOLETE = ("text.transformer.embeddings.position_ids",)
BIG_VISION = (".npz", ".npy")


def is_openclip(state: Mapping[str, Tensor]) -> bool:
    """Whether these are the names of OpenCLIP's model, not those of a run of ours."""
    return not any(name.startswith(tuple(f"{tower}.tower." for tower in TOWERS)) for name in state)


def openclip_view(model: Any) -> SimpleNamespace:
    """The model as OpenCLIP's functions take it."""
    return SimpleNamespace(visual=model.visual.tower, text=model.text.tower, logit_scale=model.logit_scale,
                           logit_bias=model.logit_bias)  # fmt: skip


def from_openclip(model: Any, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights under our names: of whatever program OpenCLIP converts, with positions of another size interpolated."""
    view: Any = openclip_view(model)
    found = convert_state_dict(view, dict(state))
    if "positional_embedding" in found:  # of OpenCLIP's first class, whose text tower is no part of its own
        found = convert_to_custom_text_state_dict(found)
    found = {name: value for name, value in found.items() if name not in OBSOLETE}
    resize_pos_embed(found, view)
    resize_text_pos_embed(found, view)
    return {inside(name): value for name, value in found.items()}


def completed(
    model: Any, state: Mapping[str, Tensor], beside: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], set[str]]:
    """OpenCLIP's weights under our names, with `beside`, what readers and methods added, or the initial values of
    readers and bias; names of these.
    """
    own = model.state_dict()
    found = from_openclip(model, state) | dict(beside)
    new = {name for name in own if ".reader." in name or name == "logit_bias"}
    kept = new - found.keys()
    return found | {name: own[name].clone() for name in kept}, kept


def load_big_vision(model: Any, path: str | os.PathLike) -> None:
    """Put the weights of a big_vision archive, as SigLIP's are published, into the model."""
    load_big_vision_weights(openclip_view(model), str(path))


def inside(name: str) -> str:
    """OpenCLIP's name of a tensor -> ours."""
    tower, dot, rest = name.partition(".")
    return f"{tower}.tower.{rest}" if tower in TOWERS and dot else name


def to_openclip(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(what OpenCLIP's model has, under its names; what readers and methods add) of a whole state."""
    theirs, ours = {}, {}
    for name, value in state.items():
        tower, _, rest = name.partition(".")
        if tower in TOWERS and rest.startswith("tower."):
            theirs[f"{tower}.{rest.removeprefix('tower.')}"] = value
        elif name in ("logit_scale", "logit_bias") or tower == "text_decoder":
            theirs[name] = value
        else:
            ours[name] = value
    return theirs, ours
