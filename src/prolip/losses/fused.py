"""The sigmoid loss and its gradient from a block of products in one pass: a Triton kernel for CUDA devices."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from prolip.losses.positives import BlockGradient, Positives

# A tile of pairs in the registers of one program: loads along the columns are contiguous.
TILE_ROWS, TILE_COLUMNS, WARPS = 32, 128, 4
NO_DIAGONAL = 1 << 40  # beyond the last column, so that no pair of the block is on it


@triton.jit
def _log1p(x):
    """Compute log(1 + x) for 0 <= x <= 1 as 2 artanh(x / (2 + x)): the device's log loses the digits of a small x."""
    s = x / (2.0 + x)
    q = s * s
    series = 1.0 / 13.0
    for odd in tl.static_range(5, -1, -1):
        series = series * q + 1.0 / (2 * odd + 1)
    return 2.0 * s * series


@triton.jit
def _exp_minus(x):
    """Compute exp(-x) for x >= 0 as 2^-n exp(-r), n whole and |r| <= log(2) / 2: the device's fast one loses digits.

    n times the first part of log 2, which has 9 bits, is exact. Returns 0 above 200, and NaN for NaN.
    """
    x = tl.minimum(x, 200.0, propagate_nan=tl.PropagateNan.ALL)
    n = tl.floor(x * 1.4426950408889634 + 0.5)
    return tl.exp2(-n) * tl.exp(n * 0.693359375 - x - n * 2.12194440e-4)


@triton.jit
def _pairs_kernel(  # noqa: PLR0913 - a kernel's arguments are flat
    products,
    row_bias,
    column_bias,
    row_ids,
    column_ids,
    losses,
    row_sums,
    column_sums,
    weight,
    n,
    m,
    diagonal,
    IDS: tl.constexpr,
    GRADIENT: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_M: tl.constexpr,
):
    """Compute one tile: logits from products and biases, the sum of losses, g = d loss / d logit over the products.

    Each tile writes its sums to its own places, (tiles of rows, m), (n, tiles of columns), so their order is fixed.
    """
    tile_i, tile_j = tl.program_id(0), tl.program_id(1)
    i, j = tile_i * TILE_N + tl.arange(0, TILE_N), tile_j * TILE_M + tl.arange(0, TILE_M)
    in_i, in_j = i < n, j < m
    inside = in_i[:, None] & in_j[None, :]
    positive = j[None, :] == i[:, None] + diagonal
    if IDS > 0:
        text = tl.load(column_ids + j, mask=in_j, other=-1)[None, :]
        for k in range(IDS):
            known = tl.load(row_ids + i * IDS + k, mask=in_i, other=-1)[:, None]
            positive = positive | ((known == text) & (text != -1))

    place = i.to(tl.int64)[:, None] * m + j[None, :]
    logit = tl.load(products + place, mask=inside, other=0.0)
    logit += tl.load(row_bias + i, mask=in_i, other=0.0)[:, None]
    logit += tl.load(column_bias + j, mask=in_j, other=0.0)[None, :]

    z = tl.where(positive, -logit, logit)
    small = _exp_minus(tl.abs(z))
    loss = tl.maximum(z, 0.0) + _log1p(small)
    tl.store(losses + tile_i * tl.num_programs(1) + tile_j, tl.sum(tl.where(inside, loss, 0.0)))
    if GRADIENT:
        g = weight * tl.where(z >= 0, 1.0, small) / (1.0 + small)
        g = tl.where(inside, tl.where(positive, -g, g), 0.0)
        tl.store(products + place, g, mask=inside)
        tl.store(row_sums + i * tl.num_programs(1) + tile_j, tl.sum(g, axis=1), mask=in_i)
        tl.store(column_sums + tile_i.to(tl.int64) * m + j, tl.sum(g, axis=0), mask=in_j)


def sum_block(
    rows: Tensor, vectors: Tensor, row_bias: Tensor, column_bias: Tensor, positive: Positives, weight: float, grad: bool
) -> tuple[Tensor, BlockGradient | None]:
    """Compute `pairs.sum_block` with one kernel after the matrix productin float32. Workspace: one (n, m) matrix."""
    block = rows @ vectors.T
    n, m = block.shape
    tiles = (triton.cdiv(n, TILE_ROWS), triton.cdiv(m, TILE_COLUMNS))
    losses = block.new_empty(tiles)
    row_sums = block.new_empty((n, tiles[1]) if grad else 0)
    column_sums = block.new_empty((tiles[0], m) if grad else 0)
    row_ids, column_ids, ids = None, None, 0
    if positive.rows is not None and positive.columns is not None:
        row_ids, column_ids, ids = positive.rows.contiguous(), positive.columns.contiguous(), positive.rows.shape[1]
    kernel: Any = _pairs_kernel
    diagonal = NO_DIAGONAL if positive.diagonal is None else positive.diagonal
    tensors = block, row_bias, column_bias, row_ids, column_ids, losses, row_sums, column_sums
    constants = {"IDS": ids, "GRADIENT": grad, "TILE_N": TILE_ROWS, "TILE_M": TILE_COLUMNS, "num_warps": WARPS}
    with torch.cuda.device_of(block):  # triton starts kernels on the current device, not on that of the tensors
        kernel[tiles](*tensors, weight, n, m, diagonal, **constants)
    if not grad:
        return losses.sum(), None
    return losses.sum(), BlockGradient(block, row_sums.sum(1), column_sums.sum(0))
