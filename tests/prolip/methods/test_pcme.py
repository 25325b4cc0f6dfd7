"""PCME: loss by exhaustive pairs, heads by hand, micro-batches, ranks against one process, from flags to evaluation."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from commands import evaluate_corpus
from method_checks import assert_is_formula, captioned, trained

import prolip
from drawings import UNSEEN
from prolip.gaussian import Gaussian
from prolip.methods import score_of
from prolip.methods.base import Context
from prolip.methods.pcme import PCMEConfig, PCMEObjective, PCMEScore

DOUBLE = torch.float64
SAMPLES = 3
SETTINGS = {
    "coco": {},
    "cub": {"match_start": 5.0, "uniformity_weight": 10.0, "kl_weight": 1e-3},
    "own captions": {"known_matches": False},
}


def make_objective(settings: dict | None = None, rank: int = 0, world_size: int = 1) -> PCMEObjective:
    torch.manual_seed(0)
    own = {"match_samples": SAMPLES} | (settings or {})
    variances = {"init_unc_bias": -4.0}  # wide enough that samples differ
    model = prolip.create_model("ProLIP-ViT-test", method_cfg={"name": "pcme", "config": own}, prolip_cfg=variances)
    return PCMEObjective(model.double(), PCMEConfig(**own), Context(rank=rank, world_size=world_size))


def make_batch(rows: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(2)
    noise = {f"noise_{side}": torch.randn(rows, SAMPLES, 32, generator=g) for side in ("image", "text")}
    return noise | captioned(rows)


def by_hand(objective: PCMEObjective, batch: dict) -> torch.Tensor:
    """Equations 1 to 3 over B x B x J x J x D, 1 - p formed as such."""
    config, model = objective.config, objective.model
    z = model.encode_image(batch["image"]), model.encode_text(batch["text"])
    v, t = (x.mean[:, None] + x.var.sqrt()[:, None] * batch[f"noise_{side}"] for x, side in zip(z, ("image", "text")))
    distance = (v[:, None, :, None] - t[None, :, None]).square().sum(-1).sqrt()
    p = torch.sigmoid(model.logit_bias - model.logit_scale.exp() * distance).mean((2, 3))
    rows = len(p)
    match = torch.eye(rows, dtype=torch.bool)
    if config.known_matches:
        for i, ids in enumerate(batch["caption_ids"].tolist()):
            match[i] |= torch.tensor([own in ids for own in batch["caption_id"].tolist()])
    loss = -torch.where(match, p.log(), (1 - p).log()).sum() / rows
    loss = loss + config.kl_weight * sum((x.mean**2 + x.var - x.log_var - 1).mean() / 2 for x in z)
    if config.uniformity_weight:
        points = torch.cat([v[:64, 0], t[:64, 0]])
        apart = (points[:, None] - points).square().sum(-1)[~torch.eye(len(points), dtype=torch.bool)]
        loss = loss + config.uniformity_weight * (-2 * apart).exp().mean().log()
    return loss


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_the_loss_and_its_gradients_are_those_of_exhaustive_pairs(settings):
    terms, _ = assert_is_formula(partial(make_objective, settings), make_batch(6), by_hand)
    start = settings.get("match_start", 15.0)
    assert terms["scale"].item() == pytest.approx(start) and terms["bias"].item() == pytest.approx(start)


def released_sums(objective: PCMEObjective, batch: dict, vib_beta: float, uniform_lambda: float, mean_kl: bool):
    """The loss of PCME's released code, or of PCME++'s rerun of it (mean_kl), written out: a and b are half of ours."""
    model = objective.model
    z = model.encode_image(batch["image"]), model.encode_text(batch["text"])
    a, b = model.logit_scale.exp() / 2, model.logit_bias / 2
    points = [x.mean[:, None] + x.var.sqrt()[:, None] * batch[f"noise_{side}"] for x, side in zip(z, ("image", "text"))]
    loss = torch.zeros((), dtype=DOUBLE)
    for v, t in (points, points[::-1]):
        for i in range(len(v)):
            for j in range(len(t)):
                x = b - a * (v[i][:, None] - t[j]).norm(dim=-1)
                sign = 1 if i == j else -1
                loss = loss - ((sign * x).exp() / (x.exp() + (-x).exp())).mean().log()
    kl = [-(1 + x.log_var - x.mean**2 - x.var) / 2 for x in z]
    loss = loss + vib_beta * sum(x.mean() if mean_kl else x.sum() for x in kl)
    if uniform_lambda:
        loss = loss + uniform_lambda * torch.pdist(torch.cat(points).flatten(0, 1)).pow(2).mul(-2).exp().mean().log()
    return loss


@pytest.mark.parametrize(
    ("vib_beta", "uniform_lambda", "mean_kl", "samples"),
    [(1e-5, 0.0, False, SAMPLES), (1e-3, 10.0, False, 1), (1e-4, 0.0, True, SAMPLES), (1.0, 0.0, False, SAMPLES)],
)
def test_the_loss_is_released_sums_over_2_b_with_the_weights_of_the_notes(vib_beta, uniform_lambda, mean_kl, samples):
    rows, dim = 6, 32
    kl = vib_beta / (2 * rows) if mean_kl else vib_beta * dim / 2
    own = {"match_samples": samples, "match_start": 5.0, "known_matches": False, "kl_weight": kl}
    own |= {"uniformity_weight": uniform_lambda / (2 * rows)}
    batch = make_batch(rows)
    batch |= {f"noise_{side}": batch[f"noise_{side}"][:, :samples] for side in ("image", "text")}

    def formula(objective: PCMEObjective, batch: dict) -> torch.Tensor:
        return released_sums(objective, batch, vib_beta, uniform_lambda, mean_kl) / (2 * rows)

    notes = assert_is_formula(partial(make_objective, own), batch, formula)[1].notes(rows)
    assert (f" {vib_beta:.3g} of PCME++'s rerun" if mean_kl else f"vib_beta {vib_beta:.3g} of PCME's") in notes[0]
    assert notes[1].startswith("--match-start 5: 2.5 of PCME's released code") and len(notes) == 2 + (samples == 1)
    assert not uniform_lambda or f"uniform_lambda {uniform_lambda:.3g} of" in notes[2]


def test_samples_change_with_step_seed_and_rank_alone():
    batch = {name: x for name, x in make_batch(4).items() if not name.startswith("noise")}
    objective, other = make_objective(), make_objective(rank=1, world_size=2)
    one, again, later = (objective.prepare(batch, step) for step in (0, 0, 1))
    assert torch.equal(one["noise_image"], again["noise_image"]) and one["noise_text"].shape == (4, SAMPLES, 32)
    for different in (later, other.prepare(batch, 0)):
        assert not torch.equal(one["noise_image"], different["noise_image"])
    assert not torch.equal(one["noise_image"], one["noise_text"])
    half = {name: x[1::2] for name, x in batch.items()}
    assert torch.equal(make_objective(rank=1, world_size=2).prepare(half, 0)["noise_text"], one["noise_text"][1::2])
    with pytest.raises(ValueError, match="known_matches needs caption_id and"):
        objective.prepare({name: batch[name] for name in ("image", "text")}, 0)


def test_heads_are_figure_3_by_hand():
    model = make_objective().model.eval()
    for tower, inputs in ((model.visual, make_batch(3)["image"]), (model.text, make_batch(3)["text"])):
        head, x = tower.head, tower._embeds(inputs)
        x = tower.transformer(x[0] if isinstance(x, tuple) else x)
        z = tower(inputs)
        for row in range(3):
            found = {}
            for part in ("mean", "log_var"):
                tokens = head.norms[part](x[row])
                whole, each = (tokens[0], tokens[2:]) if tower is model.visual else (tokens[-1], tokens[:8])
                attention = head.locals[part]
                weight = attention.score(torch.tanh(attention.hidden(each))).softmax(0)
                found[part] = head.globals[part](whole), attention.out((weight * each).sum(0))
            mean = head.norm(found["mean"][0] + found["mean"][1].sigmoid())
            torch.testing.assert_close(z.mean[row], mean / mean.norm())
            torch.testing.assert_close(z.log_var[row], sum(found["log_var"]))


def test_the_score_is_the_match_probability_with_what_was_trained_and_geometric_uncertainty():
    model = make_objective().model
    with torch.no_grad():
        model.logit_bias.fill_(7.0)
    score = score_of(model)
    assert isinstance(score, PCMEScore) and score.scale == pytest.approx(15.0) and score.bias == pytest.approx(7.0)
    z = Gaussian(torch.zeros(2, 3), torch.tensor([[0.0, 2.0, 4.0], [-2.0, -2.0, -2.0]]))
    torch.testing.assert_close(score.uncertainty(z), torch.tensor([math.e, math.exp(-1)]))
    again = PCMEScore.from_dict(score.to_dict())
    x = Gaussian(F.normalize(torch.randn(4, 8), dim=1), torch.full((4, 8), -3.0))
    assert torch.equal(again.pairwise(x, x), score.pairwise(x, x)) and score.pairwise(x, x).min() >= 0


def test_a_run_trains_saves_and_is_ranked_by_its_probability_and_by_other_measures(tmp_path, capsys):
    model = trained(tmp_path, "--method pcme --match-samples 4")
    said = capsys.readouterr().out
    assert "  note       --kl-weight 0.0001: vib_beta 6.25e-06 of PCME's" in said and "0.0032 of PCME++'s rerun" in said
    result = evaluate_corpus(["--model", model, "--data", UNSEEN])
    assert result.similarity == "pcme" and "trace/group" in result.metrics
    elk, same = (
        evaluate_corpus(["--model", model, "--data", UNSEEN, "--similarity", measure])
        for measure in ("elk", "match_probability")  # the latter with the trained a and b
    )
    assert same.similarity == "pcme" and same.metrics["names/i2t/mAP@R"] == result.metrics["names/i2t/mAP@R"]
    assert elk.similarity == "elk" and elk.metrics["names/i2t/median_rank"] >= 1
