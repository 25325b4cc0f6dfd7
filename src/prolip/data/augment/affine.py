"""Augmentation of whole uint8 batches on the device: an affine warp and a colour matrix per image, and cutout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prolip.random import Draws, Stream
from prolip.utils.fields import option
from prolip.utils.flags import check_range

#: Random erasing as in PCME's release and timm: share of the area, and log of the largest height/width ratio.
ERASED_AREA, ERASED_ASPECT = (0.02, 1 / 3), math.log(1 / 0.3)
LUMA = (0.299, 0.587, 0.114)
#: RGB to YIQ: rotating the (I, Q) plane shifts the hue and keeps the luma.
YIQ = ((0.299, 0.587, 0.114), (0.596, -0.274, -0.322), (0.211, -0.523, 0.312))
RGB = tuple(map(tuple, torch.linalg.inv(torch.tensor(YIQ, dtype=torch.float64)).tolist()))
#: One uniform number per image and parameter; their order determines the random numbers.
PARAMETERS: tuple[str, ...] = ("rotate", "zoom", "aspect", "shift_x", "shift_y")
PARAMETERS += ("brightness", "contrast", "saturation", "hue", "jitter", "greyscale")


@dataclass(kw_only=True, frozen=True)
class AugmentConfig:
    """Augmentation on the device; the defaults change nothing. `always`: also applied without other augmentation."""

    rotate: float = option(0.0, "rotate by up to this many degrees in either direction")
    zoom: tuple[float, float] = option((1.0, 1.0), "scale by a factor drawn between these two (below 1: shrink)")
    aspect: float = option(0.0, "stretch by up to exp(this) in one direction")
    shift: float = option(0.0, "shift by up to this fraction of the width and height")
    brightness: float = option(0.0, "range of the factor, 1 +- this")
    contrast: float = option(0.0, "range of the factor, 1 +- this, around the image's mean luma")
    saturation: float = option(0.0, "range of the factor, 1 +- this, around each pixel's luma")
    hue: float = option(0.0, "shift the hue by up to this fraction of a full turn, at most 0.5")
    jitter_prob: float = option(1.0, "share of the images with changed colours")
    greyscale_prob: float = option(0.0, "share of the images to turn grey")
    fill: float = option(1.0, "value of pixels outside the image, from 0 (black) to 1 (white)")
    cutout: float = option(0.0, "side of a square of mean pixels, as a share of the image's", always=True)
    cutout_prob: float = option(1.0, "share of the images with such a square", always=True)
    erase_prob: float = option(0.0, "share of the images to erase a rectangle of, 2 to 33% of the area", always=True)
    text_mask: float = option(0.0, "share of the text tokens to replace by [MASK]", always=True)
    text_random: float = option(0.0, "share of the text tokens to replace by another token", always=True)
    text_delete: float = option(0.0, "share of the text tokens to delete", always=True)

    def __post_init__(self) -> None:
        low, high = self.zoom
        if not 0 < low <= high:
            raise ValueError(f"augmentation zoom is {self.zoom}: give two positive numbers, the smaller first")
        shares = ("brightness", "contrast", "saturation", "jitter_prob", "greyscale_prob", "fill", "shift", "cutout")
        check_range(self, *shares, "cutout_prob", "erase_prob", "text_mask", "text_random", "text_delete", most=1)
        check_range(self, "hue", most=0.5, remedy=" (half a turn either way)")
        if sum(self.token_shares) > 1:
            what = f"augmentation text_mask, text_random and text_delete are {self.token_shares}, in total more than 1"
            raise ValueError(f"{what}: give shares of the tokens, such as 0.1, 0.02 and 0.08")

    @property
    def token_shares(self) -> tuple[float, float, float]:
        """Shares of tokens to mask, replace and delete."""
        return self.text_mask, self.text_random, self.text_delete


class DeviceTransform(nn.Module):
    """Conversion of uint8 images to normalised floats on the device: x -> (change(x) - mean) / std per channel, x in
    [0, 1]; 0 in a square (Cutout, DeVries and Taylor 2017) or rectangle (random erasing, Zhong et al. 2020).
    """

    cutout = AugmentConfig()  # its squares and rectangles apply to any change
    pixel_mean: Tensor
    pixel_std: Tensor

    def __init__(self, config: Any, mean: Sequence[float], std: Sequence[float], *, draws: Draws | None = None):
        super().__init__()
        self.config, self.draws = config, draws or Draws()
        self.register_buffer("pixel_mean", torch.tensor(mean).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("pixel_std", torch.tensor(std).view(1, 3, 1, 1), persistent=False)

    def forward(self, images: Tensor, step: int) -> Tensor:
        """Return float32 images. images: (B, 3, H, W) uint8, the local rows of this step."""
        if images.dtype != torch.uint8:
            raise TypeError(f"augmentation on the device expects uint8 images, got {images.dtype}. Give them as read")
        x = self.change(images, step).sub_(self.pixel_mean).div_(self.pixel_std)
        if self.cutout.cutout:
            noise = self.noise(images, 3, step, x.device, Stream.CUTOUT)
            x.masked_fill_(squares(noise, self.cutout, x.shape[2:]), 0)
        if self.cutout.erase_prob:
            noise = self.noise(images, 5, step, x.device, Stream.ERASE)
            x.masked_fill_(rectangles(noise, self.cutout.erase_prob, x.shape[2:]), 0)
        return x

    def change(self, images: Tensor, step: int) -> Tensor:
        """Convert uint8 images to a new, augmented float32 tensor of values in [0, 1]."""
        raise NotImplementedError

    def noise(self, images: Tensor, columns: int, step: int, device: Any, stream: Stream = Stream.AUGMENT) -> Tensor:
        """Return uniform numbers for each local image, (B, columns), drawn on `device`."""
        return self.draws.uniform(stream, step, self.draws.rows(len(images), device), columns)


class DeviceAugment(DeviceTransform):
    """Device augmentation by one affine warp and one affine colour map per image."""

    config: AugmentConfig

    def change(self, images: Tensor, step: int) -> Tensor:
        x, config = images.float().div_(255), self.config
        warps = config.rotate or config.aspect or config.shift or tuple(config.zoom) != (1.0, 1.0)
        colours = (config.brightness, config.contrast, config.saturation, config.hue, config.greyscale_prob)
        if warps or any(colours):
            draws = dict(zip(PARAMETERS, self.noise(images, len(PARAMETERS), step, images.device).unbind(1)))
            x = warp(x, affine_matrices(draws, config), config.fill) if warps else x
            x = recolour(x, draws, config) if any(colours) else x
        return x


def squares(noise: Tensor, config: AugmentConfig, size: Sequence[int]) -> Tensor:
    """Return the squares to cut out, (B, 1, H, W) bool, from uniform (B, 3). Their centres are pixels of the image."""
    height, width = size
    side = round(config.cutout * min(height, width))
    on, down, right = noise.unbind(1)
    top, left = (down * height).floor() - side // 2, (right * width).floor() - side // 2
    return on.lt(config.cutout_prob).view(-1, 1, 1, 1) & span(top, side, height).mT & span(left, side, width)


def rectangles(noise: Tensor, prob: float, size: Sequence[int]) -> Tensor:
    """Return the rectangles to erase, (B, 1, H, W) bool, from uniform (B, 5): inside the image, with an area uniform in
    ERASED_AREA and a log ratio of sides uniform up to ERASED_ASPECT. A side ends a pixel before the image's.
    """
    on, area, aspect, down, right = noise.unbind(1)
    low, high = ERASED_AREA
    area, ratio = (low + (high - low) * area) * math.prod(size), centred(aspect, ERASED_ASPECT).exp()
    inside = on.lt(prob).view(-1, 1, 1, 1)
    height, width = (x.sqrt().round().clamp(max=n - 1) for x, n in zip((area * ratio, area / ratio), size))
    top, left = (down * (size[0] - height + 1)).floor(), (right * (size[1] - width + 1)).floor()
    return inside & span(top, height, size[0]).mT & span(left, width, size[1])


def span(begin: Tensor, side: Tensor | int, length: int) -> Tensor:
    """Return True for `side` pixels from `begin` (B,) of a line of `length` pixels: (B, 1, 1, length)."""
    past = torch.arange(length, device=begin.device) - begin.view(-1, 1, 1, 1)
    return (past >= 0) & (past < (side.view(-1, 1, 1, 1) if isinstance(side, Tensor) else side))


@lru_cache(maxsize=32)
def constant(values: tuple, device: torch.device) -> Tensor:
    """Return a float32 tensor of fixed numbers, one per device, because the host waits for every new copy."""
    return torch.tensor(values, device=device)


def to_device(device: torch.device, *tensors: Tensor) -> list[Tensor]:
    """Copy small tensors from the host without waiting for their arrival."""
    if device.type != "cuda":
        return [tensor.to(device) for tensor in tensors]
    return [tensor.contiguous().pin_memory().to(device, non_blocking=True) for tensor in tensors]


def centred(uniform: Tensor, width: float) -> Tensor:
    """Map uniform numbers in [0, 1) to [-width, width)."""
    return (2 * uniform - 1) * width


def affine_matrices(draws: dict[str, Tensor], config: AugmentConfig) -> Tensor:
    """Return maps from output to input coordinates, both in [-1, 1]: (B, 2, 3)."""
    angle = centred(draws["rotate"], math.radians(config.rotate))
    low, high = config.zoom
    zoom = low + (high - low) * draws["zoom"]
    stretch = centred(draws["aspect"], config.aspect).exp()
    cos, sin = angle.cos(), angle.sin()
    x_scale, y_scale = 1 / (zoom * stretch.sqrt()), stretch.sqrt() / zoom
    shift_x, shift_y = centred(draws["shift_x"], 2 * config.shift), centred(draws["shift_y"], 2 * config.shift)
    rows = torch.stack([cos * x_scale, -sin * y_scale, shift_x, sin * x_scale, cos * y_scale, shift_y], dim=1)
    return rows.view(-1, 2, 3)


def warp(x: Tensor, matrices: Tensor, fill: float) -> Tensor:
    """Warp each image bilinearly by its own affine map; pixels from outside become `fill`."""
    grid = F.affine_grid(matrices, list(x.shape), align_corners=False)
    return F.grid_sample(x - fill, grid, align_corners=False).add_(fill)


def recolour(x: Tensor, draws: dict[str, Tensor], config: AugmentConfig) -> Tensor:
    """Apply brightness, contrast, saturation and hue as one affine colour map per image, then clamp to [0, 1].

    With luma row l, chroma map H = YIQ^-1 R(theta) YIQ, where R(theta) rotates the (I, Q) plane by theta radians,
    factors b, c, s and mean luma m of the brightened image:
    x -> c b (1 l + s H (I - 1 l)) x + (1 - c) m. x: (B, 3, H, W) in [0, 1].
    """
    on = (draws["jitter"] < config.jitter_prob).float()
    brightness = 1 + on * centred(draws["brightness"], config.brightness)
    contrast = 1 + on * centred(draws["contrast"], config.contrast)
    saturation = 1 + on * centred(draws["saturation"], config.saturation)
    saturation = saturation * (draws["greyscale"] >= config.greyscale_prob)
    theta = on * centred(draws["hue"], 2 * math.pi * config.hue)

    zero, one, cos, sin = torch.zeros_like(theta), torch.ones_like(theta), theta.cos(), theta.sin()
    turn = torch.stack([one, zero, zero, zero, cos, -sin, zero, sin, cos], dim=-1).view(-1, 3, 3)  # keeps the luma
    luma = constant(LUMA, x.device)
    grey = luma.expand(3, 3)
    rotation = constant(RGB, x.device) @ turn @ constant(YIQ, x.device)
    chroma = rotation @ (torch.eye(3, device=x.device) - grey)
    mean_luma = (x.mean((2, 3)) @ luma) * brightness
    matrix = (grey + saturation.view(-1, 1, 1) * chroma) * (brightness * contrast).view(-1, 1, 1)
    offset = ((1 - contrast) * mean_luma).view(-1, 1, 1)
    return torch.baddbmm(offset, matrix, x.flatten(2)).view_as(x).clamp_(0, 1)
