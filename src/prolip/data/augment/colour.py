"""The colour half of OpenCLIP's training augmentation on the device, for whole batches: jitter, greyscale, normalise.

The distribution is OpenCLIP's, but pixels stay floats, whereas Pillow rounds after each change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from open_clip.transform import AugmentationCfg
from torch import Tensor

from prolip.data.augment.affine import DeviceTransform, constant, to_device
from prolip.data.augment.crops import RandomCrop
from prolip.utils.flags import check_range

LUMA = (0.2989, 0.587, 0.114)  # torchvision's weights of a grey value
BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)  # indices of the four changes
#: Uniform numbers per image: four factors, four to sort into an order, whether to jitter, whether to turn grey.
DRAWS = 10


@dataclass(kw_only=True, frozen=True)
class ColourConfig:
    """OpenCLIP's colour augmentation; the default changes nothing.

    jitter: for brightness, contrast and saturation, factors from max(0, 1 - this) to 1 + this; for the hue, up to this
    fraction of a full turn in either direction. jitter_prob, greyscale_prob: independent shares of the images.
    """

    jitter: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    jitter_prob: float = 0.0
    greyscale_prob: float = 0.0

    def __post_init__(self) -> None:
        check_range(self, "jitter_prob", "greyscale_prob", most=1)
        if len(self.jitter) != 4 or min(self.jitter) < 0 or self.jitter[HUE] > 0.5:
            expected = "give four numbers of 0 or more: brightness, contrast, saturation, hue (at most 0.5)"
            raise ValueError(f"colour jitter is {self.jitter}: {expected}")

    @property
    def changes(self) -> bool:
        """True if any image can change."""
        return bool((any(self.jitter) and self.jitter_prob) or self.greyscale_prob)


class ColourPlan(NamedTuple):
    """The changes of each image of a batch, on the CPU."""

    factors: Tensor  # (B, 4) float32: brightness, contrast, saturation, and hue in turns
    order: Tensor  # (B, 4) int64, a permutation of 0..3: the changes in their order
    jittered: Tensor  # (B,) bool
    greyed: Tensor  # (B,) bool


def draw_plan(noise: Tensor, config: ColourConfig) -> ColourPlan:
    """Convert (B, DRAWS) uniform numbers to a plan, distributed as in OpenCLIP's transform."""
    wide = torch.tensor(config.jitter)
    middle = torch.tensor([1.0, 1.0, 1.0, 0.0])
    low = torch.cat([(middle - wide)[:HUE].clamp(min=0), -wide[HUE:]])
    factors = low + (middle + wide - low) * noise[:, :4]
    order, jitter, greyscale = noise[:, 4:8].argsort(1), noise[:, 8], noise[:, 9]
    return ColourPlan(factors, order, jitter < config.jitter_prob, greyscale < config.greyscale_prob)


class ColourJitter(DeviceTransform):
    """OpenCLIP's colour augmentation and normalisation of uint8 images. The host draws the plan and never waits."""

    config: ColourConfig

    def change(self, images: Tensor, step: int) -> Tensor:
        if not self.config.changes:
            return images.float().div_(255)
        return recolour(images, draw_plan(self.noise(images, DRAWS, step, "cpu"), self.config))


def recolour(images: Tensor, plan: ColourPlan) -> Tensor:
    """Recolour (B, 3, H, W) uint8 images by the plan; return float32 in [0, 1].

    Brightness, contrast and saturation share one formula, x -> clamp(f x + (1 - f) y), where y is 0, the image's mean
    grey value or each pixel's, so three steps apply them in any order. Images are sorted by the step before their hue
    changes, which gives one slice per step.
    """
    hue_at = torch.where(plan.jittered, plan.order.eq(HUE).float().argmax(1), 4)
    rows = hue_at.argsort(stable=True)
    ends = torch.bincount(hue_at, minlength=5).cumsum(0).tolist()
    begins = [0, *ends]
    kinds = plan.order[plan.order != HUE].view(-1, 3)
    factors = plan.factors.gather(1, kinds)
    # for each step and image: the weights of the image, of its mean grey value and of each pixel's grey value
    blends = torch.stack([factors, (1 - factors) * (kinds == CONTRAST), (1 - factors) * (kinds == SATURATION)], 2)
    steps = blends.transpose(0, 1)[:, rows[: ends[3]]]
    host = (rows, steps, plan.factors[rows, HUE], plan.greyed[rows].nonzero()[:, 0])
    rows, steps, turns, greyed = to_device(images.device, *host)

    x = images[rows].float().div_(255)
    jittered = x[: ends[3]]
    for place in range(4):
        here = slice(begins[place], ends[place])
        if begins[place] < ends[place]:
            x[here] = turn_hue(x[here], turns[here])
        if place < 3 and len(jittered):
            own, by_mean, by_grey = (weight.view(-1, 1, 1, 1) for weight in steps[place].unbind(1))
            value = grey(jittered)
            mean = value.mean((2, 3), keepdim=True)
            jittered.mul_(own).add_(value.mul_(by_grey).add_(mean * by_mean)).clamp_(0, 1)
    if len(greyed):
        x[greyed] = grey(x[greyed]).expand(-1, 3, -1, -1)
    return torch.empty_like(x).index_copy_(0, rows, x)


def grey(x: Tensor) -> Tensor:
    """Convert (B, 3, H, W) to torchvision's grey value, (B, 1, H, W)."""
    red, green, blue = x.split(1, 1)
    return (LUMA[0] * red).add_(green, alpha=LUMA[1]).add_(blue, alpha=LUMA[2])


def turn_hue(x: Tensor, turns: Tensor) -> Tensor:
    """Shift the hue in HSV, keeping saturation and value. x: (B, 3, H, W) in [0, 1]; turns: (B,) in full turns.

    With m the smallest channel and C = the largest - m, the hue in sixths of a turn from -3 to 3 is, without branches,
    h = sign(g - b) (1 + (g + b - r - m) / C), which equals the definition on each of its six pieces. A channel is
    m + C clamp(| |h - c| - 3 | - 1), c = 0, 2, -2 for red, green and blue: 1 within a sixth of c, 0 from two sixths on.
    """
    red, green, blue = x.split(1, 1)
    smallest = x.amin(1, keepdim=True)
    chroma = x.amax(1, keepdim=True).sub_(smallest)
    sixths = (green + blue).sub_(red).sub_(smallest).div_(chroma.clamp(min=1e-12)).add_(1)
    sixths = sixths.copysign_(green - blue).add_(6 * turns.view(-1, 1, 1, 1))
    sixths -= (sixths / 6).round_().mul_(6)
    centres = constant((0.0, 2.0, -2.0), x.device).view(1, 3, 1, 1)
    return (sixths - centres).abs_().sub_(3).abs_().sub_(1).clamp_(0, 1).mul_(chroma).add_(smallest)


def split_augmentation(
    aug_cfg: Mapping[str, Any], size: int | tuple[int, int], dct_scaled: bool = False
) -> tuple[RandomCrop, ColourConfig] | None:
    """Return (crop on a worker, colours on the device), together distributed as OpenCLIP's; None for timm's."""
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in aug_cfg.items()}
    cfg = AugmentationCfg(**given)
    if cfg.use_timm:
        return None
    colours = ColourConfig(greyscale_prob=cfg.gray_scale_prob or 0.0)
    if cfg.color_jitter_prob:
        if not isinstance(cfg.color_jitter, tuple):
            what = f"color_jitter_prob is {cfg.color_jitter_prob} and color_jitter {cfg.color_jitter}"
            raise ValueError(f"{what}: give four numbers, brightness, contrast, saturation and hue, or neither")
        colours = replace(colours, jitter=cfg.color_jitter, jitter_prob=cfg.color_jitter_prob)
    height, width = (size, size) if isinstance(size, int) else size
    return RandomCrop((height, width), cfg.scale, dct_scaled), colours
