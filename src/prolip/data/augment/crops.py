"""The geometric half of OpenCLIP's training augmentation, on the host: a random box of a file, resized to uint8."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

import numpy as np
import PIL
import torch
import torch.nn.functional as F
from torch import Tensor

from prolip.data.images import decode_jpeg, decode_pixels, jpeg_size

Box = tuple[int, int, int, int]  # top, left, height, width
RATIO = (3 / 4, 4 / 3)  # width / height of boxes, the default of torchvision's `RandomResizedCrop`
PILLOW = int(PIL.__version__.split(".")[0])


@dataclass(frozen=True)
class RandomCrop:
    """Resized random boxes of images: (3, *size) uint8. `ColourJitter` changes the colours on the device.

    Boxes are distributed as in OpenCLIP's transform; pixels are within one level of Pillow's (`crop`). dct_scaled:
    decode JPEGs at 1/2, 1/4 or 1/8 if the box is at least that many times the size; faster, but not exact.
    """

    size: tuple[int, int]
    scale: tuple[float, float] = (0.9, 1.0)  # range of the box's share of the image
    dct_scaled: bool = False

    def from_file(self, data: bytes, rng: Random) -> Tensor:
        """Decode and crop in one step; SampleFault as in `decode_pixels`."""
        size = jpeg_size(data) if self.dct_scaled else None
        if size is None:
            pixels = decode_pixels(data)
            height, width = pixels.shape[:2]
            return crop(pixels, self.draw(height, width, rng)[0], self.size)
        box, factor = self.draw(*size, rng)
        scaled = decode_jpeg(data, *size, factor)
        if scaled is None:
            return crop(decode_pixels(data), box, self.size)
        top, left, bottom, right = (-(-edge // factor) for edge in (box[0], box[1], box[0] + box[2], box[1] + box[3]))
        return crop(scaled, (top, left, bottom - top, right - left), self.size)

    def draw(self, height: int, width: int, rng: Random) -> tuple[Box, int]:
        """Return a random box of an image and the decoding divisor, of which the box's edges are multiples."""
        top, left, rows, columns = draw_box(height, width, self.scale, rng)
        # JPEGs decode fast at these scales; other scales are slower than full size
        fits = (n for n in (8, 4, 2) if self.dct_scaled and rows >= n * self.size[0] and columns >= n * self.size[1])
        factor = next(fits, 1)
        top, left, bottom, right = (round(edge / factor) * factor for edge in (top, left, top + rows, left + columns))
        return (top, left, min(bottom, height) - top, min(right, width) - left), factor


def draw_box(height: int, width: int, scale: tuple[float, float], rng: Random) -> Box:
    """Return a random box of an image, distributed as by torchvision's `RandomResizedCrop` with its default ratio.

    The share of the area, the logarithm of width / height and the position of the box are uniform. If none of ten boxes
    fits in the image: its middle, cut to a ratio within RATIO.
    """
    low, high = math.log(RATIO[0]), math.log(RATIO[1])
    for _ in range(10):
        area = height * width * rng.uniform(*scale)
        ratio = math.exp(rng.uniform(low, high))
        rows, columns = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
        if 0 < rows <= height and 0 < columns <= width:
            return rng.randrange(height - rows + 1), rng.randrange(width - columns + 1), rows, columns
    ratio = min(max(width / height, RATIO[0]), RATIO[1])
    rows, columns = min(height, round(width / ratio)), min(width, round(height * ratio))
    return (height - rows) // 2, (width - columns) // 2, rows, columns


def crop(pixels: np.ndarray, box: Box, size: tuple[int, int]) -> Tensor:
    """Return a box of (H, W, 3) uint8 pixels, resized to (3, *size) uint8 by an antialiased bicubic filter.

    torch's kernel for uint8 rounds between the two directions as Pillow does, but its weights are 16-bit integers: one
    value in 300 is one level off; none of 54 million was two off for boxes of 0.8 to 1 shrunk to 224 pixels.
    """
    top, left, height, width = box
    part = torch.from_numpy(pixels[top : top + height, left : left + width]).permute(2, 0, 1)[None]
    # Pillow shrinks the columns before the rows, since version 13 if they lose more than twice as much; values are
    # rounded and clamped between the two
    if PILLOW >= 13 and height - size[0] > 2 * max(width - size[1], 0):
        part = F.interpolate(part, size=(size[0], width), mode="bicubic", antialias=True)
    return F.interpolate(part, size=size, mode="bicubic", antialias=True)[0].contiguous()
