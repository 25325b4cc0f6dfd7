"""Sizes of gradients and parameters, in all and by tower."""
from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

#: Top-level part of a model -> its name in the log; what is left, scale and bias, is `logit`.
PARTS = {"visual": "image", "text": "text"}


def parts_of(objective: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Part -> its parameters that are trained."""
    parts: dict[str, list[nn.Parameter]] = {}
    for name, parameter in objective.named_parameters():
        if parameter.requires_grad:
            top = name.removeprefix("model.").split(".")[0]
            parts.setdefault(PARTS.get(top, "logit"), []).append(parameter)
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
