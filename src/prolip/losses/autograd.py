"""Gradients computed in the forward pass, and the collectives of the losses; one rank sends nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Evaluation = tuple[Tensor, tuple[Tensor | None, ...]]
Group = dist.ProcessGroup | None
# The loss () and one gradient for each tensor, which may be None where the flag is False.
Evaluate = Callable[[Sequence[Tensor], Sequence[bool]], Evaluation]


class GradientsInForward(torch.autograd.Function):
    """A scalar whose gradients are computed with its value; the backward pass only multiplies them by grad_output."""

    @staticmethod
    def forward(ctx: Any, evaluate: Evaluate, *tensors: Tensor) -> Tensor:
        needs = ctx.needs_input_grad[1:]
        loss, gradients = evaluate(tensors, needs)
        ctx.save_for_backward(*(g if need else None for g, need in zip(gradients, needs)))
        return loss

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        # `once_differentiable` would accept a constant grad_output and silently drop second derivatives
        if torch.is_grad_enabled():
            message = "losses of pairs such as ppcl are differentiable only once"
            raise RuntimeError(f"{message}: remove create_graph=True")
        return (None, *(None if g is None else g * grad_output for g in ctx.saved_tensors))


def differentiate(evaluate: Evaluate, tensors: Sequence[Tensor]) -> Tensor:
    """Evaluate with gradients in the graph, or without any if grad mode is off."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return GradientsInForward.apply(evaluate, *tensors)
    return evaluate([x.detach() for x in tensors], [False] * len(tensors))[0]


def world_size(group: Group = None) -> int:
    """Return the number of ranks in the group, 1 without torch.distributed."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def rank_in(group: Group = None) -> int:
    """Return the place of this process in the group, 0 without torch.distributed."""
    return dist.get_rank(group) if world_size(group) > 1 else 0


def gather(own: Tensor, group: Group) -> Tensor:
    """Gather tensors (n, ...) of all ranks in rank order: (W n, ...). One rank returns its own, without a copy."""
    size = world_size(group)
    if size == 1:
        return own
    everyone = own.new_empty((size * len(own), *own.shape[1:]))
    dist.all_gather_into_tensor(everyone, own.contiguous(), group=group)
    return everyone


def reduce_scatter(sums: Tensor, group: Group) -> Tensor:
    """Sum tensors (W n, ...) over the ranks and return this rank's rows (n, ...). One rank returns its own."""
    size = world_size(group)
    if size == 1:
        return sums
    own = sums.new_empty((len(sums) // size, *sums.shape[1:]))
    dist.reduce_scatter_tensor(own, sums, group=group)
    return own


def transpose_over_ranks(x: Tensor, group: Group = None) -> Tensor:
    """Transpose a matrix whose rows are split over the ranks, by all-to-all, with a graph: (B, W B) -> (B, W B).

    Rank r holds rows rB .. rB + B - 1 of a (W B, W B) matrix. All ranks of the group must call it.
    """
    return _TransposeOverRanks.apply(x, group)


def both_ways(similarity: Tensor, positive: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return similarities and booleans (B, W B) of own images with all texts, and of own texts with all images."""
    swapped = transpose_over_ranks(similarity), transpose_over_ranks(positive.to(similarity.dtype)) > 0
    return (similarity, positive), swapped


class _TransposeOverRanks(torch.autograd.Function):
    """A permutation of all ranks' elements that is its own inverse, and so its own adjoint."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
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
