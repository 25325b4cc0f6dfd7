"""Scores of all pairs of all ranks, each pair once, for any world size."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from prolip.losses.autograd import Evaluation, Group, gather, rank_in, reduce_scatter, world_size
from prolip.losses.pairs import Columns, Factors, Scalars, WantedGradients, add_pairs, default_block, finish, zero_rows
from prolip.losses.positives import Labels, Positives

# Tags (gloo) and order (NCCL) distinguish the two streams of messages between the same neighbours.
TEXT_TAG, IDS_TAG, GRADIENT_TAG = 11, 12, 13


class Transfer:
    """Buffers in transfer to the right neighbour and from the left one, kept alive until `wait`."""

    def __init__(self, group: Group, sent: list[Tensor], *tags: int):
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        everyone: Any = group or dist.group.WORLD
        left, right = (dist.get_global_rank(everyone, place % size) for place in (rank - 1, rank + 1))
        self._sent, self._received = sent, [torch.empty_like(x) for x in sent]
        operations = [dist.P2POp(dist.isend, x, right, group, tag) for x, tag in zip(sent, tags)]
        operations += [dist.P2POp(dist.irecv, x, left, group, tag) for x, tag in zip(self._received, tags)]
        self._works = dist.batch_isend_irecv(operations)

    def wait(self) -> list[Tensor]:
        """Return the received buffers, once they and the sent ones are free to use."""
        for work in self._works:
            work.wait()
        return self._received


def score_ring(
    image: Factors, text: Factors, scale_bias: Scalars, labels: Labels, block, needs: WantedGradients, group: Group
) -> Evaluation:
    """Compute this rank's share of the loss and gradients of `sigmoid_loss_over_ranks`, without a graph.

    Half of the own pairs are scored while the first text block travels, the other half while the accumulator of the own
    texts returns. At step s rank r scores the texts of rank r - s, adds the accumulator that rank r - 1 made for them,
    and passes it on; step W - 1 passes it to its owner.
    """
    size, (count, dim) = world_size(group), image.vector.shape
    rows = zero_rows(image, needs)
    block = block or default_block(count, image.vector.device)

    def add(buffers: list[Tensor], sums: Tensor, part: slice, diagonal: int | None) -> None:
        ids = () if labels is None else (labels.image, buffers[1])
        columns = Factors(buffers[0][: count * dim].view(count, dim), buffers[0][count * dim :])
        out = unpack_sums(sums, count, dim, needs)
        add_pairs(rows.select(part), columns, out, *scale_bias, Positives(diagonal, *ids).select(part), block)

    own = [torch.cat([text.vector.flatten(), text.offset])]
    if labels is not None:
        own.append(labels.text.contiguous())
    first, second, everything = slice(0, count // 2), slice(count // 2, count), slice(0, count)
    own_sums = new_sums(text, needs)

    texts = Transfer(group, own, TEXT_TAG, IDS_TAG)
    add(own, own_sums, first, 0)
    homebound: Transfer | None = None
    for step in range(1, size):
        here = texts.wait()
        if step < size - 1:
            texts = Transfer(group, here, TEXT_TAG, IDS_TAG)
        sums = new_sums(text, needs)
        add(here, sums, everything, None)
        if not sums.numel():
            continue
        if homebound is not None:
            sums += homebound.wait()[0]
        homebound = Transfer(group, [sums], GRADIENT_TAG)
    add(own, own_sums, second, 0)
    if homebound is not None:
        own_sums += homebound.wait()[0]
    return finish(rows, unpack_sums(own_sums, count, dim, needs), scale_bias[0])


def new_sums(text: Factors, needs: WantedGradients) -> Tensor:
    """Return zeros for the gradients of a text block that `needs` names, in one buffer; empty for none."""
    return text.offset.new_zeros(needs.text_vector * text.vector.numel() + needs.text_offset * text.offset.numel())


def unpack_sums(buffer: Tensor, count: int, dim: int, needs: WantedGradients) -> Columns:
    vectors = needs.text_vector * count * dim
    vector = buffer[:vectors].view(count, dim) if needs.text_vector else None
    return Columns(vector, buffer[vectors:] if needs.text_offset else None)


def row_width(dim: int) -> int:
    """Return the width of a row [vector, offset, zeros] of a gathered text: the next multiple of 4 above P."""
    return -(-(dim + 1) // 4) * 4


def score_gathered(
    image: Factors, text: Factors, scale_bias: Scalars, labels: Labels, block, needs: WantedGradients, group: Group
) -> Evaluation:
    """Compute this rank's share of the loss and gradients of `sigmoid_loss_over_ranks`, without a graph."""
    count, dim = text.vector.shape
    padding = text.vector.new_zeros((count, row_width(dim) - dim - 1))
    everyone = gather(torch.cat([text.vector, text.offset.unsqueeze(1), padding], 1), group)
    ids = () if labels is None else (labels.image, gather(labels.text, group))
    wanted = needs.text_vector or needs.text_offset
    sums = torch.zeros_like(everyone) if wanted else everyone[:0]
    rows = zero_rows(image, needs)
    block = block or default_block(len(everyone), everyone.device)
    columns, out = Factors(everyone[:, :dim], everyone[:, dim]), columns_of(sums, dim, needs)
    add_pairs(rows, columns, out, *scale_bias, Positives(rank_in(group) * count, *ids), block)
    own = reduce_scatter(sums, group) if wanted else sums
    return finish(rows, columns_of(own, dim, needs), scale_bias[0])


def columns_of(sums: Tensor, dim: int, needs: WantedGradients) -> Columns:
    """Return views of rows [d vector, d offset, zeros]; None for gradients that are not needed."""
    return Columns(sums[:, :dim] if needs.text_vector else None, sums[:, dim] if needs.text_offset else None)
