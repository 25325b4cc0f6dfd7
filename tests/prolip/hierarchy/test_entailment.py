"""Scores of what is a kind of what against their formulas, AUCs against scikit-learn, and a model that knows."""

import math

import numpy as np
import pytest
import torch
from kinds_corpus import corpus_of
from scipy.sparse import csr_matrix
from sklearn.metrics import roc_auc_score

from prolip import measures
from prolip.corpora.emoji.kinds import relations
from prolip.embedder import ModelCard
from prolip.gaussian import Gaussian
from prolip.hierarchy import SCORES, items_of
from prolip.hierarchy.entailment import auc_of, compare, entailment_of, format_entailment, short
from prolip.hierarchy.scores import NATS, scores_of
from prolip.scores import CSDScore, TrueMatchScore

SCORE = TrueMatchScore(0.4, 0.25, 100, 50, 8.0, -4.0)
CARD = ModelCard("knowing", "", logit_scale=8.0, logit_bias=-4.0, score=SCORE.to_dict())
POINTS = ModelCard("points", "", probabilistic=False, logit_scale=8.0, logit_bias=-4.0)


def gaussians(rows, dim=6, seed=0):
    g = torch.Generator().manual_seed(seed)
    mean = torch.nn.functional.normalize(torch.randn(rows, dim, generator=g), dim=1)
    return Gaussian(mean, torch.randn(rows, dim, generator=g) - 3)


def test_seen_is_the_expectation_over_the_images_a_text_speaks_of():
    text, image, empty = gaussians(5), gaussians(7, seed=1), gaussians(1, seed=2)
    items = items_of(CARD, text, empty, image)
    for a in range(5):
        p = torch.softmax(8.0 * image.mean @ text.mean[a], 0)
        for b in range(5):
            wanted = sum(p[i] * 8.0 * (image.mean[i] @ text.mean[b]) for i in range(7))
            found = SCORES["seen"].pairs(items.select([a]), items.select([b]))
            assert found.item() == pytest.approx(wanted.item(), abs=1e-5)


def test_ours_refuses_the_narrower_and_does_not_reward_the_far_wider():
    text, empty = gaussians(2), gaussians(1, seed=2)
    items = items_of(CARD, text, empty, gaussians(4, seed=1))
    assert torch.allclose(items.nats, text.trace / 0.25)

    def order(eta):
        a, b = (items.select([i])._replace(nats=torch.tensor([x])) for i, x in enumerate((0.0, eta)))
        return (SCORES["seen_trace"].pairs(a, b) - SCORES["seen"].pairs(a, b)).item()

    for eta in (-2.0, -0.05, 0.0, 0.3, 4.0):
        assert order(eta) == pytest.approx(-math.log1p(math.exp(-eta / NATS)) if eta > -1 else eta / NATS, abs=1e-5)


def test_the_other_scores_are_the_measures_and_differences_that_they_name():
    text, image, empty = gaussians(5), gaussians(7, seed=1), gaussians(1, seed=2)
    items = items_of(CARD, text, empty, image)
    a, b = items.select([0, 1]), items.select(torch.tensor([2, 3]))
    p, q = text.select([0, 1]), text.select([2, 3])
    distance = (text.mean - empty.mean).norm(dim=1)
    wanted = {
        "cosine": measures.mean_cosine(p, q),
        "elk": -measures.elk(p, q),
        "log_inclusion": measures.log_inclusion(p, q),
        "inclusion_test": measures.inclusion_test(p, q),
        "trace": q.trace - p.trace,
        "root": distance[:2] - distance[2:4],
        "own": SCORE.pairwise(p, q).diagonal(),
    }
    for name, values in wanted.items():
        assert torch.allclose(SCORES[name].pairs(a, b), values, atol=1e-5), name


def test_points_have_the_scores_of_points_and_without_units_a_nat_is_two_over_the_scale():
    assert set(scores_of(POINTS)) == {"cosine", "root", "seen", "seen_root", "own"}
    assert set(scores_of(CARD)) == set(SCORES)
    tested = ModelCard("h", "", logit_scale=8.0, score={"name": "inclusion_test", "scale": None, "bias": None})
    assert "own" not in scores_of(tested)
    with pytest.raises(ValueError, match="no logit_scale"):
        items_of(ModelCard("x", ""), gaussians(2), gaussians(1))
    card = ModelCard("csd", "", logit_scale=8.0, logit_bias=-4.0, score=CSDScore(8.0, -4.0).to_dict())
    z = gaussians(3)
    assert torch.allclose(items_of(card, z, gaussians(1, seed=2)).nats, z.trace * 8 / 2)


def test_auc_is_scikit_learn_s_of_the_pairs_repeated_as_their_concepts_were_drawn():
    rng = np.random.default_rng(0)
    pairs, concepts = 40, 7
    positive, negative = rng.integers(0, 6, pairs) + 1.0, rng.integers(0, 6, pairs).astype(float)
    negative[::9] = np.nan
    own = rng.integers(0, concepts, pairs)
    shares = csr_matrix(np.eye(concepts)[own])
    statistic = auc_of(positive, negative, shares)
    assert statistic.sizes == {"concepts": concepts}
    weights = rng.integers(0, 3, (5, concepts)).astype(float)
    found = statistic.estimate({"concepts": weights})
    kept = ~np.isnan(negative)
    for drawn, value in zip(weights, found):
        often = np.tile(drawn[own][kept], 2)
        both, true = np.r_[positive[kept], negative[kept]], np.repeat([1, 0], kept.sum())
        wanted = roc_auc_score(true, both, sample_weight=often)
        assert value == pytest.approx(wanted)
    nothing = auc_of(positive, np.full(pairs, np.nan), shares)
    assert np.isnan(nothing.estimate({"concepts": weights})).all()


def knowing(corpus):
    """Drawings as their concepts, texts as the mean of theirs with log n as nats; "" as the mean of all."""
    table, count = corpus.caption_table(), len(corpus.concepts)
    image = Gaussian(torch.eye(count)[corpus.drawing_concepts], torch.full((len(corpus.drawings), count), -9.0))
    relation = torch.from_numpy(table.text_relation).float()
    mean = torch.nn.functional.normalize(relation, dim=1)
    trace = 0.25 * relation.sum(1).log().clamp(min=1e-3)
    text = Gaussian(mean, (trace / count).log()[:, None].expand(-1, count).clone())
    return image, text, Gaussian(torch.ones(1, count) / count**0.5, torch.zeros(1, count))


def judged(card=CARD, wrong_way=False):
    corpus = corpus_of()
    table = corpus.caption_table()
    image, text, empty = knowing(corpus)
    if wrong_way:
        text = Gaussian(text.mean, -text.log_var - 12)
    pairs = relations(corpus, table, 400)
    items = items_of(card, text, empty, image), items_of(card, image, empty)
    return entailment_of(card.name, scores_of(card), *items, pairs, 50), pairs


def test_a_model_that_knows_tells_every_kind_and_what_it_does_not_know_shows():
    result, pairs = judged()
    auc = {key: value.value for key, value in result.auc.items()}
    assert auc["texts", "seen_trace", "reversed"] > 0.99 and auc["texts", "seen_trace", "random"] > 0.95
    assert auc["texts", "seen_trace", "sibling"] > 0.95 and auc["texts", "trace", "reversed"] == 1.0
    assert auc["texts", "cosine", "reversed"] == 0.5, "similarity knows no direction"
    assert auc["images", "cosine", "random"] > 0.95
    for relation, found in pairs.items():
        for name in SCORES:
            kinds = [auc[relation, name, kind] for kind in found.negatives]
            assert auc[relation, name, "mean"] == pytest.approx(np.mean(kinds))
    interval = result.auc["texts", "log_inclusion", "mean"]
    assert interval.low <= interval.value <= interval.high and interval.low < interval.high
    assert result.by_level["texts", "trace", "name in group"] > 0.6


def test_models_are_compared_on_the_same_draws_and_printed():
    good, pairs = judged()
    bad, _ = judged(wrong_way=True)
    found = compare(good, bad, "texts", "trace", 50)
    best = good.best("texts")
    wanted = good.auc["texts", best, "mean"].value - bad.auc["texts", "trace", "mean"].value
    assert bad.auc["texts", "trace", "reversed"].value == 0.0 and found[:2] == (best, "trace")
    assert found[2].value == pytest.approx(wanted) and found[2].low > 0
    assert compare(good, good, "texts", best, 50)[2] == (0.0, 0.0, 0.0)
    text = format_entailment([good, bad], pairs, 50)
    assert "Is text A a kind of text B?" in text and "- knowing trace" not in text.split("\n")[0]
    assert text.count("seen_trace") >= 4 and "ours: B matches A's images and is more ambiguous" in text
    assert short("local-dir:runs/demo/model") == "demo" and short("ViT-B-32:openai") == "ViT-B-32:openai"
