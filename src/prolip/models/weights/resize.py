"""Position embeddings for another image size or context length; the rows of special tokens are never touched."""
from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from prolip.models.towers import SPECIAL_TOKENS

# LongProLIP keeps the first 20 text positions, which nearly every training caption reached, and stretches the others.
KEEP_FIRST = 20


def grid_of(patches: int, known: tuple[int, int] | None = None) -> tuple[int, int]:
    """Rows and columns of so many patches: those known, if they are as many, or a square."""
    if known is not None and known[0] * known[1] == patches:
        return known
    side = math.isqrt(patches)
    if side * side != patches:
        raise ValueError(
            f"{patches} patch positions form no square grid, so their shape is unknown: give the weights' own"
            " configuration, which says their image size, as local-dir:<folder> or in a config.json beside the weights"
        )
    return side, side


def resize_grid(patches: Tensor, grid: tuple[int, int], old: tuple[int, int] | None = None) -> Tensor:
    """Bicubic, antialiased, as OpenCLIP does it: (N, width), the grid `old` or a square -> (rows * columns, width)."""
    rows, columns = grid_of(len(patches), old)
    image = patches.float().reshape(1, rows, columns, -1).permute(0, 3, 1, 2)
    image = F.interpolate(image, size=grid, mode="bicubic", antialias=True, align_corners=False)
    return image.permute(0, 2, 3, 1).reshape(grid[0] * grid[1], -1).to(patches.dtype)


def resize_context(tokens: Tensor, length: int) -> Tensor:
    """Text positions for `length` tokens, (L, width) -> (length, width).

    Shorter: the first rows, since texts start at the first position. Longer, as LongProLIP: the first 20 rows (a third
    of them when there are fewer than 60) stay and the others are interpolated linearly, both ends fixed, over the rest.
    """
    old = len(tokens)
    if length <= old:
        return tokens[:length]
    kept = min(KEEP_FIRST, old // 3)
    rest = tokens[kept:].float().t().unsqueeze(0)
    rest = F.interpolate(rest, size=length - kept, mode="linear", align_corners=True)[0].t()
    return torch.cat([tokens[:kept], rest.to(tokens.dtype)])


def resize_image_positions(
    positions: Tensor, grid: tuple[int, int], old: tuple[int, int] | None = None
) -> Tensor:
    """Rows [CLS], [UNC], patches -> the same for another grid."""
    special, patches = positions[:SPECIAL_TOKENS], positions[SPECIAL_TOKENS:]
    return torch.cat([special, resize_grid(patches, grid, old)])


def resize_text_positions(positions: Tensor, length: int) -> Tensor:
    """Rows tokens, [UNC], [CLS] -> the same for another context length."""
    tokens, special = positions[:-SPECIAL_TOKENS], positions[-SPECIAL_TOKENS:]
    return torch.cat([resize_context(tokens, length), special])
