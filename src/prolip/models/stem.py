"""Early convolutions in place of the patch projection: what a small image tower learns a new drawing style from."""
from __future__ import annotations

import math

from torch import Tensor, nn


def check_stem(width: int, patch_size: int) -> int:
    """How often a stem halves the image; ValueError for patches and widths that do not halve so often."""
    depth = patch_size.bit_length() - 1
    if patch_size < 2 or 2**depth != patch_size:
        raise ValueError(f"a convolutional stem halves the image step by step: patch_size {patch_size} must be a power"
                         " of two, at least 2")
    if width % 2 ** (depth - 1):
        raise ValueError(f"width {width} does not halve {depth - 1} times: give the stem a multiple of"
                         f" {2 ** (depth - 1)}, or a smaller patch_size")
    return depth


class ConvStem(nn.Sequential):
    """Stride-2 3x3 convolutions down to one token per patch, then a 1x1 one (Xiao et al. 2021, arXiv 2106.14881).

    (B, 3, H, W) -> (B, width, H / patch, W / patch), patch a power of two. Channels double up to the width. GroupNorm,
    not BatchNorm: a row's tokens depend on that row alone, so ranks and micro-batches stay exact.
    """

    def __init__(self, width: int, patch_size: int):
        depth = check_stem(width, patch_size)
        channels = [3, *(width // 2 ** (depth - 1 - i) for i in range(depth))]
        layers: list[nn.Module] = []
        for before, after in zip(channels, channels[1:]):
            layers += [
                nn.Conv2d(before, after, kernel_size=3, stride=2, padding=1, bias=False),
                nn.GroupNorm(math.gcd(8, after), after),
                nn.GELU(),
            ]
        super().__init__(*layers, nn.Conv2d(width, width, kernel_size=1, bias=False))

    @property
    def weight(self) -> Tensor:
        """The last projection's weight: its dtype is the tower's, as that of OpenCLIP's `conv1.weight`."""
        projection = self[-1]
        assert isinstance(projection, nn.Conv2d)
        return projection.weight
