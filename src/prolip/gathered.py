"""PPCL over all ranks with all texts gathered at once: two collectives whatever the number of ranks.

The ring of `prolip.ring` holds one text block at a time and starts some twenty kernels for each, so with hundreds of
ranks and small local batches a device spends its time on starting kernels. Here every rank holds all texts and the sums
of their gradients, 8 `row_width(D)` bytes per row of the global batch, and scores them in large blocks.
"""
from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from prolip.losses import (
    Columns,
    Evaluation,
    Matches,
    Needs,
    Packed,
    Positives,
    add_pairs,
    default_block,
    finish,
    zero_rows,
)

# Numbers per row are a multiple of this: 16 bytes of float32.
ALIGNMENT = 4


def row_width(dim: int) -> int:
    """Numbers in a row [mean, trace, zeros] of a text that is gathered: the next multiple of 4 above D.

    With rows of D + 1 numbers most means would begin off the 16 bytes that matrix products on tensor cores read at a
    time.
    """
    return -(-(dim + 1) // ALIGNMENT) * ALIGNMENT


def score_gathered(
    image: Packed,
    text: Packed,
    scale_bias: tuple[Tensor, Tensor],
    labels: Matches | None,
    block: int | None,
    needs: Needs,
    group: dist.ProcessGroup | None,
) -> Evaluation:
    """This rank's share of PPCL and the gradients of `ring.ppcl_over_ranks`, without a graph.

    Texts travel as rows of `row_width(D)` numbers; their gradients come back in the same layout, added up over ranks.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    count, dim = text.mean.shape
    everyone = gather(pack_rows(text), size, group)
    ids = () if labels is None else (labels.image, gather(labels.text.contiguous(), size, group))
    wanted = needs.text_mean or needs.text_trace
    sums = torch.zeros_like(everyone) if wanted else everyone[:0]
    rows = zero_rows(image, needs)
    block = block or default_block(len(everyone), everyone.device)
    columns, out = Packed(everyone[:, :dim], everyone[:, dim]), columns_of(sums, dim, needs)
    add_pairs(rows, columns, out, *scale_bias, Positives(rank * count, *ids), block)
    own = sums.new_empty((count, sums.shape[1])) if wanted else sums
    if wanted:
        dist.reduce_scatter_tensor(own, sums, group=group)
    return finish(rows, columns_of(own, dim, needs), scale_bias[0])


def pack_rows(text: Packed) -> Tensor:
    """Rows [mean, trace, zeros] of a text block: (n, row_width(D))."""
    count, dim = text.mean.shape
    padding = text.mean.new_zeros((count, row_width(dim) - dim - 1))
    return torch.cat([text.mean, text.trace.unsqueeze(1), padding], 1)


def gather(own: Tensor, size: int, group: dist.ProcessGroup | None) -> Tensor:
    """The tensors (n, ...) of all ranks, one after the other: (size * n, ...)."""
    everyone = own.new_empty((size * len(own), *own.shape[1:]))
    dist.all_gather_into_tensor(everyone, own, group=group)
    return everyone


def columns_of(sums: Tensor, dim: int, needs: Needs) -> Columns:
    """Views of rows [d mean, d trace, zeros], those that are wanted."""
    return Columns(sums[:, :dim] if needs.text_mean else None, sums[:, dim] if needs.text_trace else None)
