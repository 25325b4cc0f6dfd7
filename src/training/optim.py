"""Optimisers, schedules, freezing, EMA and SWA, norms."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from timm.optim import create_optimizer_v2, get_optimizer_class, get_optimizer_info
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from prolip.utils.flags import FlagError, flag_of
from training.config import OptimConfig


def build_optimizer(objective: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """Build timm's optimiser for the objective's trainable parameters, fused if torch supports it."""
    groups = parameter_groups(objective, config)
    if not groups:
        raise ValueError("all parameters are frozen: remove --lock-image or --lock-text")
    trained = {group["backbone"] for group in groups}
    for tower, names in backbone_flags(config).items():
        if tower not in trained:
            what = f"{flag_of(names[0])} needs a trained {tower} backbone"
            raise FlagError(f"{what}: remove it, or --lock-{tower}")
    if all(tower is not None and getattr(config, f"{tower}_freeze_epochs") for tower in trained):
        towers = " and ".join(sorted(map(str, trained)))
        remedy = "remove --image-freeze-epochs or --text-freeze-epochs"
        raise FlagError(f"all parameters are frozen at first ({towers} backbones): {remedy}")
    accepted = inspect.signature(get_optimizer_class(config.opt, bind_defaults=False)).parameters
    settings: dict[str, Any] = {"betas": (config.beta1, config.beta2), "eps": config.eps, "fused": True}
    settings["momentum"] = config.momentum
    settings = {name: value for name, value in settings.items() if name in accepted and value is not None}
    if get_optimizer_info(config.opt.lower()).second_order:
        raise FlagError(f"--opt {config.opt} needs second derivatives, which the loss does not have: use adamw")
    try:
        return create_optimizer_v2(groups, opt=config.opt, lr=config.lr, weight_decay=config.wd, **settings)
    except (AssertionError, ImportError) as error:  # apex and bitsandbytes
        raise FlagError(f"--opt {config.opt} cannot be used here: {error}; use adamw") from None


def parameter_groups(objective: Any, config: OptimConfig) -> list[dict[str, Any]]:
    """Group trainable parameters by (weight decay, learning-rate multiplier), in their own order.

    As in timm, vectors, scalars and `model.no_weight_decay()` (tokens, positions) have no decay. The multiplier is
    `logit_lr_mult` for `model.logit_parameters()`, else layer_decay^depth from `model.depths()`, times the backbone's.
    """
    model = objective.model
    exempt, logit, depths = model.no_weight_decay(), model.logit_parameters(), model.depths()
    asked = backbone_flags(config)
    backbone = {name: tower for tower, names in model.backbones().items() if tower in asked for name in names}
    in_towers = {id(parameter) for tower in model.towers().values() for parameter in tower.parameters()}
    groups: dict[tuple[bool, float, bool, str | None], dict[str, Any]] = {}
    for full_name, parameter in objective.named_parameters():
        if not parameter.requires_grad:
            continue
        name = full_name.removeprefix("model.")
        decays = parameter.ndim > 1 and not name.endswith(".bias") and name not in exempt
        scale = 1.0 if config.layer_decay is None else config.layer_decay ** depths.get(name, 0)
        if (tower := backbone.get(name)) is not None:
            scale *= getattr(config, f"{tower}_lr_mult")
        if name in logit:
            scale = config.logit_lr_mult
        fresh: dict[str, Any] = {"params": [], "names": [], "lr_scale": scale, "lr": config.lr * scale}
        fresh |= {"weight_decay": config.wd, "backbone": tower}
        # towers may be sharded; optimisers cannot mix sharded and whole parameters
        group = groups.setdefault((decays, scale, id(parameter) in in_towers, tower), fresh)
        if not decays:
            group |= {"weight_decay": 0.0, "use_fallback": True}
        group["params"].append(parameter)
        group["names"].append(full_name)
    return list(groups.values())


def backbone_flags(config: OptimConfig) -> dict[str, list[str]]:
    """Return tower -> backbone settings that differ from the defaults; only towers with such settings."""
    plain = OptimConfig()
    names = {tower: (f"{tower}_lr_mult", f"{tower}_freeze_epochs") for tower in ("image", "text")}
    found = {tower: [x for x in of if getattr(config, x) != getattr(plain, x)] for tower, of in names.items()}
    return {tower: own for tower, own in found.items() if own}


class Stage(NamedTuple):
    """The schedule of a backbone: frozen for `frozen` steps, then `warmup` steps of warm-up."""

    frozen: int
    warmup: int

    def factor(self, step: int) -> float:
        """Return the factor on its learning rate at 0-based step `step`: 0, (step - frozen + 1) / warmup, 1."""
        if step < self.frozen:
            return 0.0
        return min(1.0, (step - self.frozen + 1) / max(1, self.warmup))


def stages_of(config: OptimConfig, steps_per_epoch: int, total: int) -> dict[str, Stage]:
    """Return tower -> stage of each backbone frozen at first; FlagError unless all stages end within the run."""
    found = {}
    for tower in ("image", "text"):
        name = f"{tower}_freeze_epochs"
        if epochs := getattr(config, name):
            warmup = round(config.unfreeze_warmup_epochs * steps_per_epoch)
            found[tower] = stage = Stage(max(1, round(epochs * steps_per_epoch)), warmup)
            if sum(stage) >= total:
                own = f" and --unfreeze-warmup-epochs {config.unfreeze_warmup_epochs:g}" if warmup else ""
                what = f"{flag_of(name)} {epochs:g}{own} cover the whole run of {total} steps"
                remedy = f"give fewer epochs, train longer, or freeze the tower with --lock-{tower}"
                raise FlagError(f"{what} ({steps_per_epoch} per epoch): {remedy}")
    return found


def learning_rate_factor(step: int, total: int, config: OptimConfig) -> float:
    """Return the factor on the learning rate of 0-based step `step` of `total`.

    Warm-up: (step + 1) / warmup. After it, with r = lr_min_ratio,
    cosine: r + (1 - r) (1 + cos(pi t)) / 2, t = (step - warmup) / (total - warmup); const: 1;
    wsd: 1, then linearly from 1 to r over the last decay_fraction of all steps;
    step: lr_step_factor ** (number of milestones passed), each a share of all steps.
    """
    if step < config.warmup:
        return (step + 1) / config.warmup
    if config.lr_scheduler == "const":
        return 1.0
    if config.lr_scheduler == "step":
        return config.lr_step_factor ** sum(step >= round(share * total) for share in config.lr_milestones)
    if config.lr_scheduler == "cosine":
        progress = (step - config.warmup) / max(1, total - config.warmup)
        shape = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    else:
        start = max(config.warmup, total - round(config.decay_fraction * total))
        shape = 1 - max(0.0, min(1.0, (step - start) / max(1, total - start)))
    return config.lr_min_ratio + (1 - config.lr_min_ratio) * shape


def set_learning_rate(optimizer: Any, config: OptimConfig, factor: float, backbones: Mapping[str, float]) -> None:
    """Set the learning rate of every group: lr * factor * its own multiplier * its backbone's multiplier."""
    for group in optimizer.param_groups:
        group["lr"] = config.lr * factor * group["lr_scale"] * backbones.get(group["backbone"], 1.0)


class EpochAverage(ModelEmaV3):
    """The mean of the weights after `steps`, the ends of epochs: SWA (Izmailov et al. 2018)."""

    def __init__(self, model: nn.Module, steps: Sequence[int], foreach: bool = True):
        super().__init__(model, decay=0.0, foreach=foreach)
        self.steps = list(steps)

    def update(self, model: nn.Module, step: int | None = None) -> None:
        """Add the weights if this is one of the steps: m_k = m_(k-1) + (w - m_(k-1)) / k."""
        if step in self.steps:
            before = self.steps.index(step)
            self.decay = before / (before + 1)
            super().update(model)

    def taken(self, step: int) -> list[int]:
        """Return the steps whose weights the average after `step` contains."""
        return [one for one in self.steps if one <= step]


def build_averages(
    model: nn.Module, config: OptimConfig, steps_per_epoch: int, total: int, foreach: bool
) -> dict[str, ModelEmaV3]:
    """Build the models of `training.state.AVERAGES`; FlagError for too many epochs. foreach: False for shards."""
    found: dict[str, ModelEmaV3] = {}
    if config.ema_decay:
        found["ema"] = ModelEmaV3(model, decay=config.ema_decay, use_warmup=True, foreach=foreach)
    if config.swa_epochs:
        # counted back from the last step, for runs of any length
        steps = [total - steps_per_epoch * back for back in reversed(range(config.swa_epochs))]
        if steps[0] < 1:
            epochs, most = f"{total / steps_per_epoch:.1f}", -(-total // steps_per_epoch)
            remedy = f"give at most {most}, or train longer"
            raise FlagError(f"--swa-epochs {config.swa_epochs} exceeds the run's {epochs} epochs: {remedy}")
        found["swa"] = EpochAverage(model, steps, foreach)
    return found


def params_by_tower(objective: Any) -> dict[str, list[nn.Parameter]]:
    """Return tower -> trained parameters; scale and bias under `logit`."""
    owner = {id(p): name for name, tower in objective.model.towers().items() for p in tower.parameters()}
    parts: dict[str, list[nn.Parameter]] = {}
    for parameter in objective.parameters():
        if parameter.requires_grad:
            parts.setdefault(owner.get(id(parameter), "logit"), []).append(parameter)
    return parts


def gradient_norms(parts: Mapping[str, Sequence[nn.Parameter]], bound: float | None) -> dict[str, Tensor]:
    """Bound gradients to norm `bound`; returns L2 norms before that, () each: grad_norm, and grad_norm_PART by part."""
    norms = {}
    for part, parameters in parts.items():
        grads = [p.grad for p in parameters if p.grad is not None]
        norms[f"grad_norm_{part}"] = norm(grads) if grads else torch.zeros((), device=parameters[0].device)
    total = torch.linalg.vector_norm(torch.stack(list(norms.values())))
    if bound is not None:
        for parameters in parts.values():  # whole and sharded tensors cannot be mixed
            nn.utils.clip_grads_with_norm_(parameters, bound, total)
    return {"grad_norm": total} | norms


def norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the L2 norm of all elements over all shards: ()."""
    total = nn.utils.get_total_norm(tensors)
    return total.full_tensor() if isinstance(total, DTensor) else total


@torch.no_grad()
def parameter_norms(parts: Mapping[str, Sequence[nn.Parameter]]) -> dict[str, float]:
    """Return param_norm_PART of each part; waits for the device."""
    norms = torch.stack([norm([p.detach() for p in parameters]) for parameters in parts.values()])
    return dict(zip((f"param_norm_{part}" for part in parts), norms.tolist()))
