"""Random views by uniform noise: kept patches, [MASK]ed texts (ProLIP 3.3), Mixup (Zhang 2018), CutMix (Yun 2019)."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

NOISE = 7  # uniform numbers per row: whether to mix, with which row, three for the share, the position of the box


def count_masked_rows(batch_size: int, fraction: float) -> int:
    """Return M = max(1, floor(fraction * B)), the leading rows of a local batch that get a masked view."""
    return max(1, int(fraction * batch_size + 1e-9))  # 0.29 * 100 is 28.999...: one row too few without the margin


def count_kept_patches(patches: int, ratio: float) -> int:
    """Return K = max(1, round((1 - ratio) * P)), the patches left of P when `ratio` of them are dropped."""
    return max(1, round((1 - ratio) * patches))


def keep_patches(noise: Tensor, keep: int) -> Tensor:
    """Return the positions of each sample's `keep` smallest draws, ascending: uniform noise (M, P) -> (M, K) int64."""
    if noise.ndim != 2 or not 1 <= keep <= noise.shape[1]:
        raise ValueError(f"cannot keep {keep} patches with noise {tuple(noise.shape)}: give (M, P) and 1 <= keep <= P")
    return noise.topk(keep, dim=1, largest=False, sorted=False).indices.sort(dim=1).values


def mask_text(
    text: Tensor, noise: Tensor, mask_id: int, pad_id: int, special_ids: Collection[int] = (), ratio: float = 0.75
) -> Tensor:
    """Replace words of (M, L) texts by [MASK] if uniform noise is below `ratio`, and always at the smallest draw."""
    if noise.shape != text.shape or text.ndim != 2:
        raise ValueError(f"noise {tuple(noise.shape)} does not match texts {tuple(text.shape)}: give (M, L) twice")
    maskable = text != pad_id
    for special in special_ids:
        maskable = maskable & (text != special)
    draws = noise.masked_fill(~maskable, 2.0)  # above every uniform draw
    column = torch.arange(text.shape[1], device=text.device)
    forced = column == draws.argmin(dim=1, keepdim=True)
    return text.masked_fill(maskable & ((draws < ratio) | forced), mask_id)


class Mix(NamedTuple):
    """The mixing of a batch's images: row i keeps share[i] of itself, the rest is of row partner[i]."""

    share: Tensor  # (B,) float32, 1 without mixing
    partner: Tensor  # (B,) int64

    def labels(self, positive: Tensor) -> Tensor:
        """Return the soft label of each pair: share of its own matches, the rest of the partner's, (B, m) -> (B, m)."""
        own = positive.to(self.share.dtype)
        share = self.share.unsqueeze(1)
        return share * own + (1 - share) * own[self.partner]


def mix_images(images: Tensor, noise: Tensor, fraction: float, cut: Tensor) -> tuple[Tensor, Mix]:
    """Mix about `fraction` of the rows with others of the batch, PCME++ section 2.4; return the images and the `Mix`.

    images: (B, 3, H, W), floats or uint8; noise: (B, NOISE) uniform; cut: () bool, CutMix for the whole batch, else
    Mixup. share ~ Beta(2, 2), the median of three uniform numbers; for CutMix, the share outside the box.
    """
    rows, (height, width) = len(images), images.shape[-2:]
    if noise.shape != (rows, NOISE):
        raise ValueError(f"noise is {tuple(noise.shape)}, expected ({rows}, {NOISE}) for {rows} images")
    mixed = (noise[:, 0] < fraction) & (rows > 1)
    place = torch.arange(rows, device=images.device)
    partner = (place + 1 + (noise[:, 1] * (rows - 1)).long().clamp(max=max(rows - 2, 0))) % rows
    share = torch.where(mixed, noise[:, 2:5].median(1).values, 1.0)
    inside = boxes(share, noise[:, 5], noise[:, 6], height, width)
    left = 1 - inside.flatten(1).float().mean(1)
    kept = torch.where(cut, (~inside).to(share.dtype), share[:, None, None])[:, None]
    whole = kept * images + (1 - kept) * images[partner]
    if images.dtype == torch.uint8:
        whole = whole.round()
    return whole.to(images.dtype), Mix(torch.where(cut, left, share), partner)


def boxes(share: Tensor, y: Tensor, x: Tensor, height: int, width: int) -> Tensor:
    """Return boxes of 1 - share of an image around (y, x) in [0, 1), cut at its borders: (B, height, width) bool."""
    side = (1 - share).sqrt()
    inside = []
    for place, length in ((y, height), (x, width)):
        extent, middle = (side * length).floor(), (place * length).floor()
        low = (middle - (extent / 2).floor()).clamp(min=0)
        high = (middle - (extent / 2).floor() + extent).clamp(max=length)
        pixel = torch.arange(length, device=share.device)
        inside.append((pixel >= low.unsqueeze(1)) & (pixel < high.unsqueeze(1)))
    return inside[0].unsqueeze(2) & inside[1].unsqueeze(1)
