"""Mixed images, as functions of uniform noise: Mixup (Zhang et al. 2018) and CutMix (Yun et al. 2019) of some rows."""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

#: Uniform numbers that a row takes: whether it is mixed, with whom, three of its share, the place of its box.
NOISE = 7


class Mix(NamedTuple):
    """Which image of a batch is mixed into which: row i keeps share[i] of itself, the rest is of row partner[i].

    share: (B,) float32, 1 where nothing is mixed; partner: (B,) int64.
    """

    share: Tensor
    partner: Tensor

    def labels(self, positive: Tensor) -> Tensor:
        """What of a match every pair is: share of the own matches and the rest of the partner's, (B, m) -> (B, m).

        A text that is true of both is a whole match, so texts of one image that meet in a batch need no rule.
        """
        own = positive.to(self.share.dtype)
        share = self.share.unsqueeze(1)
        return share * own + (1 - share) * own[self.partner]


def mix_images(images: Tensor, noise: Tensor, fraction: float, cut: Tensor) -> tuple[Tensor, Mix]:
    """Mix about `fraction` of the rows with others of the batch, PCME++ section 2.4 -> images like those given, `Mix`.

    images: (B, 3, H, W), floats or uint8; noise: (B, NOISE) uniform; cut: () bool, CutMix for the whole batch, else
    Mixup. share ~ Beta(2, 2), the median of three uniform numbers; of CutMix it is what its box leaves.
    """
    rows, (height, width) = len(images), images.shape[-2:]
    if noise.shape != (rows, NOISE):
        raise ValueError(f"noise is {tuple(noise.shape)}, want ({rows}, {NOISE}) for {rows} images")
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
    """Boxes of 1 - share of an image around points (y, x) in [0, 1), cut at its borders: (B, height, width) bool."""
    side = (1 - share).sqrt()
    inside = []
    for place, length in ((y, height), (x, width)):
        extent, middle = (side * length).floor(), (place * length).floor()
        low = (middle - (extent / 2).floor()).clamp(min=0)
        high = (middle - (extent / 2).floor() + extent).clamp(max=length)
        pixel = torch.arange(length, device=share.device)
        inside.append((pixel >= low.unsqueeze(1)) & (pixel < high.unsqueeze(1)))
    return inside[0].unsqueeze(2) & inside[1].unsqueeze(1)
