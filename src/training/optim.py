"""Optimisers by timm's names, weight-decay and learning-rate groups, and learning-rate schedules."""
from __future__ import annotations

import inspect
import math
from collections.abc import Collection
from typing import Any

import torch
from timm.optim import create_optimizer_v2, get_optimizer_class, get_optimizer_info
from torch import nn

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
    at most 1 (PCME++'s released code exceeds it). `lr_scale` is what `set_learning_rate` multiplies by.
    """
    model = objective.model
    exempt, logit, depths = model.no_weight_decay(), model.logit_parameters(), model.depths()
    groups: dict[tuple[bool, float, bool], dict[str, Any]] = {}
    for full_name, parameter in objective.named_parameters():
        if not parameter.requires_grad:
            continue
        name = full_name.removeprefix("model.")
        decays = has_weight_decay(name, parameter, exempt)
        scale = 1.0 if config.layer_decay is None else config.layer_decay ** depths.get(name, 0)
        if name in logit:
            scale = config.logit_lr_mult
        group = groups.setdefault(
            (decays, scale, name in logit),  # those are never in shards, and optimisers do not mix the two
            {"params": [], "names": [], "lr_scale": scale, "lr": config.lr * scale, "weight_decay": config.wd},
        )
        if not decays:
            group |= {"weight_decay": 0.0, "use_fallback": True}
        group["params"].append(parameter)
        group["names"].append(full_name)
    return list(groups.values())


def has_weight_decay(name: str, parameter: torch.Tensor, exempt: Collection[str]) -> bool:
    """Weight decay is for matrices and kernels that the model does not exempt by name."""
    return parameter.ndim > 1 and not name.endswith(".bias") and name not in exempt


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
        start = decay_start(total, config)
        shape = 1 - max(0.0, min(1.0, (step - start) / max(1, total - start)))
    return config.lr_min_ratio + (1 - config.lr_min_ratio) * shape


def decay_start(total: int, config: OptimConfig) -> int:
    """First step of wsd's decay."""
    return max(config.warmup, total - round(config.decay_fraction * total))


def set_learning_rate(optimizer: torch.optim.Optimizer, config: OptimConfig, factor: float) -> float:
    """Write lr * factor * the group's own multiplier into every group; returns lr * factor."""
    for group in optimizer.param_groups:
        group["lr"] = config.lr * factor * group["lr_scale"]
    return config.lr * factor
