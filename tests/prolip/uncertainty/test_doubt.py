"""Doubt: its formula by hand, weights that were put in found again, and what it does to probabilities."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from fitted_models import likely_model, likely_pairs

from prolip.gaussian import Gaussian
from prolip.methods import score_from_dict
from prolip.uncertainty.doubt import (
    GALLERY,
    LOW,
    NUMBERS,
    ONE_IN,
    Cases,
    Doubt,
    Evidence,
    fit_doubt,
    hedge,
    pick_cases,
    with_doubt,
)
from prolip.uncertainty.fit import fit_variances
from prolip.uncertainty.units import Units

DOUBT = Doubt((-1.0, 0.8, -0.1), (-0.5, 0.6, -0.05, -0.2), (0.0, 2.0), (3.0, 9.0))


def evidence(images: int, seed: int = 0) -> Evidence:
    g = torch.Generator().manual_seed(seed)
    return Evidence(torch.rand(images, generator=g) * 9, 2 + torch.rand(images, generator=g) * 7)


def test_doubt_is_the_sigmoid_of_what_it_says_alone_and_in_a_gallery():
    few, many = evidence(GALLERY - 1), evidence(GALLERY, seed=1)
    for own, gallery in ((few, None), (few, few), (many, many)):
        mean = own.nearest.double().mean()
        for i, d in enumerate(DOUBT.of(own, gallery).tolist()):
            h, m = math.log(1 + own.novelty[i]), float(own.nearest[i])
            z = -0.5 + 0.6 * h - 0.05 * m - 0.2 * mean if own is many else -1 + 0.8 * h - 0.1 * m
            assert d == pytest.approx(1 / (1 + math.exp(-z)), rel=1e-5)


def test_it_says_where_it_is_further_out_than_what_it_was_fitted_to():
    x = Evidence(torch.tensor([1.0, math.exp(3) - 0.9, 1.0]), torch.tensor([3.0, 3.0, 1.9]))
    assert DOUBT.extrapolates(x).tolist() == [False, True, True]


def test_its_numbers_make_it_again_and_those_of_a_later_version_are_refused():
    assert len(DOUBT.numbers) == NUMBERS and Doubt.from_numbers(DOUBT.numbers) == DOUBT
    assert Doubt.from_numbers([0.0] * NUMBERS) is None
    with pytest.raises(ValueError, match="version 2, expected 1: fit it again"):
        Doubt.from_numbers([2.0, *DOUBT.numbers[1:]])


def test_weights_that_were_put_in_are_found_again():
    g = torch.Generator().manual_seed(0)
    columns = torch.rand(3000, 3, generator=g, dtype=torch.float64) * torch.tensor([3, 10, 8])
    true = (-2 + 1.5 * columns[:, 0] - 0.3 * columns[:, 1]).sigmoid()
    logit, share = 3 * torch.randn(3000, 40, generator=g, dtype=torch.float64) - 2, torch.tensor(0.02).double()
    match = (torch.rand(3000, 40, generator=g) < with_doubt(logit.sigmoid(), true.unsqueeze(1), share)).double()
    image = torch.arange(3000).repeat_interleave(40)
    ones = torch.ones(120_000, dtype=torch.float64)
    found = fit_doubt(Cases(logit.flatten(), share.expand(120_000), match.flatten(), ones, image, columns))
    assert found.alone == pytest.approx((-2, 1.5, -0.3), abs=0.15)
    assert found.among[:3] == pytest.approx((-2, 1.5, -0.3), abs=0.2) and abs(found.among[3]) < 0.05


def test_cases_are_all_that_match_or_are_likely_and_a_sample_that_stands_for_the_others():
    g = torch.Generator().manual_seed(0)
    logit, match = 4 * torch.randn(2, 50, 80, generator=g) - 6, torch.rand(50, 80, generator=g) < 0.02
    weight, share = torch.rand(80, generator=g) + 1, torch.rand(80, generator=g)
    kinds = [evidence(50), evidence(50, seed=1)]
    found = pick_cases(logit, share, match, kinds, weight)
    sure = found.weight < 2
    assert int((found.match * sure).sum()) == 2 * int(match.sum()) and (found.logit[~sure] <= LOW).all()
    assert (~sure).sum() == pytest.approx(float((~((logit > LOW) | match)).sum()) / ONE_IN, rel=0.2)
    rest = (weight.double() * ~((logit > LOW) | match)).sum()
    assert found.weight[~sure].sum() == pytest.approx(float(rest), rel=0.2)
    torch.testing.assert_close(found.columns[50:, :2], kinds[1].columns)
    torch.testing.assert_close(found.columns[:50, 2], kinds[0].nearest.double().mean().expand(50))
    row = 7
    kind, image = divmod(int(found.image[row]), 50)
    assert (logit[kind, image].double() == found.logit[row]).any()


def test_answers_keep_their_sum_and_a_doubt_of_one_leaves_nothing_of_them():
    log_p = torch.randn(4, 6, dtype=torch.float64).log_softmax(1)
    d = torch.tensor([0.0, 0.3, 0.9, 1.0])
    found = hedge(log_p, d).exp()
    torch.testing.assert_close(found.sum(1), torch.ones(4, dtype=torch.float64))
    torch.testing.assert_close(found[0], log_p[0].exp())
    torch.testing.assert_close(found[1], 0.7 * log_p[1].exp() + 0.05, rtol=1e-6, atol=0)
    torch.testing.assert_close(found[3], torch.full((6,), 1 / 6, dtype=torch.float64))
    cosine = torch.rand(4, 6)
    units = Units(0.1, 100, 200)
    torch.testing.assert_close(units.code_length(cosine, d), -hedge(-units.code_length(cosine), d))
    assert torch.equal(hedge(log_p, d).argmax(1)[:3], log_p.argmax(1)[:3])  # the order of answers stays


@pytest.fixture(scope="module")
def model():
    return likely_model()


def test_the_probability_of_a_match_is_the_models_and_that_of_a_stranger(model):
    pairs, fitted = model
    score, reader = fitted.score, fitted.reader
    doubts = score.doubts(reader.evidence(pairs.changed[2]))
    scores = score.pairwise(*gaussians(pairs, fitted, pairs.changed[2]))
    share = score.units.share(fitted.text.trace(pairs.text))
    found = score.match_probability(scores, doubts.unsqueeze(1), share)
    wanted = (1 - doubts.unsqueeze(1)) * torch.sigmoid(score.scale * scores + score.bias) + doubts.unsqueeze(1) * share
    torch.testing.assert_close(found, wanted)
    assert torch.equal(score.match_probability(scores), torch.sigmoid(score.scale * scores + score.bias))


def test_rounding_makes_no_probability_of_a_match_larger_than_one(model):
    doubts, scores = torch.linspace(0, 1, 1001), torch.full((1001,), 1e6, dtype=torch.float64)
    assert with_doubt(torch.ones_like(scores), doubts, torch.ones(1001)).max() > 1  # 1 - d is rounded to float32
    assert model[1].score.match_probability(scores, doubts, torch.ones(1001)).max() == 1


def gaussians(pairs, fitted, image):
    return (Gaussian(image, fitted.image.log_var(image)), Gaussian(pairs.text, fitted.text.log_var(pairs.text)))


def test_it_is_larger_where_the_model_is_wrong_and_makes_its_probabilities_truer(model):
    pairs, fitted = model
    score, reader, rows = fitted.score, fitted.reader, pairs.changed_of
    match = torch.zeros(len(pairs.image), len(pairs.text), dtype=torch.bool)
    match[pairs.image_of, pairs.text_of] = True
    share = score.units.share(fitted.text.trace(pairs.text))
    losses, means = [], []
    for image in (pairs.image[rows], *pairs.changed):
        own = reader.evidence(image)
        scores, d = score.pairwise(*gaussians(pairs, fitted, image)), score.doubts(own, own)
        p = [score.match_probability(scores), score.match_probability(scores, d.unsqueeze(1), share)]
        truth, loss = match[rows].float(), torch.nn.functional.binary_cross_entropy
        losses.append([loss(x.clamp(1e-9, 1 - 1e-9), truth) for x in p])
        means.append(float(d.mean()))
    assert means == sorted(means) and means[-1] > 0.3 and means[0] < 0.2
    before, after = torch.tensor(losses).mean(0)
    assert after < 0.9 * before


def test_a_score_keeps_its_doubt_and_one_without_is_as_before(model):
    score = model[1].score
    again = score_from_dict(score.to_dict())
    assert again.doubt == score.doubt and again.to_dict() == score.to_dict()
    old = {name: value for name, value in score.to_dict().items() if name != "doubt"}
    assert score_from_dict(old).doubts(evidence(3)) is None and "doubt" not in score_from_dict(old).to_dict()
    assert score.doubts(None) is None


@pytest.mark.parametrize("without", ["changed", "first", "readings"])
def test_no_doubt_is_fitted_without_changes_novelty_or_readings(without):
    lost = {"changed": {"changed": None, "changed_of": None}, "first": {"image_first": None}}
    pairs = replace(likely_pairs(), **lost.get(without, {}))
    fitted = fit_variances(pairs, bank=64, centres=64, novelty_centres=32, readings=0 if without == "readings" else 64)
    assert fitted.score.doubt is None and (fitted.readings is None) is (without == "readings")
    if without == "first":
        assert fitted.reader.evidence(pairs.image) is None
