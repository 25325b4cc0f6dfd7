"""VACSR: its mixture by moments, its losses by hand, tiles, micro-batches and ranks against one process, its score."""

from __future__ import annotations

import json
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from commands import evaluate_corpus
from method_checks import assert_is_formula, captioned, trained
from torch import distributions

import prolip
from drawings import UNSEEN
from prolip.embedder import choose_score
from prolip.evaluation.metrics.streaming import PairScores
from prolip.gaussian import Gaussian
from prolip.methods import score_from_dict, score_of
from prolip.methods.base import Context
from prolip.methods.vacsr import (
    PairNetwork,
    SimilarityAdapter,
    VACSRConfig,
    VACSRObjective,
    VACSRScore,
    pair_terms,
    variance_loss,
)
from prolip.random import pair_noise

DOUBLE = torch.float64
SETTINGS = {
    "paper": {},
    "one Gaussian, own captions": {"mixture_components": 1, "known_matches": False},
    "the model's own means": {"pooled_heads": False},
    "one draw": {"component_noise": "shared"},
    "other weights": {"kl_weight": 0.3, "recon_weight": 2.0, "sigma_weight": 0.5},
}
SMALL = {"adapter_hidden": 12, "pair_tile": 3}


def make_objective(settings: dict | None = None, rank: int = 0, world_size: int = 1) -> VACSRObjective:
    torch.manual_seed(0)
    own = SMALL | (settings or {})
    model = prolip.create_model("ProLIP-ViT-test", method_cfg={"name": "vacsr", "config": own})
    return VACSRObjective(model.double(), VACSRConfig(**own), Context(seed=3, rank=rank, world_size=world_size))


def make_batch(rows: int) -> dict[str, torch.Tensor]:
    return captioned(rows) | {"pair_seed": 5}


def make_adapter(components: int = 2, dim: int = 6, hidden: int = 10, seed: int = 0) -> SimilarityAdapter:
    """One whose components differ."""
    torch.manual_seed(seed)
    adapter = SimilarityAdapter(dim, hidden, components).double()
    with torch.no_grad():
        adapter.mix.copy_(torch.linspace(-0.5, 0.5, components))
    return adapter


def sides(rows: int, columns: int, dim: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(4)
    v, t = (F.normalize(torch.randn(n, dim, generator=g, dtype=DOUBLE), dim=1) for n in (rows, columns))
    return v, t


def one_by_one(adapter: SimilarityAdapter, v, t, noise, temperature: float) -> torch.Tensor:
    """Pair by pair and component by component, divergences by torch.distributions: (3, n, m)."""
    alpha = adapter.mix.softmax(0)
    out = []
    for i in range(len(v)):
        for j in range(len(t)):
            h = torch.relu(adapter.encode(len(v[i]) * v[i] * t[j]))
            means, log_vars = (layer(h).chunk(adapter.components) for layer in (adapter.mean, adapter.log_var))
            weight = ((alpha.log() + noise[1][i, j].double()) / temperature).softmax(0)
            own = [distributions.Normal(m, (x / 2).exp()) for m, x in zip(means, log_vars)]
            unit = distributions.Normal(torch.zeros_like(means[0]), torch.ones_like(means[0]))
            normals = noise[0][i, j].double().view(-1, len(v[i])).expand(len(own), -1)
            z = sum(w * (p.mean + p.stddev * normal) for w, p, normal in zip(weight, own, normals))
            logit = adapter.out(torch.relu(adapter.decode(z))).squeeze()
            kl = sum(a * distributions.kl_divergence(p, unit).mean() for a, p in zip(alpha, own))
            out.append(torch.stack([logit, kl, sum(w * x.mean() for w, x in zip(weight, log_vars))]))
    return torch.stack(out, 1).view(3, len(v), len(t))


def by_hand(objective: VACSRObjective, batch: dict) -> torch.Tensor:
    """Equations 5 to 11 over all pairs, without tiles, in loops."""
    config, model = objective.config, objective.model
    v, t = model.encode_image(batch["image"]).mean, model.encode_text(batch["text"]).mean
    rows, place = len(v), torch.arange(len(v))
    normals = v.shape[1] * (1 if config.component_noise == "shared" else config.mixture_components)
    noise = pair_noise(batch["pair_seed"], place, place, normals, config.mixture_components)
    logit, kl, log_var = one_by_one(model.adapter, v, t, noise, config.gumbel_temperature)
    match = torch.eye(rows, dtype=torch.bool)
    if config.known_matches:
        for i, ids in enumerate(batch["caption_ids"].tolist()):
            match[i] |= torch.tensor([own in ids for own in batch["caption_id"].tolist()])
    recon = matches = negatives = 0.0
    for i in range(rows):
        similar = torch.sigmoid(logit[i])
        # -log sigmoid of what pairs are has the gradient of A.1; the value is that of 1/2 (y - similarity)^2
        likely = F.binary_cross_entropy_with_logits(logit[i], match[i].double(), reduction="sum")
        value = (match[i].double() - similar).square().sum() / 2
        recon = recon + (likely - likely.detach() + value.detach()) / rows
        s2 = torch.sigmoid(log_var[i])
        each = (1 - similar).detach() ** 2 / (2 * s2) + s2.sqrt().log()
        matches = matches + each[match[i]].mean() / rows
        others = [j for j in range(rows) if not match[i, j]]
        if others:
            negatives = negatives + each[max(others, key=lambda j: similar[j].item())] / rows
    return config.kl_weight * kl.mean() + config.recon_weight * (recon + config.sigma_weight * (matches + negatives))


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_the_loss_and_its_gradients_are_those_of_loops_over_all_pairs(settings):
    terms, _ = assert_is_formula(partial(make_objective, settings), make_batch(7), by_hand)
    assert 0 < terms["sigma"] < math.inf


def test_the_notes_give_the_papers_alpha_of_an_elbo_per_pair():
    """With the sum over pairs of alpha KL + 1/2 (y - s)^2 over B, as the reconstruction here is counted."""
    objective, batch, dim = make_objective({"kl_weight": 0.3}), make_batch(7), 32
    kl = objective(objective.prepare(batch, 0))["kl"].double() * 7 * 7 * dim  # the sum over pairs and dimensions
    for alpha, value in ((0.3 / 7, kl / dim), (0.3 / (7 * dim), kl)):
        assert f"{alpha:.3g} " in objective.notes(7)[0]
        torch.testing.assert_close(alpha * value / 7, 0.3 * kl / (7 * 7 * dim))


def test_the_noise_is_a_function_of_seed_and_step_whatever_came_before_and_the_same_on_all_ranks():
    batch = {name: x for name, x in make_batch(4).items() if name != "pair_seed"}
    objective, other = make_objective(), make_objective(rank=1, world_size=2)
    torch.randn(3)
    seeds = [objective.prepare(batch, step)["pair_seed"] for step in (0, 1, 0)]
    assert seeds[0] == seeds[2] != seeds[1] and seeds[1] == other.prepare(batch, 1)["pair_seed"]
    with pytest.raises(ValueError, match="known_matches needs caption_id and"):
        objective.prepare({name: batch[name] for name in ("image", "text")}, 0)


@pytest.mark.parametrize("normals", [4, 8])
def test_a_gumbel_softmax_near_0_draws_from_the_mixture_by_moments(normals):
    """Decoded by a sum, so that the logit is a coordinate of z: its mean and variance are those of the mixture."""
    adapter, (v, t) = make_adapter(dim=4), sides(1, 1, 4)
    with torch.no_grad():
        adapter.mean.bias[:4] += 2.0  # apart, so that which one is drawn shows
        adapter.decode.weight.zero_()
        adapter.decode.weight[0, 1], adapter.decode.bias[:] = 1.0, 50.0  # relu passes
        adapter.out.weight.zero_()
        adapter.out.weight[0, 0], adapter.out.bias[:] = 1.0, -50.0
        h = torch.relu(adapter.encode(4 * v * t))
        mean, log_var = (layer(h).view(2, 4)[:, 1] for layer in (adapter.mean, adapter.log_var))
        many = 300
        v, t = v.expand(many, -1), t.expand(many, -1)
        noise = pair_noise(0, torch.arange(many), torch.arange(many), normals, 2)
        drawn = adapter(v, t, *noise, 0.01)[0].flatten()
        alpha = adapter.mix.softmax(0)
    want = (alpha * mean).sum()
    variance = (alpha * (log_var.exp() + (mean - want) ** 2)).sum()
    assert (mean[0] - mean[1]).abs() > 1
    assert abs(drawn.mean() - want) < 4.5 * (variance / many**2).sqrt()
    assert abs(drawn.var() - variance) < 0.02 * variance


def test_the_variance_loss_is_least_where_the_normalised_variance_is_the_squared_error():
    error = torch.tensor([0.05, 0.4, 0.9], dtype=DOUBLE, requires_grad=True)
    best = (error.detach() ** 2 / (1 - error.detach() ** 2)).log().requires_grad_()
    loss = variance_loss(error, best)
    torch.testing.assert_close(loss, (0.5 + error.abs().log()).detach())
    by_error, by_log_var = torch.autograd.grad(loss.sum(), (error, best), allow_unused=True)
    assert by_error is None and by_log_var.abs().max() < 1e-12
    x = torch.randn(5, dtype=DOUBLE, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: variance_loss(torch.full_like(x, 0.3), x), x)
    assert variance_loss(torch.tensor(0.3), torch.tensor([-60.0, 60.0])).isfinite().all()


def test_an_image_of_which_all_texts_are_true_has_no_hardest_negative():
    logit, log_var = torch.randn(2, 2, 3, dtype=DOUBLE, requires_grad=True)
    positive = torch.tensor([[True, True, True], [True, False, False]])
    found = pair_terms(logit, log_var, positive)
    hardest = 1 + int(logit[1, 1:].argmax())
    want = variance_loss(1 - logit[1, hardest].sigmoid(), log_var[1, hardest]) / 2
    torch.testing.assert_close(found["sigma_negatives"], want)


def test_heads_pool_all_but_unc_and_give_unit_means():
    model = make_objective().model.eval()
    for tower, inputs in ((model.visual, make_batch(3)["image"]), (model.text, make_batch(3)["text"])):
        head, x = tower.head, tower._embeds(inputs)
        x = tower.transformer(x[0] if isinstance(x, tuple) else x)
        z = tower(inputs)
        for row in range(3):
            tokens = head.projection(head.norm(x[row]))
            tokens = (
                torch.cat([tokens[:1], tokens[2:]]) if tower is model.visual else torch.cat([tokens[-1:], tokens[:8]])
            )
            mean = head.pool(tokens.unsqueeze(0))[0]
            torch.testing.assert_close(z.mean[row], mean / mean.norm())


# --- the score -------------------------------------------------------------------------------------------------------
def make_score(dim: int = 6, seed: int = 0, shortlist: int = 0) -> VACSRScore:
    adapter = make_adapter(dim=dim, seed=seed)
    score = VACSRScore(dim, 10, shortlist)
    adapter.fold_into(score.network)
    return score.requires_grad_(False)


def points(x: torch.Tensor) -> Gaussian:
    return Gaussian(x, torch.full_like(x, -torch.inf))


@pytest.mark.parametrize("components", [1, 2, 3])
def test_the_folded_network_is_the_decoder_at_the_mean_of_the_mixture(components):
    adapter, (v, t) = make_adapter(components), sides(5, 7)
    network = PairNetwork(6, 10).double()
    adapter.fold_into(network)
    alpha = adapter.mix.softmax(0)
    with torch.no_grad():
        for i in range(5):
            h = torch.relu(adapter.encode(6 * v[i] * t))
            mean, log_var = (
                torch.einsum("k,nkd->nd", alpha, layer(h).view(7, components, 6))
                for layer in (adapter.mean, adapter.log_var)
            )
            logit = adapter.out(torch.relu(adapter.decode(mean))).squeeze(1)
            torch.testing.assert_close(network(v, t)[i], logit)
            one, spread = network.paired(v[i].expand(7, -1), t)
            torch.testing.assert_close(one, logit)
            torch.testing.assert_close(spread, log_var.mean(1))


def test_blocks_of_pairs_are_the_same_scores_whatever_their_size(monkeypatch):
    score, (v, t) = make_score(), sides(9, 11)
    whole = score.pairwise(points(v), points(t))
    for pairs in (1, 24, 100):
        monkeypatch.setattr(PairNetwork, "pairs_at_once", staticmethod(lambda v, pairs=pairs: pairs))
        torch.testing.assert_close(score.pairwise(points(v), points(t)), whole)
        i, j = torch.arange(9), torch.arange(9).flip(0)
        torch.testing.assert_close(score.paired(points(v[i]), points(t[j])), whole[i, j])
    with pytest.raises(ValueError, match="differ in their last dimension"):
        score.pairwise(points(v), points(t[:, :5]))


def test_the_score_is_read_from_a_model_and_kept_without_it():
    model = make_objective().model
    score = score_of(model)
    assert isinstance(score, VACSRScore) and not score.symmetric and score.factors(points(torch.eye(3))) is None
    again = score_from_dict(json.loads(json.dumps(score.to_dict())))
    v, t = (points(x.float()) for x in sides(4, 5, 32))
    values = score.pairwise(v, t)
    assert torch.equal(again.pairwise(v, t), values)
    some = t.select(slice(0, 4))
    assert torch.equal(again.pair_uncertainty(v, some), score.pair_uncertainty(v, some))
    torch.testing.assert_close(score.match_probability(values), values.sigmoid())
    assert torch.equal(score.logit(values), values) and torch.equal(score.scaled(values), values)


@pytest.mark.parametrize("size", [1, 3, 6, 50])
def test_a_shortlist_is_scored_by_the_adapter_and_the_rest_stands_behind_it_by_its_dot_product(size):
    exact, short, (v, t) = make_score(), make_score(shortlist=size), sides(8, 12)
    v, t = points(v), points(t)
    scores = PairScores.from_gaussians(v, t, short)
    network = exact.network
    weights = (network.last.weight @ network.second.weight @ network.first.weight).double()[0]
    full, near = exact.pairwise(v, t), torch.einsum("id,jd,d->ij", v.mean, t.mean, weights)
    half = scores.subset(torch.arange(8).flip(0), torch.arange(1, 12))
    for rows, all_of, first_by in (
        (scores.image_rows, full, near),
        (scores.text_rows, full.T, near.T),
        (half.image_rows, full.flip(0)[:, 1:], near.flip(0)[:, 1:]),
    ):
        found = rows(slice(2, 7)).double()
        for got, fine, coarse in zip(found, all_of[2:7], first_by[2:7]):
            kept = coarse.topk(min(size, len(coarse))).indices
            rest = [j for j in coarse.argsort(descending=True).tolist() if j not in kept.tolist()]
            torch.testing.assert_close(got[kept], fine[kept])
            assert got.argsort(descending=True).tolist()[len(kept) :] == rest
    assert short.match_probability(full) is None and short.scaled(full) is None


def test_settings_of_a_score_are_asked_for_by_name():
    own = make_score()
    score = choose_score("vacsr:shortlist=3", own, False, "m")
    assert score.shortlist == 3 and score.name == "vacsr:shortlist=3" and own.shortlist == 0
    v, t = (points(x) for x in sides(4, 5))
    assert torch.equal(score.pairwise(v, t), own.pairwise(v, t))
    assert score_from_dict(score.to_dict()).shortlist == 3
    for words in ("vacsr:shortlist=-1", "vacsr:dim=3", "vacsr:shortlist", "vacsr:"):
        with pytest.raises(ValueError, match="give vacsr:shortlist=NUMBER"):
            choose_score(words, own, False, "m")
    with pytest.raises(ValueError, match="'csd': it has no settings"):
        choose_score("csd:shortlist=3", own, False, "m")
    assert choose_score("match_probability:samples=3", own, True, "m").samples == 3


def test_a_run_trains_saves_and_is_ranked_by_its_adapter_whole_and_by_a_shortlist(tmp_path):
    model = trained(tmp_path, "--method vacsr --adapter-hidden 24")
    result = evaluate_corpus(["--model", model, "--data", UNSEEN])
    assert result.similarity == "vacsr" and not result.probabilistic
    assert 0 <= result.metrics["refusal/names_i2t/pair/aurc"] <= 1  # latent sigma of each drawing with its first name
    asked = evaluate_corpus(["--model", model, "--data", UNSEEN, "--similarity", "vacsr:shortlist=100000"])
    assert asked.similarity == "vacsr:shortlist=100000"
    same = ("names/i2t/R@1", "captions/t2i/mAP@R")
    assert [asked.metrics[key] for key in same] == [result.metrics[key] for key in same]
    few = evaluate_corpus(["--model", model, "--data", UNSEEN, "--similarity", "vacsr:shortlist=1"])
    first = few.score.coarse(few.image, few.text.select(few.name_texts)).argmax(1)  # the one that is scored again
    right = few.table.relation[few.table.rows("name")][first.numpy(), few.corpus.drawing_concepts]
    assert few.metrics["names/i2t/R@1"] == pytest.approx(right.mean())
