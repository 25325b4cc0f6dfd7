"""ProLIP's objective: equation 6 by hand, masked views, accumulation, and two ranks against one process."""

from __future__ import annotations

import math
from dataclasses import MISSING, fields

import pytest
import torch
import torch.nn.functional as F
from method_checks import assert_close

import prolip
from prolip.methods import METHODS
from prolip.methods.base import RECALL, Context, Objective
from prolip.methods.prolip import ProLIPConfig, ProLIPObjective

START, END, PAD, MASK = 49406, 49407, 0, 49408
# Weights large enough for every term to show in the gradients.
HEAVY = {"alpha1": 0.3, "alpha2": 0.5, "beta": 0.2, "inclusion_eps": -1.0, "mask_fraction": 0.25}


def make_model(seed: int = 0, log_var_noise: float = 1.0) -> torch.nn.Module:
    """The tiny model in float64, log variances spread out, so that traces and inclusion weigh something."""
    torch.manual_seed(seed)
    model = prolip.create_model("ProLIP-ViT-test").double()
    with torch.no_grad():
        for parameter in model.uncertainty_parameters():
            parameter.add_(log_var_noise * 0.1 * torch.randn_like(parameter))
        model.visual.uncertainty_proj.bias.fill_(-3.0)
        model.text.text_uncertainty_projection.bias.fill_(-2.0)
    return model


def make_batch(rows: int, seed: int = 1) -> dict:
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(1000, 2000, (rows, 12), generator=generator)
    words = torch.randint(1, 10, (rows, 1), generator=generator)
    column = torch.arange(12)
    text = text.masked_fill(column > words, PAD).masked_fill(column == words + 1, END)
    text[:, 0] = START
    ids = torch.randint(0, 4, (rows, 2), generator=generator)
    return {
        "image": torch.randn(rows, 3, 32, 32, generator=generator, dtype=torch.float64),
        "text": text,
        "key": [f"sample{row}" for row in range(rows)],
        "caption_ids": torch.cat([ids, torch.full((rows, 1), -1)], 1),
        "caption_id": ids[:, 0].clone(),
    }


def make_objective(rank: int = 0, world_size: int = 1, **settings) -> ProLIPObjective:
    return ProLIPObjective(
        make_model(), ProLIPConfig(**HEAVY | settings), Context(seed=5, rank=rank, world_size=world_size)
    )


def log_inclusion(m1, v1, m2, v2, eps):
    return -0.5 * v1.log() - 0.5 * (v1 + 2 * v2).log() - math.exp(eps) * (m1 - m2) ** 2 / (v1 + 2 * v2)


def inclusion_by_hand(inner, outer, config: ProLIPConfig) -> torch.Tensor:
    (m1, v1), (m2, v2) = inner, outer
    h = log_inclusion(m1, v1, m2, v2, config.inclusion_eps) - log_inclusion(m2, v2, m1, v1, config.inclusion_eps)
    if config.inclusion_form == "printed":
        h = h + 0.5 * (v2.log() - v1.log())
    if config.inclusion_reduction == "pair":
        h = h.sum(-1)
    return -torch.log(1 / (1 + torch.exp(-config.inclusion_scale * h))).mean()


def ppcl_by_hand(image, text, scale, bias, positive) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for i, (mean_i, var_i) in enumerate(zip(*image)):
        for j, (mean_j, var_j) in enumerate(zip(*text)):
            logit = scale * (mean_i @ mean_j - (var_i.sum() + var_j.sum()) / 2) + bias
            total = total - F.logsigmoid(logit if positive(i, j) else -logit)
    return total / len(image[0])


def vib_by_hand(z) -> torch.Tensor:
    mean, var = z
    return (0.5 * (mean**2 + var - var.log() - 1)).mean()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"inclusion_form": "printed", "inclusion_scale": 2.0},
        {"inclusion_reduction": "pair", "inclusion_scale": 0.5, "inclusion_eps": -2.0},
        {"known_matches": True},
    ],
)
def test_the_loss_is_equation_6_term_by_term(settings):
    objective, batch = make_objective(**settings), make_batch(8)
    config, model = objective.config, objective.model
    batch = objective.prepare(batch, step=2)
    terms = objective(batch)
    with torch.no_grad():
        pairs = {
            "image": model.encode_image(batch["image"]),
            "text": model.encode_text(batch["text"]),
            "masked_image": model.encode_image(batch["image"][:2], keep=batch["keep"]),
            "masked_text": model.encode_text(batch["masked_text"]),
        }
        z = {name: (pair.mean, pair.log_var.exp()) for name, pair in pairs.items()}
        ids = batch["caption_ids"]

        def positive(i: int, j: int) -> bool:
            return i == j or (config.known_matches and batch["caption_id"][j].item() in ids[i].tolist())

        expected = {
            "ppcl": ppcl_by_hand(z["image"], z["text"], model.logit_scale.exp(), model.logit_bias, positive),
            "inclusion_image_text": inclusion_by_hand(z["image"], z["text"], config),
            "inclusion_image": inclusion_by_hand([x[:2] for x in z["image"]], z["masked_image"], config),
            "inclusion_text": inclusion_by_hand([x[:2] for x in z["text"]], z["masked_text"], config),
            RECALL: sum(((z["text"][0] @ x).argmax() == i).float() for i, x in enumerate(z["image"][0])) / 8,
            "vib_image": vib_by_hand(z["image"]),
            "vib_text": vib_by_hand(z["text"]),
            "scale": model.logit_scale.exp(),
            "bias": model.logit_bias,
            "trace_image": z["image"][1].sum(-1).mean(),
            "trace_text": z["text"][1].sum(-1).mean(),
            "trace_masked_image": z["masked_image"][1].sum(-1).mean(),
            "trace_masked_text": z["masked_text"][1].sum(-1).mean(),
        }
        expected["loss"] = (
            expected["ppcl"]
            + config.alpha1 * expected["inclusion_image_text"]
            + config.alpha2 * (expected["inclusion_image"] + expected["inclusion_text"])
            + config.beta * (expected["vib_image"] + expected["vib_text"])
        )
    assert_close(terms, expected)
    assert terms["loss"].requires_grad
    assert not any(terms[name].requires_grad for name in terms if name in ("scale", "bias") or "trace" in name)


def test_masked_views_are_of_the_leading_rows_and_copy_no_pixels():
    objective, batch = make_objective(mask_fraction=0.125), make_batch(16)
    names = set(batch)
    prepared = objective.prepare(batch, step=0)
    assert set(batch) == names and set(prepared) - names == {"masked_image", "keep", "masked_text"}
    assert prepared["masked_image"].data_ptr() == batch["image"].data_ptr() and len(prepared["masked_image"]) == 2
    assert prepared["keep"].shape == (2, 4)  # a quarter of 16 patches
    changed = prepared["masked_text"] != batch["text"][:2]
    assert changed.any(1).all() and (prepared["masked_text"][changed] == MASK).all()
    special = torch.isin(batch["text"][:2], torch.tensor([START, END, PAD]))
    assert not changed[special].any()


def test_masked_views_change_with_the_step_and_the_seed_only():
    batch = make_batch(16)

    def views(seed: int, step: int) -> list[list]:
        objective = ProLIPObjective(make_model(), ProLIPConfig(mask_fraction=0.5), Context(seed=seed))
        prepared = objective.prepare(batch, step)
        return [prepared["keep"].tolist(), prepared["masked_text"].tolist()]

    assert views(0, 3) == views(0, 3)
    for other in (views(0, 4), views(1, 3)):
        assert other[0] != views(0, 3)[0] and other[1] != views(0, 3)[1]


def test_without_alpha2_nothing_is_masked():
    objective, batch = make_objective(alpha2=0.0), make_batch(4)
    assert objective.prepare(batch, step=0) is batch
    terms = objective(batch)
    assert "inclusion_image" not in terms and "inclusion_text" not in terms and "vib_text" in terms


def test_inclusion_in_masked_views_moves_both_sides():
    objective = make_objective()
    batch = objective.prepare(make_batch(8), 0)
    reps = {name: rep.detach().requires_grad_() for name, rep in objective.embed(batch).items()}
    objective.terms(reps, batch)["inclusion_text"].backward()
    full, masked = reps["text_log_var"].grad, reps["masked_text_log_var"].grad
    assert (full[:2] > 0).all() and (full[2:] == 0).all()  # a step narrows the full texts
    assert (masked < 0).all()  # and widens the masked ones


def test_a_term_without_weight_brings_no_gradient_even_where_it_is_infinite():
    objective, batch = make_objective(alpha1=0.0, alpha2=0.0, beta=0.0), make_batch(4)
    reps = objective.embed(batch)
    reps["image_log_var"] = torch.full_like(reps["image_log_var"], -1e4).requires_grad_()
    reps["text_log_var"] = torch.full_like(reps["text_log_var"], float("-inf")).requires_grad_()
    terms = objective.terms(reps, batch)
    assert not terms["vib_text"].isfinite()
    terms["loss"].backward()
    assert terms["loss"].isfinite()
    assert all(parameter.grad.isfinite().all() for parameter in objective.parameters() if parameter.grad is not None)


def test_bfloat16_autocast_keeps_losses_and_representations_in_float32():
    objective, batch = ProLIPObjective(make_model().float(), ProLIPConfig()), make_batch(8)
    batch = objective.prepare(batch | {"image": batch["image"].float()}, 0)
    exact = objective(batch)
    with torch.autocast("cpu", torch.bfloat16):
        reps = objective.embed(batch)
        terms = objective.terms(reps, batch)
    assert {rep.dtype for rep in reps.values()} == {torch.float32} == {term.dtype for term in terms.values()}
    assert abs(terms["loss"] - exact["loss"]) < 0.05 * exact["loss"]


def test_settings_default_to_the_papers_recommendation():
    config = ProLIPConfig()
    assert (config.alpha1, config.alpha2, config.beta) == (1e-7, 1e-3, 1e-4)
    assert (config.inclusion_scale, config.inclusion_eps, config.inclusion_form) == (10.0, -10.0, "exact")
    assert (config.inclusion_reduction, config.mask_fraction, config.mask_ratio) == ("dim", 0.125, 0.75)
    assert config.known_matches is False


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_has_documented_keyword_settings_with_defaults(name):
    config, objective = METHODS[name][:2]
    assert issubclass(objective, Objective)
    for item in fields(config):
        assert item.metadata["help"] and item.default is not MISSING and item.kw_only
        assert item.default in item.metadata.get("choices", (item.default,))


def test_missing_caption_ids_are_named():
    batch = {name: value for name, value in make_batch(4).items() if name != "caption_ids"}
    with pytest.raises(ValueError, match="known_matches needs caption_id and caption_ids.*--no-known-matches"):
        make_objective(known_matches=True).prepare(batch, 0)


def test_a_vocabulary_without_a_mask_token_is_refused_unless_nothing_is_masked():
    model = make_model()
    model.mask_token_id = None
    with pytest.raises(ValueError, match=r"a \[MASK\] token.*mask_token_id.*alpha2=0"):
        ProLIPObjective(model, ProLIPConfig())
    ProLIPObjective(model, ProLIPConfig(alpha2=0.0))
