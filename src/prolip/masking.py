"""Masked views: random patch subsets and [MASK]ed texts, ProLIP section 3.3, functions of uniform noise."""
from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor


def count_masked_rows(batch_size: int, fraction: float) -> int:
    """M = max(1, floor(fraction * B)), the leading rows of a local batch that get a masked view."""
    return max(1, int(fraction * batch_size + 1e-9))  # 0.29 * 100 is 28.999...: a row too few without the margin


def count_kept_patches(patches: int, ratio: float) -> int:
    """K = max(1, round((1 - ratio) * P)) patches stay of P when `ratio` of them are dropped."""
    return max(1, round((1 - ratio) * patches))


def keep_patches(noise: Tensor, keep: int) -> Tensor:
    """A uniformly random subset of patches per sample: the places of the `keep` smallest draws, ascending.

    noise: (M, P), uniform and independent; returns (M, K) int64 with K = `keep`.
    """
    if noise.ndim != 2 or not 1 <= keep <= noise.shape[1]:
        raise ValueError(f"cannot keep {keep} patches with noise {tuple(noise.shape)}: give (M, P) and 1 <= keep <= P")
    return noise.topk(keep, dim=1, largest=False, sorted=False).indices.sort(dim=1).values


def mask_text(
    text: Tensor, noise: Tensor, mask_id: int, pad_id: int, special_ids: Collection[int] = (), ratio: float = 0.75
) -> Tensor:
    """Replace every maskable token by [MASK] with probability `ratio`, and at least one per text that has any.

    Maskable is what is neither padding nor special: start and end tokens say nothing, masking them hides nothing.
    SigLIP's tokenizers pad with the end token, so their end token is excluded as padding. The forced token is the one
    with the smallest draw, which is masked anyhow unless all draws are above `ratio`. No row loop, no host sync.

    text: (M, L) int64; noise: (M, L), uniform and independent; returns (M, L).
    """
    if noise.shape != text.shape or text.ndim != 2:
        raise ValueError(f"noise {tuple(noise.shape)} does not fit texts {tuple(text.shape)}: give two (M, L) tensors")
    maskable = text != pad_id
    for special in special_ids:
        maskable = maskable & (text != special)
    draws = noise.masked_fill(~maskable, 2.0)  # above every uniform draw
    column = torch.arange(text.shape[1], device=text.device)
    forced = column == draws.argmin(dim=1, keepdim=True)
    return text.masked_fill(maskable & ((draws < ratio) | forced), mask_id)
