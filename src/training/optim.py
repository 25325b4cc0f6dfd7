"""Optimisers by timm's names, weight-decay and learning-rate groups, schedules, and norms of what they move."""
from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from timm.optim import create_optimizer_v2, get_optimizer_class, get_optimizer_info
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from training.config import OptimConfig
from training.flags import FlagError


def build_optimizer(objective: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """The optimiser that timm knows by this name over the objective's trainable parameters.

    Fused where torch offers it. Hybrid optimisers (Muon) take their AdamW part for everything without weight decay:
    tokens, positions, scalars. Raises ValueError for a name that timm does not know, or that cannot be used here.
    """
    groups = parameter_groups(objective, config)
    if not groups:
        raise ValueError("every parameter is frozen: leave one tower unlocked")
    accepted = inspect.signature(get_optimizer_class(config.opt, bind_defaults=False)).parameters
    settings: dict[str, Any] = {"betas": (config.beta1, config.beta2), "eps": config.eps}
    if config.momentum is not None:
        settings["momentum"] = config.momentum
    settings = {name: value for name, value in settings.items() if name in accepted}
    if "fused" in accepted:
        settings["fused"] = True
    if get_optimizer_info(config.opt.lower()).second_order:
        raise FlagError(f"--opt {config.opt} wants second derivatives, which the loss does not offer: use adamw")
    try:
        return create_optimizer_v2(groups, opt=config.opt, lr=config.lr, weight_decay=config.wd, **settings)
    except (AssertionError, ImportError) as error:  # apex and bitsandbytes
        raise FlagError(f"--opt {config.opt} cannot be used here: {error}; use adamw") from None


def parameter_groups(objective: Any, config: OptimConfig) -> list[dict[str, Any]]:
    """Trainable parameters by (weight decay, learning-rate multiplier), in their own order; the logit's apart.

    No decay on vectors and scalars (biases, norms) and on what `model.no_weight_decay()` names (tokens, positions), as
    timm. `model.logit_parameters()` have the multiplier `logit_lr_mult`, others layer_decay^depth by `model.depths()`,
    at most 1. `lr_scale` is what `set_learning_rate` multiplies by.
    """
    model = objective.model
    exempt, logit, depths = model.no_weight_decay(), model.logit_parameters(), model.depths()
    in_towers = {id(parameter) for tower in model.towers().values() for parameter in tower.parameters()}
    groups: dict[tuple[bool, float, bool], dict[str, Any]] = {}
    for full_name, parameter in objective.named_parameters():
        if not parameter.requires_grad:
            continue
        name = full_name.removeprefix("model.")
        decays = parameter.ndim > 1 and not name.endswith(".bias") and name not in exempt
        scale = 1.0 if config.layer_decay is None else config.layer_decay ** depths.get(name, 0)
        if name in logit:
            scale = config.logit_lr_mult
        group = groups.setdefault(
            (decays, scale, id(parameter) in in_towers),  # only those may be in shards, and optimisers do not mix
            {"params": [], "names": [], "lr_scale": scale, "lr": config.lr * scale, "weight_decay": config.wd},
        )
        if not decays:
            group |= {"weight_decay": 0.0, "use_fallback": True}
        group["params"].append(parameter)
        group["names"].append(full_name)
    return list(groups.values())


def learning_rate_factor(step: int, total: int, config: OptimConfig) -> float:
    """Factor on the learning rate of 0-based step `step` of `total`.

    Warm-up: (step + 1) / warmup. After it, with r = lr_min_ratio,
    cosine: r + (1 - r) (1 + cos(pi t)) / 2, t = (step - warmup) / (total - warmup);
    wsd (warm-up, stable, decay): 1, then linearly from 1 to r over the last decay_fraction of all steps; const: 1.
    """
    if step < config.warmup:
        return (step + 1) / config.warmup
    if config.lr_scheduler == "const":
        return 1.0
    if config.lr_scheduler == "cosine":
        progress = (step - config.warmup) / max(1, total - config.warmup)
        shape = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    else:
        start = max(config.warmup, total - round(config.decay_fraction * total))
        shape = 1 - max(0.0, min(1.0, (step - start) / max(1, total - start)))
    return config.lr_min_ratio + (1 - config.lr_min_ratio) * shape


def set_learning_rate(optimizer: torch.optim.Optimizer, config: OptimConfig, factor: float) -> float:
    """Write lr * factor * the group's own multiplier into every group; returns lr * factor."""
    for group in optimizer.param_groups:
        group["lr"] = config.lr * factor * group["lr_scale"]
    return config.lr * factor


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
