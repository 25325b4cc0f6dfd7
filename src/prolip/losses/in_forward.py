"""Losses whose gradients are taken in the forward pass, so that nothing of the size of all pairs waits for backward."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Evaluation = tuple[Tensor, tuple[Tensor | None, ...]]
# The loss () and one gradient, or None, for each of the tensors: of those at least whose flag is True.
Evaluate = Callable[[Sequence[Tensor], Sequence[bool]], Evaluation]


class GradientsInForward(torch.autograd.Function):
    """A scalar whose gradients are computed with its value; the backward pass only multiplies them by grad_output."""

    @staticmethod
    def forward(ctx: Any, evaluate: Evaluate, *tensors: Tensor) -> Tensor:
        """The value; gradients of the inputs that need one are kept."""
        needs = ctx.needs_input_grad[1:]
        loss, gradients = evaluate(tensors, needs)
        ctx.save_for_backward(*(g if need else None for g, need in zip(gradients, needs)))
        return loss

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """grad_output times the kept gradients; RuntimeError where these are to be differentiated again."""
        refuse_second_derivative("a loss of pairs, as ppcl,")
        return (None, *(None if g is None else g * grad_output for g in ctx.saved_tensors))


def differentiate(evaluate: Evaluate, tensors: Sequence[Tensor]) -> Tensor:
    """`evaluate` with its gradients in the graph, or without computing any when grad mode is off."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return GradientsInForward.apply(evaluate, *tensors)
    return evaluate([x.detach() for x in tensors], [False] * len(tensors))[0]


def refuse_second_derivative(what: str) -> None:
    """RuntimeError in a backward pass that is to be differentiated again.

    `once_differentiable` lets a constant grad_output pass, and second derivatives are left out without a word.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(f"{what} is differentiable once, its gradients have no graph: leave out create_graph=True")
