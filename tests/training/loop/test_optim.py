"""Schedules against their closed forms, parameter groups against timm's, optimisers by name."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from timm.optim import param_groups_weight_decay
from torch import nn

import prolip
from prolip.utils.flags import FlagError
from training.config import OptimConfig as Unsettled
from training.defaults import SCRATCH
from training.optim import (
    EpochAverage,
    Stage,
    build_averages,
    build_optimizer,
    learning_rate_factor,
    parameter_groups,
    set_learning_rate,
    stages_of,
)

#: Settings of the optimiser, those that a run settles as it does from random weights.
OptimConfig = partial(Unsettled, **SCRATCH, warmup=0)


def fresh(**settings: Any) -> nn.Module:
    holder = nn.Module()
    holder.model = prolip.create_model("ProLIP-ViT-test", **settings)
    return holder


@pytest.fixture(scope="module")
def objective() -> nn.Module:
    return fresh()


def factors(total: int, **settings) -> list[float]:
    return [learning_rate_factor(step, total, OptimConfig(**settings)) for step in range(total)]


def test_warm_up_rises_in_equal_steps_to_one():
    assert factors(20, warmup=5)[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


def test_cosine_follows_its_formula():
    got = factors(100, warmup=10, lr_scheduler="cosine", lr_min_ratio=0.1)
    want = [0.1 + 0.9 * math.cos(math.pi * (step - 10) / 90 / 2) ** 2 for step in range(10, 100)]
    assert got[10:] == pytest.approx(want)
    assert got[10] == 1.0
    assert learning_rate_factor(100, 100, OptimConfig(warmup=10, lr_min_ratio=0.1)) == pytest.approx(0.1)


def test_wsd_is_flat_then_falls_in_a_straight_line():
    got = factors(100, warmup=10, lr_scheduler="wsd", decay_fraction=0.3, lr_min_ratio=0.0)
    assert got[10:71] == [1.0] * 61
    assert got[71:] == pytest.approx([1 - (step - 70) / 30 for step in range(71, 100)])


def test_step_falls_at_its_milestones_by_its_factor():
    """PCME++: a tenth for the last 10 of 25 epochs."""
    got = factors(25 * 8, warmup=4, lr_scheduler="step", lr_milestones=(0.6,))
    assert got[4 : 15 * 8] == [1.0] * (15 * 8 - 4) and got[15 * 8 :] == [0.1] * 80
    got = factors(10, warmup=0, lr_scheduler="step", lr_milestones=(0.5, 0.8), lr_step_factor=0.5)
    assert got == [1.0] * 5 + [0.5] * 3 + [0.25] * 2


def test_groups_split_weight_decay_as_timm_does(objective):
    groups = parameter_groups(objective, OptimConfig(wd=0.2))
    ours = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    exempt = objective.model.no_weight_decay()
    timms = param_groups_weight_decay(objective.model, weight_decay=0.2, no_weight_decay_list=exempt)
    assert ours == {id(p): group["weight_decay"] for group in timms for p in group["params"]}


def test_biases_norms_scalars_tokens_and_positions_have_no_decay(objective):
    decay = {n: g["weight_decay"] for g in parameter_groups(objective, OptimConfig()) for n in g["names"]}
    for name in (
        *("logit_scale", "logit_bias", "visual.class_embedding", "visual.unc_embedding", "visual.positional_embedding"),
        *("visual.ln_post.weight", "text.positional_embedding", "text.unc_emb", "text.cls_emb"),
        "text.transformer.resblocks.0.attn.in_proj_bias",
    ):
        assert decay[f"model.{name}"] == 0, name
    for name in ("visual.conv1.weight", "visual.proj", "text.transformer.resblocks.0.mlp.c_fc.weight"):
        assert decay[f"model.{name}"] == 0.2, name


def test_scale_and_bias_have_their_own_multiplier(objective):
    config = OptimConfig(lr=1e-3, logit_lr_mult=10.0)
    optimizer = build_optimizer(objective, config)
    set_learning_rate(optimizer, config, 0.5, {})
    rates = {name: group["lr"] for group in optimizer.param_groups for name in group["names"]}
    assert rates["model.logit_scale"] == rates["model.logit_bias"] == pytest.approx(5e-3)
    assert rates["model.visual.proj"] == pytest.approx(5e-4)


def test_layer_decay_falls_from_the_heads_to_the_embeddings(objective):
    scale = {n: g["lr_scale"] for g in parameter_groups(objective, OptimConfig(layer_decay=0.5)) for n in g["names"]}
    want = {
        1.0: "visual.proj visual.ln_post.weight visual.uncertainty_proj.weight text.text_projection.weight logit_scale",
        0.5: "visual.transformer.resblocks.1.ln_1.weight text.transformer.resblocks.0.ln_1.weight",
        0.25: "visual.transformer.resblocks.0.ln_1.weight text.token_embedding.weight text.cls_emb text.unc_emb",
        0.125: "visual.conv1.weight visual.ln_pre.weight visual.positional_embedding visual.unc_embedding",
    }
    for value, names in want.items():
        assert {scale[f"model.{name}"] for name in names.split()} == {value}
    assert max(scale.values()) <= 1


NEW = ("unc_emb", "uncertainty_proj", "_uncertainty_projection")


@pytest.fixture(scope="module")
def with_heads() -> nn.Module:
    """A model with heads of a method's own, of which the towers' projections take no part."""
    return fresh(method_cfg={"name": "pcmepp"})


def test_backbones_have_multipliers_and_heads_have_none(with_heads):
    config = OptimConfig(image_lr_mult=0.01, text_lr_mult=0.1, layer_decay=0.7, logit_lr_mult=3.0)
    scale = {n.removeprefix("model."): g["lr_scale"] for g in parameter_groups(with_heads, config) for n in g["names"]}
    plain = OptimConfig(layer_decay=0.7, logit_lr_mult=3.0)
    before = {n.removeprefix("model."): g["lr_scale"] for g in parameter_groups(with_heads, plain) for n in g["names"]}
    added = with_heads.model.added_names
    for name, value in scale.items():
        new = name in added or any(part in name for part in NEW)
        mult = 1.0 if new or name.startswith("logit") else 0.01 if name.startswith("visual.") else 0.1
        assert value == pytest.approx(before[name] * mult), name
    assert scale["visual.transformer.resblocks.0.mlp.c_fc.weight"] == pytest.approx(0.7**2 * 0.01)
    assert scale["text.ln_final.weight"] == pytest.approx(0.1)
    assert scale["visual.unc_embedding"] == pytest.approx(0.7**3) and scale["logit_scale"] == 3.0
    assert {scale[name] for name in added if name in scale} == {1.0}
    rates = {n: g["lr"] for g in build_optimizer(with_heads, config).param_groups for n in g["names"]}
    assert rates["model.visual.conv1.weight"] == pytest.approx(5e-4 * 0.7**3 * 0.01)


def test_a_stage_is_still_then_warms_up():
    assert [Stage(2, 4).factor(step) for step in range(8)] == [0, 0, 0.25, 0.5, 0.75, 1, 1, 1]
    assert [Stage(2, 0).factor(step) for step in range(4)] == [0, 0, 1, 1]
    config = OptimConfig(image_freeze_epochs=2, text_freeze_epochs=0.5, unfreeze_warmup_epochs=1)
    assert stages_of(config, 10, 100) == {"image": Stage(20, 10), "text": Stage(5, 10)}
    assert stages_of(OptimConfig(text_freeze_epochs=0.01), 10, 100) == {"text": Stage(1, 0)}
    assert stages_of(OptimConfig(), 10, 100) == {}
    with pytest.raises(FlagError, match="--image-freeze-epochs 2 and --unfreeze-warmup-epochs 1 cover the whole run"):
        stages_of(config, 10, 30)


@pytest.mark.parametrize("name", ["image_lr_mult", "image_freeze_epochs"])
def test_settings_of_a_backbone_that_is_locked_are_refused(name):
    holder = fresh()
    holder.model.lock_image_tower()
    with pytest.raises(FlagError, match="-image-.* needs a trained image backbone: remove it"):
        build_optimizer(holder, OptimConfig(**{name: 0.5}))


def test_a_run_of_which_nothing_would_move_is_refused():
    holder = fresh()
    model = holder.model
    for parameter in (*model.uncertainty_parameters(), model.logit_scale, model.logit_bias):
        parameter.requires_grad_(False)
    build_optimizer(holder, OptimConfig(image_freeze_epochs=1))
    with pytest.raises(FlagError, match="all parameters are frozen at first .image and text"):
        build_optimizer(holder, OptimConfig(image_freeze_epochs=1, text_freeze_epochs=1))


@pytest.mark.parametrize("foreach", [True, False])
def test_an_average_of_epochs_is_the_plain_mean(foreach):
    model = nn.Linear(3, 2)
    average, taken = EpochAverage(model, [4, 6, 8], foreach), []
    for step in range(1, 9):
        with torch.no_grad():
            model.weight.copy_(torch.randn(2, 3))
        average.update(model, step)
        if step in (4, 6, 8):
            taken.append(model.weight.detach().clone())
            torch.testing.assert_close(average.module.weight, torch.stack(taken).mean(0))
        if step == 4:
            assert torch.equal(average.module.weight, model.weight)
    assert average.taken(3) == [] and average.taken(7) == [4, 6]


def test_the_epochs_to_average_are_counted_back_from_the_end():
    model = nn.Linear(1, 1)
    steps = {
        (epochs, total): build_averages(model, OptimConfig(swa_epochs=epochs), 10, total, True)["swa"].steps
        for epochs, total in ((3, 50), (3, 45), (1, 7), (5, 41))
    }
    assert steps == {(3, 50): [30, 40, 50], (3, 45): [25, 35, 45], (1, 7): [7], (5, 41): [1, 11, 21, 31, 41]}
    with pytest.raises(FlagError, match="--swa-epochs 6 exceeds the run's 5.0 epochs: give at most 5"):
        build_averages(model, OptimConfig(swa_epochs=6), 10, 50, True)
    both = build_averages(model, OptimConfig(swa_epochs=1, ema_decay=0.9), 10, 50, True)
    assert list(both) == ["ema", "swa"] and build_averages(model, OptimConfig(), 10, 50, True) == {}


@pytest.mark.parametrize("name", ["adamw", "adamp", "muon", "lamb", "lion", "sgd", "adafactor"])
def test_optimisers_of_timm_take_a_step(name):
    holder, config = fresh(), OptimConfig(opt=name, lr=1e-2, wd=0.1)
    optimizer = build_optimizer(holder, config)
    before = [p.detach().clone() for p in holder.parameters()]
    set_learning_rate(optimizer, config, 1.0, {})
    for parameter in holder.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    assert all((p != b).any() and torch.isfinite(p).all() for p, b in zip(holder.parameters(), before))


def test_muon_leaves_tokens_and_positions_to_adamw(objective):
    groups = build_optimizer(objective, OptimConfig(opt="muon")).param_groups
    fallback = {name for group in groups if group.get("use_fallback") for name in group["names"]}
    assert "model.visual.positional_embedding" in fallback
    assert "model.visual.transformer.resblocks.0.mlp.c_fc.weight" not in fallback
