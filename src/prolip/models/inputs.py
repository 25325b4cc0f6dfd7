"""Checks of the towers' inputs: types, dtypes, shapes and devices at every call, each with the remedy."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from prolip.gaussian import kind_of

PIXEL_LIMIT = 20.0  # Pixels of the usual means and standard deviations lie within 3 of 0, and raw ones reach 255
TOKENISE = "tokenise with get_tokenizer(<this model>)"


def check_images(x: Any, image_size: Sequence[int], device: torch.device, raw: bool = False) -> None:
    """TypeError and ValueError unless `x` is (B, 3, H, W), floats or, where `raw`, uint8, on `device`."""
    if not isinstance(x, Tensor):
        raise TypeError(f"images are {kind_of(x)}, want a tensor: torch.stack([preprocess(picture), ...])")
    if x.layout != torch.strided:
        raise TypeError(f"images are {x.layout}, want a dense tensor: x.to_dense()")
    if not x.is_floating_point() and not (raw and x.dtype == torch.uint8):
        raise TypeError(f"images are {x.dtype}, want normalised floats, or uint8 for encode_image: x.to(torch.uint8)")
    if torch.jit.is_tracing():  # shapes are variables there
        return
    if x.ndim != 4 or tuple(x.shape[1:]) != (3, *image_size):
        remedy = "stack the preprocessed pictures (of one x[None]), or create the model with force_image_size"
        wanted = ", ".join(map(str, (3, *image_size)))
        raise ValueError(f"images are {tuple(x.shape)}, want (B, {wanted}): {remedy}")
    if x.device != device:
        raise ValueError(f"images are on {x.device} and the model on {device}: move them with .to({str(device)!r})")


def check_keep(keep: Any, rows: int) -> None:
    """TypeError and ValueError unless `keep` is (B, K) int64."""
    if not isinstance(keep, Tensor):
        raise TypeError(f"keep is {kind_of(keep)}, want a tensor ({rows}, K) torch.int64: torch.tensor(keep)")
    if keep.ndim != 2 or keep.shape[0] != rows or keep.dtype != torch.int64 or keep.shape[1] == 0:
        found = f"{tuple(keep.shape)} {keep.dtype}"
        raise ValueError(f"keep is {found}, want ({rows}, K) torch.int64, K >= 1: kept patch indices by image")


def check_texts(text: Any, context_length: int, device: torch.device) -> None:
    """TypeError and ValueError unless `text` is (B, L) token ids, 1 <= L <= context, on `device`."""
    if not isinstance(text, Tensor):
        raise TypeError(f"texts are {kind_of(text)}, want a tensor of token ids: {TOKENISE}")
    if text.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"texts are {text.dtype}, want token ids in torch.int64: {TOKENISE}, or text.long()")
    if torch.jit.is_tracing():
        return
    if text.ndim != 2 or not 1 <= text.shape[1] <= context_length:
        wanted = f"(B, L), 1 <= L <= {context_length}"
        raise ValueError(f"texts are {tuple(text.shape)}, want {wanted}: {TOKENISE}, or force_context_length")
    if text.device != device:
        raise ValueError(f"texts are on {text.device} and the model on {device}: move them with .to({str(device)!r})")


def check_pixels(x: Tensor) -> None:
    """Warn of floats that were not normalised; ValueError for NaN and infinity."""
    if not x.numel():
        return
    low, high = x.detach().aminmax()
    if not holds(~((low > -PIXEL_LIMIT) & (high < PIXEL_LIMIT))):
        return
    if not torch.isfinite(x).all():
        raise ValueError("images hold NaN or infinity: leave those rows out, x[x.flatten(1).isfinite().all(1)]")
    remedy = "normalise them by the model's preprocess, or give uint8 of 0 to 255 to encode_image"
    warnings.warn(f"images have values beyond {PIXEL_LIMIT:g}: {remedy}", stacklevel=3)


def check_indices(name: str, x: Tensor, count: int, remedy: str) -> None:
    """ValueError unless all of these integers are in [0, count)."""
    if not x.numel():
        return
    low, high = x.aminmax()
    if holds((low < 0) | (high >= count)):
        raise ValueError(f"{name} are from {low.item()} to {high.item()}, want 0 to {count - 1}: {remedy}")


def holds(condition: Tensor) -> bool:
    """Whether a () condition is true; False for tensors without values (meta, fake, vmap)."""
    try:
        return bool(condition)
    except RuntimeError:
        return False
