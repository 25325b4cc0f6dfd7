"""Scores: their values are the measures', their factors and index vectors rank alike, and they come back as kept."""

from __future__ import annotations

import json
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from prolip import measures
from prolip.embedder import choose_score
from prolip.gaussian import Gaussian
from prolip.measures import MEASURES
from prolip.methods import METHODS, MODULES, all_methods, find_method, find_score, score_from_dict
from prolip.methods.base import Method
from prolip.methods.pcme import PCMEScore
from prolip.scores import SCORES, CSDScore, MatchProbabilityScore, MeanScore, Score, TrueMatchScore, index_vectors
from prolip.uncertainty.units import Units


def gaussians(rows: int, seed: int, dim: int = 7) -> Gaussian:
    generator = torch.Generator().manual_seed(seed)
    mean = F.normalize(torch.randn(rows, dim, generator=generator, dtype=torch.float64), dim=-1)
    return Gaussian(mean, torch.randn(rows, dim, generator=generator, dtype=torch.float64) - 3)


@pytest.mark.parametrize("name", [*SCORES, *MEASURES])
def test_scores_are_pickled_with_their_settings(name, pair):
    score = find_score(name)()
    again = pickle.loads(pickle.dumps(score))
    assert type(again) is type(score) and again.settings() == score.settings()
    torch.testing.assert_close(again.pairwise(*pair), score.pairwise(*pair), rtol=0, atol=0)


@pytest.mark.parametrize("name", [*SCORES, *MEASURES, "true_match"])
def test_scores_refuse_what_are_no_gaussians_of_one_width(name, pair):
    p, q = pair
    score = TrueMatchScore(0.5, 0.0, 10, 10) if name == "true_match" else find_score(name)()
    for bad in (Gaussian(q.mean, q.log_var[:, :5]), Gaussian(q.mean[:5], q.log_var), gaussians(9, 1, dim=5), q.mean):
        with pytest.raises((ValueError, TypeError), match="differ|expected a Gaussian"):
            score.pairwise(p, bad)


@pytest.fixture
def pair() -> tuple[Gaussian, Gaussian]:
    return gaussians(5, 0), gaussians(9, 1)


@pytest.mark.parametrize("name", ["csd", "mean", "wasserstein2"])
@pytest.mark.parametrize("distance", [False, True])
def test_an_index_in_one_more_dimension_finds_what_the_score_finds(pair, name, distance):
    queries, gallery = pair
    score = find_score(name)()
    q, g = (index_vectors(score, z, side, distance) for z, side in ((queries, False), (gallery, True)))
    found = -torch.cdist(q, g) if distance else q @ g.mT
    assert found.argsort(1, descending=True).equal(score.pairwise(queries, gallery).argsort(1, descending=True))
    if name == "csd":
        assert q.shape[1] == queries.mean.shape[1] + 1


@pytest.mark.parametrize("name", sorted({*MEASURES, *SCORES}))
def test_every_score_ranks_in_the_direction_of_its_measure_and_says_whether_sides_may_change(pair, name):
    queries, gallery = pair
    score = find_score(name)()
    values = score.pairwise(queries, gallery)
    assert values.shape == (5, 9) and values.isfinite().all()
    if name in MEASURES:
        torch.testing.assert_close(values, MEASURES[name].pairwise_scores(queries, gallery))
    if not score.sampled:
        same = torch.allclose(score.pairwise(gallery, queries).mT, values)
        assert same == score.symmetric


def test_the_logit_and_the_match_probability_are_those_that_were_trained(pair):
    score = CSDScore(scale=8.0, bias=-3.0)
    values = score.pairwise(*pair)
    torch.testing.assert_close(score.match_probability(values), torch.sigmoid(8 * values - 3))
    assert CSDScore(scale=8.0).match_probability(values) is None and CSDScore().match_probability(values) is None
    assert CSDScore().logit(values) is CSDScore().scaled(values) is None
    torch.testing.assert_close(CSDScore(scale=8.0).scaled(values), 8 * values)
    assert score.uncertainty(pair[0]).equal(pair[0].trace)


def test_sampled_match_probabilities_repeat_and_are_the_measures(pair):
    score = MatchProbabilityScore(scale=3.0, bias=2.0, samples=4, seed=5)
    want = measures.pairwise_match_probability(*pair, 3.0, 2.0, 4, torch.Generator().manual_seed(5))
    assert score.pairwise(*pair).equal(want) and score.pairwise(*pair).equal(want)
    assert score.match_probability(want) is want


class Learned(Score):
    """A small network on the pair of means."""

    name = "learned"

    def __init__(self, hidden: int = 4, scale: float | None = None, bias: float | None = None):
        super().__init__(scale, bias)
        self.net = nn.Sequential(nn.Linear(14, hidden), nn.Tanh(), nn.Linear(hidden, 1))

    def pairwise(self, queries, gallery):
        rows, columns = len(queries.mean), len(gallery.mean)
        both = [queries.mean.unsqueeze(1).expand(-1, columns, -1), gallery.mean.unsqueeze(0).expand(rows, -1, -1)]
        return self.net(torch.cat(both, -1).float()).squeeze(-1)

    def settings(self):
        return {"hidden": self.net[0].out_features, **super().settings()}


def test_scores_come_back_from_json_with_what_was_trained(pair, monkeypatch):
    monkeypatch.setitem(SCORES, "learned", Learned)
    for score in (Learned(6, 2.0, -1.0), CSDScore(3.0, -4.0), MeanScore(5.0), MatchProbabilityScore(2.0, 1.0, 3, 9)):
        again = score_from_dict(json.loads(json.dumps(score.to_dict())))
        assert type(again) is type(score) and again.settings() == score.settings()
        assert again.pairwise(*pair).equal(score.pairwise(*pair))


def test_the_table_of_methods_names_their_scores():
    assert [method.score.name for method in METHODS.values()] == [score for _, score in MODULES.values()]


@pytest.mark.parametrize(
    "find, name, near", [(find_score, "wasserstein", "wasserstein2"), (find_method, "prolipp", "prolip")]
)
def test_unknown_names_list_the_near_ones(find, name, near):
    with pytest.raises(ValueError, match=f"{name}' is unknown: did you mean {near}"):
        find(name)


def test_methods_of_ones_own_come_from_the_modules_that_are_named(monkeypatch, tmp_path):
    (tmp_path / "my_methods.py").write_text(
        "from prolip.methods import METHODS as OTHERS\nMETHODS = {'mine': OTHERS['siglip']}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PROLIP_METHODS", "my_methods")
    assert find_method("mine") is METHODS["siglip"] and list(all_methods()) == [*METHODS, "mine"]
    assert all(isinstance(method, Method) for method in all_methods().values())
    monkeypatch.setenv("PROLIP_METHODS", "no_such_module")
    with pytest.raises(ValueError, match="PROLIP_METHODS names 'no_such_module'"):
        all_methods()


def test_the_logit_of_a_true_match_adds_the_texts_trace_and_an_index_serves_it():
    score = TrueMatchScore(0.4, 0.1, images=50, texts=9, scale=20.0, bias=-9.0)
    image, text = gaussians(4, 0), gaussians(7, 1)
    cosine = image.mean @ text.mean.T / (image.mean.norm(dim=1, keepdim=True) * text.mean.norm(dim=1))
    torch.testing.assert_close(score.pairwise(image, text), cosine + 0.4 * text.trace)
    assert not score.symmetric and score.units == Units(0.1, 50, 9)
    again = score_from_dict(score.to_dict())
    wanted = score.pairwise(image, text)
    torch.testing.assert_close(again.pairwise(image, text), wanted)
    for distance in (False, True):
        for queries, of, gallery, side, order in (
            (text, "text", image, "image", wanted.T),
            (image, "image", text, "text", wanted),
        ):
            q = index_vectors(score, queries, False, distance, of)
            g = index_vectors(score, gallery, True, distance, side)
            found = -torch.cdist(q, g) if distance else q @ g.T
            assert torch.equal(found.argsort(1), order.argsort(1))


def test_a_score_of_the_kind_asked_for_is_the_models_own_with_what_it_learned():
    own = PCMEScore(15.0, 7.0)
    assert choose_score("match_probability", own, True, "model") is own
    assert choose_score("match_probability", CSDScore(3.0, 1.0), True, "model").scale == 1.0
    assert choose_score("csd", own, True, "model").name == "csd"
