"""SigLIP, CLIP, InfoNCE, triplets, the means of `likelihood`: by hand, accumulation, ranks against one process."""

from __future__ import annotations

from functools import partial
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from method_checks import assert_close, assert_is_formula, gradients

import prolip
from prolip.methods.accumulate import accumulate_backward
from prolip.methods.base import Context, Objective
from prolip.methods.deterministic import (
    CLIPObjective,
    InfoNCEConfig,
    InfoNCEObjective,
    PointsConfig,
    SigLIPObjective,
    TripletConfig,
    TripletObjective,
    VSEConfig,
    VSEObjective,
)
from prolip.methods.likelihood import LikelihoodConfig, LikelihoodObjective

METHODS = {
    "siglip": (PointsConfig, SigLIPObjective),
    "clip": (PointsConfig, CLIPObjective),
    "likelihood": (LikelihoodConfig, LikelihoodObjective),
    "likelihood-captions": (partial(LikelihoodConfig, captions_per_image=3), LikelihoodObjective),
    "likelihood-softmax-captions": (
        partial(LikelihoodConfig, captions_per_image=3, pair_loss="softmax"),
        LikelihoodObjective,
    ),
    "infonce": (InfoNCEConfig, InfoNCEObjective),
    "infonce-own": (partial(InfoNCEConfig, known_matches=False), InfoNCEObjective),
    "vse": (VSEConfig, VSEObjective),
    "vse-sum": (partial(VSEConfig, sum_steps=1), VSEObjective),
    "vse-own": (partial(VSEConfig, known_matches=False), VSEObjective),
    "triplet-sum": (partial(TripletConfig, margin=0.5), TripletObjective),
}
FROZEN = dict.fromkeys(("clip", "infonce", "infonce-own", "likelihood-softmax-captions"), {"model.logit_bias"})
TRIPLETS, KNOWING = ("vse", "vse-sum", "vse-own", "triplet-sum"), ("infonce", "vse", "vse-sum", "triplet-sum")
FROZEN |= dict.fromkeys(TRIPLETS, {"model.logit_bias", "model.logit_scale"})


def make_objective(name: str, rank: int = 0, world_size: int = 1) -> Objective:
    torch.manual_seed(0)
    model = prolip.create_model("ProLIP-ViT-test").double()
    config, objective = METHODS[name][:2]
    return objective(model, config(), Context(rank=rank, world_size=world_size))


def make_batch(name: str, rows: int) -> dict[str, torch.Tensor]:
    """The same images and texts for every method, with identities of captions for those that ask for them."""
    generator = torch.Generator().manual_seed(1)
    captions = (3,) if name.endswith("captions") else ()
    batch = {
        "image": torch.randn(rows, 3, 32, 32, generator=generator, dtype=torch.float64),
        "text": torch.randint(1, 1000, (rows, *captions, 12), generator=generator),
    }
    if name in KNOWING:
        batch["caption_id"], true = known_captions(rows)
        width = max(map(len, true))
        batch["caption_ids"] = torch.tensor([[*ids, *[-1] * (width - len(ids))] for ids in true])
    return batch


def known_captions(rows: int) -> tuple[torch.Tensor, list[list[int]]]:
    """Identities of the drawn captions and of all true ones of every image.

    Rows 0 and 3 are of one image with two captions; caption 1 is true of image 4, too, but not the other way round;
    what row 5 has drawn is not known.
    """
    own, true = list(range(rows)), [[row] for row in range(rows)]
    true[0] = true[3] = [0, 3, 99]
    true[4] = [4, 1]
    own[5] = -1
    return torch.tensor(own), true


def known_positives(same: torch.Tensor) -> torch.Tensor:
    own, true = known_captions(len(same))
    positive = same.clone()
    for i, ids in enumerate(true):
        for j, caption in enumerate(own.tolist()):
            positive[i, j] |= caption in ids
    assert positive.sum() == len(same) + 3 and not torch.equal(positive, positive.T)
    return positive


def step(objective: Objective, batch: dict, parts: int = 1) -> tuple[dict, dict]:
    return accumulate_backward(objective, objective.prepare(batch, step=0), parts), gradients(objective)


def loss_by_hand(name: str, model: torch.nn.Module, batch: dict) -> torch.Tensor:
    if batch["text"].ndim == 3:
        each = [loss_by_hand(name, model, batch | {"text": text}) for text in batch["text"].unbind(1)]
        return torch.stack(each).mean()
    image, text = model.encode_image(batch["image"]).mean, model.encode_text(batch["text"]).mean
    cosine, same = image @ text.T, torch.eye(len(image), dtype=torch.bool)
    positive = known_positives(same) if name in KNOWING else same
    if name in TRIPLETS:
        hinges = [(0.5 if name == "triplet-sum" else 0.2) + x - cosine.diagonal()[:, None] for x in (cosine, cosine.T)]
        each = [F.relu(x).masked_fill(known, 0.0) for x, known in zip(hinges, (positive, positive.T))]
        return sum(x.amax(1).mean() if name in ("vse", "vse-own") else x.sum() / len(x) for x in each)
    logits = model.logit_scale.exp() * cosine
    if name not in FROZEN:
        logits = logits + model.logit_bias
        return -torch.where(same, F.logsigmoid(logits), F.logsigmoid(-logits)).sum() / len(image)
    rows, columns = logits.log_softmax(1), logits.log_softmax(0)
    ways = [[rows[i, positive[i]].mean(), columns[positive[:, i], i].mean()] for i in range(len(image))]
    return -torch.stack([x for way in ways for x in way]).mean()


@pytest.mark.parametrize("name", METHODS)
def test_the_loss_and_its_gradients_are_those_of_the_definition(name):
    def formula(objective: Objective, batch: dict) -> torch.Tensor:
        return loss_by_hand(name, objective.model, batch)

    batch = make_objective(name).prepare(make_batch(name, 6), step=0)
    terms, objective = assert_is_formula(partial(make_objective, name), batch, formula, 1e-11)
    assert ("scale" in terms) == objective.model.logit_scale.requires_grad
    assert terms.get("scale", objective.model.logit_scale.exp()) == objective.model.logit_scale.exp()


@pytest.mark.parametrize("name", METHODS)
def test_exactly_the_uncertainty_parameters_are_frozen_and_all_others_learn(name):
    objective = make_objective(name)
    _, grads = step(objective, make_batch(name, 6))
    frozen = {n for n, p in objective.named_parameters() if not p.requires_grad}
    ours = {id(p) for p in objective.model.uncertainty_parameters()}
    assert frozen == {n for n, p in objective.named_parameters() if id(p) in ours} | FROZEN.get(name, set())
    assert {n for n, p in objective.named_parameters() if p.requires_grad} == set(grads)
    assert all(grad.abs().max() > 0 for grad in grads.values())


def test_infonce_without_further_matches_is_clip():
    want = step(make_objective("clip"), make_batch("clip", 6))
    alone = make_batch("infonce", 6) | {"caption_id": torch.arange(6), "caption_ids": torch.arange(6)[:, None]}
    for name, batch in (("infonce", alone), ("infonce-own", make_batch("clip", 6))):
        got = step(make_objective(name), batch)
        assert_close(got[0], want[0])
        assert_close(got[1], want[1])
    assert step(make_objective("infonce"), make_batch("infonce", 6))[0]["loss"] != want[0]["loss"]


def test_the_sum_of_all_negatives_gives_way_to_the_hardest():
    objective, batch = make_objective("vse-sum"), make_batch("vse", 6)
    early, late = (objective(objective.prepare(batch, step))["loss"] for step in (0, 1))
    assert torch.equal(late, make_objective("vse")(objective.prepare(batch, 1))["loss"]) and early > late


def test_the_runs_seed_and_the_sizes_reach_the_fit_of_variances(monkeypatch):
    """The model gets the fitted variances."""
    fit, adopt = Mock(return_value="fitted"), Mock()
    monkeypatch.setattr("prolip.methods.likelihood.fit_variances", fit)
    monkeypatch.setattr("prolip.methods.likelihood.adopt", adopt)
    sizes = {"bank": 40, "centres": 50, "novelty_centres": 60, "readings": 70}
    model = prolip.create_model("ProLIP-ViT-test", method_cfg={"name": "likelihood"})
    LikelihoodObjective(model, LikelihoodConfig(**sizes), Context(seed=7)).after_training(model, "pairs")
    fit.assert_called_once_with("pairs", vocabulary=model.vocab_size, seed=7, **sizes)
    adopt.assert_called_once_with(model, "fitted")
