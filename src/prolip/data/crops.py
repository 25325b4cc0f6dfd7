"""The geometric half of OpenCLIP's training augmentation, on the host: a random box of a file, resized, uint8."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torchvision.transforms import RandomResizedCrop

from prolip.data.decoding import decode_jpeg, decode_pixels, jpeg_size

Box = tuple[int, int, int, int]
#: Of the boxes that OpenCLIP's transform draws: width / height.
RATIO = (3 / 4, 4 / 3)
#: Scales at which a JPEG is decoded as fast as its blocks can be; others are slower than the full size.
FACTORS = (8, 4, 2)


@dataclass(frozen=True)
class RandomCrop:
    """A random box of an image, resized: (3, *size) uint8, the colours left to `ColourJitter` on the device.

    The box is torchvision's `RandomResizedCrop`'s, drawn from torch's global generator by the same calls: a seed gives
    the box that it gives OpenCLIP's transform, and pixels at most one level from Pillow's. scale: range of the box's
    share of the image. dct_scaled: decode JPEGs at 1/2, 1/4 or 1/8 when the box is that many times the size wanted or
    more; faster, and not exact: see docs/benchmarks.md for the error.
    """

    size: tuple[int, int]
    scale: tuple[float, float] = (0.9, 1.0)
    dct_scaled: bool = False

    def from_file(self, data: bytes) -> Tensor:
        """Decode and crop in one go; SampleFault as `decode_pixels`."""
        size = jpeg_size(data) if self.dct_scaled else None
        if size is not None:
            box = self.draw(*size)
            factor = dct_factor(box, self.size)
            pixels = decode_jpeg(data, *size, factor) if factor > 1 else None
            if pixels is not None:
                return crop(channels_first(pixels), shrunk(box, factor), self.size)
            return crop(channels_first(decode_pixels(data)), box, self.size)
        image = channels_first(decode_pixels(data))
        return crop(image, self.draw(*image.shape[1:]), self.size)

    def __call__(self, image: Image.Image) -> Tensor:
        """The same for an RGB image that is open already."""
        return crop(channels_first(np.array(image)), self.draw(image.height, image.width), self.size)

    def draw(self, height: int, width: int) -> Box:
        """(top, left, height, width) of a random box."""
        outline = torch.empty(1).expand(3, height, width)  # only its size is looked at
        return RandomResizedCrop.get_params(outline, list(self.scale), list(RATIO))


def channels_first(pixels: np.ndarray) -> Tensor:
    """(H, W, 3) -> (3, H, W), the same memory."""
    return torch.from_numpy(pixels).permute(2, 0, 1)


def crop(image: Tensor, box: Box, size: Sequence[int]) -> Tensor:
    """A box of a (3, H, W) uint8 image, resized to (3, *size) uint8 by an antialiased bicubic filter.

    torch's kernel for uint8 works in 16-bit integers, rounds between the two directions as Pillow does, and ends at
    most one level from Pillow.
    """
    top, left, height, width = box
    part = image[None, :, top : top + height, left : left + width]
    return F.interpolate(part, size=tuple(size), mode="bicubic", antialias=True)[0].contiguous()


def dct_factor(box: Box, size: Sequence[int]) -> int:
    """The largest factor that leaves the box at least as large as `size` in both directions."""
    return next((factor for factor in FACTORS if box[2] >= factor * size[0] and box[3] >= factor * size[1]), 1)


def shrunk(box: Box, factor: int) -> Box:
    """A box in an image that is `factor` times smaller, its edges rounded to whole pixels."""
    top, left, bottom, right = (round(edge / factor) for edge in (box[0], box[1], box[0] + box[2], box[1] + box[3]))
    return top, left, bottom - top, right - left
