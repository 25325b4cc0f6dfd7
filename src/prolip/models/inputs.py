"""Checks of the towers' inputs: types, dtypes, shapes and devices, each with a remedy."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from prolip.gaussian import kind_of

PIXEL_LIMIT = 20.0  # normalised pixels are within 3 of 0; raw pixels reach 255
TOKENISE = "Tokenise with get_tokenizer(<this model>)"


def check_images(x: Any, image_size: Sequence[int], device: torch.device, raw: bool = False) -> None:
    """Raise TypeError or ValueError unless `x` is (B, 3, H, W), floats or (if `raw`) uint8, on `device`."""
    if not isinstance(x, Tensor):
        raise TypeError(f"expected images as a tensor, got {kind_of(x)}. Use torch.stack([preprocess(image), ...])")
    if x.layout != torch.strided:
        raise TypeError(f"expected images as a dense tensor, got {x.layout}. Use x.to_dense()")
    if not x.is_floating_point() and not (raw and x.dtype == torch.uint8):
        raise TypeError(f"expected images as floats or (for encode_image) uint8, got {x.dtype}. Use x.to(torch.uint8)")
    if torch.jit.is_tracing():  # shapes are variables in a trace
        return
    if x.ndim != 4 or tuple(x.shape[1:]) != (3, *image_size):
        remedy = "Stack preprocessed images (a single one: x[None]), or create the model with force_image_size"
        sizes = ", ".join(map(str, (3, *image_size)))
        raise ValueError(f"expected images of shape (B, {sizes}), got {tuple(x.shape)}. {remedy}")
    if x.device != device:
        raise ValueError(f"images are on {x.device}, but the model is on {device}. Use .to({str(device)!r})")


def check_keep(keep: Any, rows: int) -> None:
    """Raise TypeError or ValueError unless `keep` is (B, K) int64."""
    if not isinstance(keep, Tensor):
        raise TypeError(f"expected keep as a tensor ({rows}, K) torch.int64, got {kind_of(keep)}. Use torch.tensor")
    if keep.ndim != 2 or keep.shape[0] != rows or keep.dtype != torch.int64 or keep.shape[1] == 0:
        found = f"{tuple(keep.shape)} {keep.dtype}"
        raise ValueError(f"expected keep as ({rows}, K) torch.int64, K >= 1, got {found}. Give patch indices per image")


def check_texts(text: Any, context_length: int, device: torch.device) -> None:
    """Raise TypeError or ValueError unless `text` is (B, L) token ids, 1 <= L <= context, on `device`."""
    if not isinstance(text, Tensor):
        raise TypeError(f"expected texts as a tensor of token ids, got {kind_of(text)}. {TOKENISE}")
    if text.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"expected token ids in torch.int64, got {text.dtype}. {TOKENISE}, or use text.long()")
    if torch.jit.is_tracing():
        return
    if text.ndim != 2 or not 1 <= text.shape[1] <= context_length:
        expected = f"(B, L), 1 <= L <= {context_length}"
        raise ValueError(
            f"expected texts of shape {expected}, got {tuple(text.shape)}. {TOKENISE}, or use force_context_length"
        )
    if text.device != device:
        raise ValueError(f"texts are on {text.device}, but the model is on {device}. Use .to({str(device)!r})")


def check_pixels(x: Tensor) -> None:
    """Warn of floats that are not normalised; ValueError for NaN and infinity."""
    if not x.numel():
        return
    low, high = x.detach().aminmax()
    if not holds(~((low > -PIXEL_LIMIT) & (high < PIXEL_LIMIT))):
        return
    if not torch.isfinite(x).all():
        raise ValueError("images hold NaN or infinity. Remove them: x[x.flatten(1).isfinite().all(1)]")
    remedy = "Normalise them with the model's preprocess, or give uint8 of 0 to 255 to encode_image"
    warnings.warn(f"images have values beyond {PIXEL_LIMIT:g}. {remedy}", stacklevel=3)


def check_indices(name: str, x: Tensor, count: int, remedy: str) -> None:
    """Raise ValueError unless all integers are in [0, count)."""
    if not x.numel():
        return
    low, high = x.aminmax()
    if holds((low < 0) | (high >= count)):
        raise ValueError(f"expected {name} from 0 to {count - 1}, got {low.item()} to {high.item()}. {remedy}")


def holds(condition: Tensor) -> bool:
    """Return the truth of a () condition; False for tensors without values (meta, fake, vmap)."""
    try:
        return bool(condition)
    except RuntimeError:
        return False
