"""All pairs of all ranks with all texts gathered at once: two collectives whatever the number of ranks.

The ring holds one text block at a time and starts some twenty kernels for each, so with hundreds of ranks and small
local batches a device spends its time on starting kernels. Here every rank holds all texts and the sums of their
gradients, 8 `row_width(P)` bytes per row of the global batch, and scores them in large blocks.
"""
from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from prolip.losses.collectives import gather, rank_in, reduce_scatter
from prolip.losses.in_forward import Evaluation
from prolip.losses.pairs import Columns, Factors, WantedGradients, add_pairs, default_block, finish, zero_rows
from prolip.losses.positives import Matches, Positives

# Numbers per row are a multiple of this: 16 bytes of float32.
ALIGNMENT = 4


def row_width(dim: int) -> int:
    """Numbers in a row [vector, offset, zeros] of a text that is gathered: the next multiple of 4 above P.

    With rows of P + 1 numbers most vectors would begin off the 16 bytes that matrix products on tensor cores read at a
    time.
    """
    return -(-(dim + 1) // ALIGNMENT) * ALIGNMENT


def score_gathered(
    image: Factors,
    text: Factors,
    scale_bias: tuple[Tensor, Tensor],
    labels: Matches | None,
    block: int | None,
    needs: WantedGradients,
    group: dist.ProcessGroup | None,
) -> Evaluation:
    """This rank's share of the loss and the gradients of `contrastive.sigmoid_loss_over_ranks`, without a graph.

    Texts travel as rows of `row_width(P)` numbers; their gradients come back in the same layout, added up over ranks.
    """
    count, dim = text.vector.shape
    everyone = gather(pack_rows(text), group)
    ids = () if labels is None else (labels.image, gather(labels.text, group))
    wanted = needs.text_vector or needs.text_offset
    sums = torch.zeros_like(everyone) if wanted else everyone[:0]
    rows = zero_rows(image, needs)
    block = block or default_block(len(everyone), everyone.device)
    columns, out = Factors(everyone[:, :dim], everyone[:, dim]), columns_of(sums, dim, needs)
    add_pairs(rows, columns, out, *scale_bias, Positives(rank_in(group) * count, *ids), block)
    own = reduce_scatter(sums, group) if wanted else sums
    return finish(rows, columns_of(own, dim, needs), scale_bias[0])


def pack_rows(text: Factors) -> Tensor:
    """Rows [vector, offset, zeros] of a text block: (n, row_width(P))."""
    count, dim = text.vector.shape
    padding = text.vector.new_zeros((count, row_width(dim) - dim - 1))
    return torch.cat([text.vector, text.offset.unsqueeze(1), padding], 1)


def columns_of(sums: Tensor, dim: int, needs: WantedGradients) -> Columns:
    """Views of rows [d vector, d offset, zeros], those that are wanted."""
    return Columns(sums[:, :dim] if needs.text_vector else None, sums[:, dim] if needs.text_offset else None)
