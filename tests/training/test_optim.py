"""Schedules against their closed forms, parameter groups against timm's, optimisers by name."""
from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from timm.optim import param_groups_weight_decay
from torch import nn

import prolip
from training.config import OptimConfig
from training.optim import (
    build_optimizer,
    learning_rate_factor,
    parameter_groups,
    set_learning_rate,
)


@pytest.fixture(scope="module")
def objective() -> nn.Module:
    holder = nn.Module()
    holder.model = prolip.create_model("ProLIP-ViT-test")
    return holder


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


def test_const_stays():
    assert factors(20, warmup=5, lr_scheduler="const")[5:] == [1.0] * 15


def test_a_wsd_decay_longer_than_the_rest_starts_after_the_warm_up():
    got = factors(10, warmup=4, lr_scheduler="wsd", decay_fraction=1.0)
    assert got[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0]) and got[5] == pytest.approx(5 / 6)


def test_groups_split_weight_decay_as_timm_does(objective):
    groups = parameter_groups(objective, OptimConfig(wd=0.2))
    ours = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    exempt = objective.model.no_weight_decay()
    timms = param_groups_weight_decay(objective.model, weight_decay=0.2, no_weight_decay_list=exempt)
    assert ours == {id(p): group["weight_decay"] for group in timms for p in group["params"]}


def test_every_trainable_parameter_is_in_one_group_and_frozen_ones_in_none(objective):
    objective.model.logit_bias.requires_grad_(False)
    try:
        names = [name for group in parameter_groups(objective, OptimConfig(layer_decay=0.7)) for name in group["names"]]
    finally:
        objective.model.logit_bias.requires_grad_(True)
    assert sorted(names) == sorted(name for name, _ in objective.named_parameters() if name != "model.logit_bias")


def test_biases_norms_scalars_tokens_and_positions_have_no_decay(objective):
    decay = {n: g["weight_decay"] for g in parameter_groups(objective, OptimConfig()) for n in g["names"]}
    for name in (
        "logit_scale", "logit_bias", "visual.class_embedding", "visual.unc_embedding", "visual.positional_embedding",
        "visual.ln_post.weight", "text.positional_embedding", "text.unc_emb", "text.cls_emb",
        "text.transformer.resblocks.0.attn.in_proj_bias",
    ):  # fmt: skip
        assert decay[f"model.{name}"] == 0, name
    for name in ("visual.conv1.weight", "visual.proj", "text.transformer.resblocks.0.mlp.c_fc.weight"):
        assert decay[f"model.{name}"] == 0.2, name


def test_scale_and_bias_have_their_own_multiplier(objective):
    config = OptimConfig(lr=1e-3, logit_lr_mult=10.0)
    optimizer = build_optimizer(objective, config)
    assert set_learning_rate(optimizer, config, 0.5) == 5e-4
    rates = {name: group["lr"] for group in optimizer.param_groups for name in group["names"]}
    assert rates["model.logit_scale"] == rates["model.logit_bias"] == pytest.approx(5e-3)
    assert rates["model.visual.proj"] == pytest.approx(5e-4)


def test_layer_decay_falls_from_the_heads_to_the_embeddings(objective):
    scale = {n: g["lr_scale"] for g in parameter_groups(objective, OptimConfig(layer_decay=0.5)) for n in g["names"]}
    want = {
        "visual.proj": 1.0, "visual.ln_post.weight": 1.0, "visual.uncertainty_proj.weight": 1.0,
        "visual.transformer.resblocks.1.ln_1.weight": 0.5, "visual.transformer.resblocks.0.ln_1.weight": 0.25,
        "visual.conv1.weight": 0.125, "visual.ln_pre.weight": 0.125, "visual.positional_embedding": 0.125,
        "visual.class_embedding": 0.125, "visual.unc_embedding": 0.125,
        "text.text_projection.weight": 1.0, "text.ln_final.weight": 1.0,
        "text.text_uncertainty_projection.weight": 1.0, "text.transformer.resblocks.0.ln_1.weight": 0.5,
        "text.token_embedding.weight": 0.25, "text.positional_embedding": 0.25, "text.cls_emb": 0.25,
        "text.unc_emb": 0.25, "logit_scale": 1.0,
    }  # fmt: skip
    assert {name: scale[f"model.{name}"] for name in want} == want
    assert max(scale.values()) <= 1


class Plain(nn.Module):
    """An objective whose model has no tower."""

    def __init__(self, *layers: nn.Module):
        super().__init__()
        self.model: Any = nn.Sequential(*layers)
        self.model.no_weight_decay = self.model.logit_parameters = set
        self.model.depths = self.model.towers = dict


@pytest.mark.parametrize("name", ["adamw", "adamp", "muon", "lamb", "lion", "sgd", "adafactor"])
def test_optimisers_of_timm_take_a_step(name):
    objective = Plain(nn.Linear(4, 4), nn.Linear(4, 2))
    config = OptimConfig(opt=name, lr=1e-2, wd=0.1)
    optimizer = build_optimizer(objective, config)
    before = [p.detach().clone() for p in objective.parameters()]
    set_learning_rate(optimizer, config, 1.0)
    objective.model(torch.randn(3, 4)).square().sum().backward()
    optimizer.step()
    assert all((p != b).any() and torch.isfinite(p).all() for p, b in zip(objective.parameters(), before))


def test_adamw_gets_the_papers_settings():
    optimizer = build_optimizer(Plain(nn.Linear(2, 2)), OptimConfig())
    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimizer.defaults["betas"] == (0.9, 0.95) and optimizer.defaults["fused"]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.2, 0.0]


def test_muon_leaves_tokens_and_positions_to_adamw(objective):
    groups = build_optimizer(objective, OptimConfig(opt="muon")).param_groups
    fallback = {name for group in groups if group.get("use_fallback") for name in group["names"]}
    assert "model.visual.positional_embedding" in fallback
    assert "model.visual.transformer.resblocks.0.mlp.c_fc.weight" not in fallback


def test_a_model_without_trainable_parameters_is_refused():
    with pytest.raises(ValueError, match="every parameter is frozen"):
        build_optimizer(Plain(nn.Linear(2, 2)).requires_grad_(False), OptimConfig())
