"""Exact gradient accumulation: micro-batches give the values and gradients of the whole batch, for any loss."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from prolip.methods.base import Batch, Objective, Reps, Terms


def split_batch(batch: Batch, parts: int) -> list[Batch]:
    """Cut a prepared batch into micro-batches.

    Tensors (as views) and lists are cut along their first dimension; scalars and other values go to every part.
    Entries with fewer rows (masked views) are cut evenly on their own, so some parts may hold none of them.
    """
    if parts < 1:
        raise ValueError(f"{parts} micro-batches: give 1 or more")

    def cut(value: Any) -> list[Any]:
        if isinstance(value, list):
            return [[value[row] for row in rows] for rows in torch.arange(len(value)).tensor_split(parts)]
        return list(value.tensor_split(parts)) if isinstance(value, Tensor) and value.ndim else [value] * parts

    rows = max((len(x) for x in batch.values() if isinstance(x, list) or isinstance(x, Tensor) and x.ndim), default=0)
    if rows < parts:
        raise ValueError(f"{parts} micro-batches of a batch of {rows}: give at most {rows}, or a larger batch")
    shares = {name: cut(value) for name, value in batch.items()}
    return [{name: share[part] for name, share in shares.items()} for part in range(parts)]


def join_reps(pieces: list[Reps], shared: Collection[str] = ()) -> Reps:
    """Undo the cut for representations: rows are joined, scalars and `shared` are taken once."""
    return {
        name: value if value.ndim == 0 or name in shared else torch.cat([piece[name] for piece in pieces])
        for name, value in pieces[0].items()
    }


def split_cotangents(cotangents: Reps, pieces: list[Reps], shared: Collection[str] = ()) -> list[Reps]:
    """Split cotangents by micro-batches with representations `pieces`; scalars and `shared` are split evenly."""
    split = {
        name: [value / len(pieces)] * len(pieces)
        if value.ndim == 0 or name in shared
        else value.split([len(piece[name]) for piece in pieces])
        for name, value in cotangents.items()
    }
    return [{name: parts[place] for name, parts in split.items()} for place in range(len(pieces))]


def accumulate_backward(
    objective: nn.Module,
    batch: Batch,
    parts: int = 1,
    autocast: Callable[[], AbstractContextManager] = nullcontext,
    scale_loss: Callable[[Tensor], Tensor] = lambda loss: loss,
) -> Terms:
    """Add the gradients of one prepared batch, in `parts` micro-batches, to the parameters; return the detached terms.

    The loss is computed once on all representations: embed every micro-batch without a graph, differentiate the loss to
    the representations, then backpropagate each micro-batch with its share of these cotangents (Gao et al. 2021,
    section 3). Values and gradients equal those of `parts=1`. Random layers draw the same numbers in both passes.

    objective: an Objective or its DDP wrapper, whose ranks synchronise with the last micro-batch only.
    autocast: makes a context for the forward passes; call this function outside of it.
    """
    if parts == 1:
        with autocast():
            terms = objective(batch)
        scale_loss(terms["loss"]).backward()
        return {name: value.detach() for name, value in terms.items()}
    bare = unwrap(objective)
    pieces = split_batch(batch, parts)
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    on_cpu, on_devices = torch.get_rng_state(), [torch.cuda.get_rng_state(device) for device in devices]
    with torch.no_grad(), autocast():
        reps = [bare.embed(piece) for piece in pieces]
    # Before torch's pull request 165068 (2025), an outer autocast kept weights that were cast without a graph.
    torch.clear_autocast_cache()
    whole = {name: value.detach().requires_grad_() for name, value in join_reps(reps, bare.shared).items()}
    with autocast():
        terms = bare.logged(whole, batch)
    scaled = scale_loss(terms["loss"])
    gradients = torch.autograd.grad(scaled, list(whole.values()), allow_unused=True, materialize_grads=True)
    shares = split_cotangents(dict(zip(whole, gradients)), reps, bare.shared)
    del whole, gradients, reps
    unsynchronised = getattr(objective, "no_sync", nullcontext)
    with torch.random.fork_rng(devices):  # repeats the random numbers of the first pass
        torch.set_rng_state(on_cpu)
        for device, state in zip(devices, on_devices):
            torch.cuda.set_rng_state(state, device)
        for place, (piece, share) in enumerate(zip(pieces, shares)):
            with unsynchronised() if place < parts - 1 else nullcontext():
                with autocast():
                    surrogate = objective(piece, cotangents=share)
                surrogate.backward()
    return {name: value.detach() for name, value in terms.items()}


def unwrap(objective: nn.Module) -> Objective:
    """Return the Objective inside DDP and torch.compile wrappers."""
    inner = objective
    while not isinstance(inner, Objective):
        wrapped = getattr(inner, "_orig_mod", getattr(inner, "module", None))
        if wrapped is None:
            raise TypeError(f"{type(inner).__name__} contains no Objective: give an Objective or its DDP wrapper")
        inner = wrapped
    return inner
