"""Sizes of gradients and parameters, in all and by tower."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def parts_of(objective: Any) -> dict[str, list[nn.Parameter]]:
    """Name of a tower -> its parameters that are trained; what is in none, scale and bias, is `logit`."""
    owner = {id(p): name for name, tower in objective.model.towers().items() for p in tower.parameters()}
    parts: dict[str, list[nn.Parameter]] = {}
    for parameter in objective.parameters():
        if parameter.requires_grad:
            parts.setdefault(owner.get(id(parameter), "logit"), []).append(parameter)
    return parts


def gradient_norms(parts: Mapping[str, Sequence[nn.Parameter]], bound: float | None) -> dict[str, Tensor]:
    """grad_norm of all gradients, and grad_norm_PART of each part: L2, () each, before clipping.

    bound: scale all gradients so that their common norm is at most this.
    """
    norms = {
        f"grad_norm_{part}": norm([p.grad for p in parameters if p.grad is not None])
        for part, parameters in parts.items()
    }
    total = torch.linalg.vector_norm(torch.stack(list(norms.values())))
    if bound is not None:
        for parameters in parts.values():  # one kind of tensor, whole or in shards, at a time
            nn.utils.clip_grads_with_norm_(parameters, bound, total)
    return {"grad_norm": total} | norms


def norm(tensors: Sequence[Tensor]) -> Tensor:
    """L2 norm of all elements, over all shards where they are in shards: ()."""
    total = nn.utils.get_total_norm(tensors)
    return total.full_tensor() if isinstance(total, DTensor) else total


@torch.no_grad()
def parameter_norms(parts: Mapping[str, Sequence[nn.Parameter]]) -> dict[str, float]:
    """param_norm_PART of each part; waits for the device."""
    norms = torch.stack([norm([p.detach() for p in parameters]) for parameters in parts.values()])
    return dict(zip((f"param_norm_{part}" for part in parts), norms.tolist()))
