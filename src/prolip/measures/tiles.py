"""All pairs of two sets within a bounded workspace, in the forward and in the backward pass."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

#: Default `max_elements`: 16 MiB per temporary tensor in float32.
WORKSPACE = 2**22


def without_autocast(device: torch.device) -> AbstractContextManager:
    """A region in which matrix products keep their dtype: measures run in float32 under autocast too."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def tile_shape(rows: int, cols: int, per_pair: int, max_elements: int) -> tuple[int, int]:
    """Rows and columns of the squarest tile with rows * cols * per_pair <= max_elements; one pair at the least."""
    pairs = max(1, max_elements // max(1, per_pair))
    width = max(1, min(cols, int(pairs**0.5)))
    height = max(1, min(rows, pairs // width))
    return height, max(1, min(cols, pairs // height))


def all_pairs(
    f: Callable[..., Tensor],
    rows: Sequence[Tensor],
    cols: Sequence[Tensor],
    per_pair: int,
    max_elements: int = WORKSPACE,
) -> Tensor:
    """f of every row with every column, tile by tile: rows (B1, ...), cols (B2, ...) -> (B1, B2).

    f(*rows[i:i+b1], *cols[j:j+b2]) -> (b1, b2) may build tensors of b1 * b2 * per_pair elements; tiles are cut so that
    this stays within max_elements (or is one pair). With gradients each tile is checkpointed: it is computed again in
    the backward pass, so what is saved between the passes is O(B1 + B2) and at no time do two tiles exist. f must be
    deterministic: draw random numbers before. Raises ValueError for max_elements < 1.
    """
    if max_elements < 1:
        raise ValueError(f"max_elements {max_elements} leaves no workspace: give 1 (one pair at a time) or more")
    b1, b2 = rows[0].shape[0], cols[0].shape[0]
    height, width = tile_shape(b1, b2, per_pair, max_elements)
    one_tile = height >= b1 and width >= b2

    def tile(*tensors: Tensor) -> Tensor:
        if one_tile or not torch.is_grad_enabled():
            return f(*tensors)
        return checkpoint(f, *tensors, use_reentrant=False, preserve_rng_state=False)

    # split, not slicing: its backward concatenates the tiles' gradients instead of padding each to the full size.
    row_blocks = list(zip(*(x.split(height) for x in rows)))
    col_blocks = list(zip(*(x.split(width) for x in cols)))
    with without_autocast(rows[0].device):
        return torch.cat([torch.cat([tile(*r, *c) for c in col_blocks], dim=1) for r in row_blocks])
