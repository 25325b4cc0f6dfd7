"""PPCL over all ranks: every image meets every text of the global batch once, for any world size.

Text blocks of [mean, trace] travel round a ring, each followed by the accumulator of its gradients; both are in flight
while pairs are scored. Memory per rank is O(B D + block B), B the local batch, whatever the world size.
"""
from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from prolip.gathered import row_width, score_gathered
from prolip.gaussian import Gaussian
from prolip.losses import (
    Columns,
    Evaluation,
    Matches,
    Needs,
    Packed,
    Positives,
    add_pairs,
    check_block,
    check_matches,
    default_block,
    differentiate,
    finish,
    pack_inputs,
    ppcl,
    zero_rows,
)

Exchange = Literal["ring", "gather"]
# What a device may hold of other ranks' texts and their gradients: those of 262,144 pairs of width 768 take 1.5 GiB. It
# is little of the 80 GB of a device; over 1,024 ranks the ring would take a tenth of a second longer at every step.
GATHERED_BYTES = 2 * 2**30
# The two streams of messages between the same neighbours are told apart by tag (gloo) and by order (NCCL).
TEXT_TAG, IDS_TAG, GRADIENT_TAG = 11, 12, 13


class Neighbours(NamedTuple):
    """Global ranks before and after this one in the ring of a group; with two ranks they are the same."""

    left: int
    right: int
    group: dist.ProcessGroup | None


class Transfer:
    """Buffers under way to the right, and as many under way from the left. Keeps all of them alive until `wait`."""

    def __init__(self, ring: Neighbours, sent: list[Tensor], received: list[Tensor], tags: list[int]):
        operations = []
        for out, tag in zip(sent, tags):
            operations.append(dist.P2POp(dist.isend, out, ring.right, ring.group, tag))
        for into, tag in zip(received, tags):
            operations.append(dist.P2POp(dist.irecv, into, ring.left, ring.group, tag))
        self._sent, self._received = sent, received
        self._works = dist.batch_isend_irecv(operations)

    def wait(self) -> list[Tensor]:
        """The buffers received, once they and those sent are free to use."""
        for work in self._works:
            work.wait()
        return self._received


def world_size(group: dist.ProcessGroup | None = None) -> int:
    """Ranks in the group, 1 where torch.distributed is not in use."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def ppcl_over_ranks(
    image: Gaussian,
    text: Gaussian,
    scale: Tensor | float,
    bias: Tensor | float,
    labels: Matches | None = None,
    group: dist.ProcessGroup | None = None,
    block: int | None = None,
    exchange: Exchange | None = None,
) -> Tensor:
    """This rank's share of PPCL on the global batch: sum over its images i and all ranks' texts j / B -> ().

    Arguments as `losses.ppcl`, (B, D) of this rank; positives are image i with its own text, and known matches on any
    rank. With L_r the value on rank r, mean_r L_r is `ppcl` of the batches of all W ranks together.

    Gradients: this rank's images, scale and bias get d L_r; its texts get sum_r' d L_r' / d text over all ranks, as
    the other ranks' losses depend on them and nobody else holds their graph. So once DDP has averaged the gradients of
    the parameters over ranks, they are those of one process on the whole batch. The text gradients come home within the
    forward pass, before any grad_output is known, and each rank multiplies them with its own: exact only if grad_output
    is the same on all ranks (same loss weights, same loss scale), as it is when every rank runs the same program.

    exchange: "ring" (this module: memory O(B D + block B) whatever the world size) or "gather" (`prolip.gathered`: two
    collectives whatever the world size, memory O(W B D)); chosen by `choose_exchange` without.

    All ranks of the group must call it, with equal B, D and dtype, labels on all or on none, and the same of the texts'
    tensors needing gradients (or all under no_grad). Without torch.distributed, or for W = 1, it is `ppcl`.
    """
    if world_size(group) == 1:
        return ppcl(image, text, scale, bias, labels, block)
    check_block(block)
    tensors = pack_inputs(image, text, scale, bias)
    with torch.autocast(image.mean.device.type, enabled=False):
        check_matches(labels, len(image.mean))
        count, dim = image.mean.shape
        exchange = exchange or choose_exchange(world_size(group), count, dim, image.mean.device)

        def evaluate(inputs: tuple[Tensor, ...], needs: Needs) -> Evaluation:
            image_mean, image_trace, text_mean, text_trace, a, b = inputs
            images, texts = Packed(image_mean, image_trace), Packed(text_mean, text_trace)
            if exchange == "gather":
                return score_gathered(images, texts, (a, b), labels, block, needs, group)
            return score_ring(images, texts, (a, b), labels, block, needs, neighbours(group))

        return differentiate(evaluate, tensors)


def choose_exchange(ranks: int, rows: int, dim: int, device: torch.device) -> Exchange:
    """"gather" for many ranks on a device where all texts and their gradients fit into GATHERED_BYTES, else "ring".

    A CPU starts a block in no time, and hides the ring's messages behind its computation.
    """
    held = 2 * 4 * ranks * rows * row_width(dim)
    return "gather" if device.type != "cpu" and ranks > 2 and held <= GATHERED_BYTES else "ring"


def neighbours(group: dist.ProcessGroup | None) -> Neighbours:
    """Where this rank sends to and receives from."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    left, right = (rank - 1) % size, (rank + 1) % size
    if group is None:
        return Neighbours(left, right, None)
    return Neighbours(dist.get_global_rank(group, left), dist.get_global_rank(group, right), group)


def score_ring(
    image: Packed,
    text: Packed,
    scale_bias: tuple[Tensor, Tensor],
    labels: Matches | None,
    block: int | None,
    needs: Needs,
    ring: Neighbours,
) -> Evaluation:
    """This rank's share of PPCL and the gradients of `ppcl_over_ranks`, without a graph.

    Half of the own pairs are scored while the first text block is under way, the other half while the accumulator of
    the own texts comes home, so no message is waited for idly. At step s rank r scores the texts of rank r - s, adds
    the accumulator that rank r - 1 made for them, and passes it on; step W - 1 passes it to its home.
    """
    size, count, dim = world_size(ring.group), len(image.trace), image.mean.shape[1]
    rows = zero_rows(image, needs)
    block = block or default_block(count, image.mean.device)

    def add(buffers: list[Tensor], sums: Tensor, part: slice, diagonal: int | None) -> None:
        ids = () if labels is None else (labels.image, buffers[1])
        columns, out = unpack_text(buffers[0], count, dim), unpack_sums(sums, count, dim, needs)
        add_pairs(rows.select(part), columns, out, *scale_bias, Positives(diagonal, *ids).select(part), block)

    own = [torch.cat([text.mean.flatten(), text.trace])]
    if labels is not None:
        own.append(labels.text.contiguous())
    first, second, everything = slice(0, count // 2), slice(count // 2, count), slice(0, count)
    own_sums = new_sums(text, needs)

    texts = pass_texts(ring, own)
    add(own, own_sums, first, 0)
    homebound: Transfer | None = None
    for step in range(1, size):
        here = texts.wait()
        if step < size - 1:
            texts = pass_texts(ring, here)
        sums = new_sums(text, needs)
        add(here, sums, everything, None)
        if not sums.numel():
            continue
        if homebound is not None:
            sums += homebound.wait()[0]
        homebound = Transfer(ring, [sums], [torch.empty_like(sums)], [GRADIENT_TAG])
    add(own, own_sums, second, 0)
    if homebound is not None:
        own_sums += homebound.wait()[0]
    return finish(rows, unpack_sums(own_sums, count, dim, needs), scale_bias[0])


def pass_texts(ring: Neighbours, buffers: list[Tensor]) -> Transfer:
    """Send a text block (and its ids) to the right while the next one comes in from the left."""
    return Transfer(ring, buffers, [torch.empty_like(x) for x in buffers], [TEXT_TAG, IDS_TAG])


def unpack_text(buffer: Tensor, count: int, dim: int) -> Packed:
    """Views of a travelling text block, all means and then all traces: (count (dim + 1),)."""
    return Packed(buffer[: count * dim].view(count, dim), buffer[count * dim :])


def new_sums(text: Packed, needs: Needs) -> Tensor:
    """Zeros for the gradients of a text block that `needs` names, one buffer; empty if there are none."""
    return text.trace.new_zeros(needs.text_mean * text.mean.numel() + needs.text_trace * text.trace.numel())


def unpack_sums(buffer: Tensor, count: int, dim: int, needs: Needs) -> Columns:
    """Views of the buffer made by `new_sums`."""
    means = needs.text_mean * count * dim
    return Columns(
        buffer[:means].view(count, dim) if needs.text_mean else None, buffer[means:] if needs.text_trace else None
    )
