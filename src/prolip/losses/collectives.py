"""What the losses ask of the other ranks, beside the messages of the ring; for one rank nothing is sent."""
from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def world_size(group: dist.ProcessGroup | None = None) -> int:
    """Ranks in the group, 1 where torch.distributed is not in use."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def rank_in(group: dist.ProcessGroup | None = None) -> int:
    """This process's place in the group, 0 where torch.distributed is not in use."""
    return dist.get_rank(group) if world_size(group) > 1 else 0


def gather(own: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The tensors (n, ...) of all ranks, one after the other: (W n, ...). For one rank its own, no copy."""
    size = world_size(group)
    if size == 1:
        return own
    everyone = own.new_empty((size * len(own), *own.shape[1:]))
    dist.all_gather_into_tensor(everyone, own.contiguous(), group=group)
    return everyone


def reduce_scatter(sums: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Tensors (W n, ...) added up over the ranks, of which this rank gets its rows (n, ...). For one rank its own."""
    size = world_size(group)
    if size == 1:
        return sums
    own = sums.new_empty((len(sums) // size, *sums.shape[1:]))
    dist.reduce_scatter_tensor(own, sums, group=group)
    return own


def transpose_over_ranks(x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """From the rows of a matrix that all ranks have together to its columns, with a graph: (B, W B) -> (B, W B).

    Rank r holds rows rB .. rB + B - 1 of a (W B, W B) matrix and gets the same rows of its transpose, in one
    all-to-all; its gradients come back by another. All ranks of the group must call it.
    """
    return _TransposeOverRanks.apply(x, group)


class _TransposeOverRanks(torch.autograd.Function):
    """A permutation of all ranks' elements that is its own inverse, and so its own adjoint."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group, size, count = group, world_size(group), len(x)
        blocks = x.view(count, size, count).permute(1, 2, 0).contiguous()
        if size > 1:
            received = torch.empty_like(blocks)
            dist.all_to_all_single(received, blocks, group=group)
            blocks = received
        return blocks.transpose(0, 1).reshape(count, size * count)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return transpose_over_ranks(grad_output, ctx.group), None
