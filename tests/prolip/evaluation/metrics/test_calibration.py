"""Reliability and calibration error, against scikit-learn, direct sums and worked examples."""

import numpy as np
import pytest
import torch
from sklearn.calibration import calibration_curve
from sklearn.metrics import brier_score_loss

from prolip.evaluation.metrics import calibration
from prolip.evaluation.metrics import streaming as large
from prolip.evaluation.metrics.streaming import Relevance
from prolip.scores import CSDScore


def test_bins_are_sklearns_and_those_of_log_odds_a_unit_wide():
    bins, rng = 15, np.random.default_rng(0)
    probability = np.concatenate([rng.random(200) ** 3, np.linspace(0, 1, bins + 1)])  # and all edges
    outcome = rng.random(len(probability)) < probability**0.5
    got = calibration.reliability(torch.from_numpy(probability), torch.from_numpy(outcome), np.linspace(0, 1, bins + 1))
    frequency, mean = calibration_curve(outcome, probability, n_bins=bins)
    filled = got.counts > 0
    np.testing.assert_allclose(got.frequency[filled], frequency)
    np.testing.assert_allclose(got.probability[filled], mean)
    assert got.brier == pytest.approx(brier_score_loss(outcome, probability))
    assert got.ece == pytest.approx(np.abs(frequency - mean) @ got.counts[filled] / len(probability))
    inner = calibration.LOG_ODDS[1:-1]
    np.testing.assert_allclose(np.diff(np.log(inner / (1 - inner))), 1, rtol=1e-6)
    tiny = calibration.reliability([1e-12, 0.0, 1.0], [0, 0, 1], calibration.LOG_ODDS)
    assert tiny.counts[0] == 2 and tiny.counts[-1] == 1 and tiny.ece < 1e-11


def test_confidence_is_the_largest_softmax_probability():
    scores = torch.randn(9, 5, generator=torch.Generator().manual_seed(3))
    want = (20 * scores).softmax(1).amax(1)
    torch.testing.assert_close(calibration.confidence(20 * scores), want)
    assert calibration.confidence(torch.tensor([[1e6, 0.0]])).item() == 1.0
    doubt = torch.linspace(0, 1, 9)  # hedges between the classes
    torch.testing.assert_close(calibration.confidence(20 * scores, doubt), (1 - doubt) * want + doubt / 5)


@pytest.mark.parametrize(
    ("probability", "outcome", "message"),
    [
        ([0.5], [0, 1], "give one of each per prediction"),
        ([1.5], [1], "must be in"),
        ([float("nan")], [1], "must be in"),
        ([0.5], [2], "outcomes 0 or 1"),
        ([], [], "no prediction was added"),
    ],
)
def test_wrong_inputs_are_refused_with_what_is_wanted(probability, outcome, message):
    with pytest.raises(ValueError, match=message):
        calibration.reliability(probability, outcome)


def test_a_model_that_denies_every_match_is_told_by_the_ratio_to_the_base_rate():
    outcome = np.arange(10_000) % 5000 == 0
    got = calibration.reliability(np.full(10_000, 1e-7), outcome, calibration.LOG_ODDS).metrics("m")
    assert got["m/ece"] == pytest.approx(0.0002, rel=1e-3)  # which looks perfect
    assert got["m/base_rate"] == 0.0002 and got["m/probability_over_base_rate"] == pytest.approx(0.0005)
    none = calibration.reliability([0.5], [0]).metrics("m")
    assert np.isnan(none["m/probability_over_base_rate"]) and none["m/base_rate"] == 0


def doubted(seed=0, images=9, texts=12):
    """A score, its doubts, the shares of texts, scores of all pairs, and the probabilities by hand."""
    g = torch.Generator().manual_seed(seed)
    doubt, share = torch.rand(images, generator=g), torch.rand(texts, generator=g)
    scores = torch.randn(images, texts, generator=g)
    wanted = (1 - doubt[:, None]) / (1 + torch.exp(3 - 5 * scores)) + doubt[:, None] * share
    return calibration.Matching(CSDScore(5.0, -3.0), doubt, share), scores, wanted


def test_doubt_goes_with_the_image_and_the_share_with_the_text():
    matches, scores, wanted = doubted()
    image, text = torch.tensor([0, 3, 8]), torch.tensor([11, 0, 4])
    torch.testing.assert_close(matches.pairs(image, text, scores[image, text]), wanted[image, text])
    torch.testing.assert_close(matches.pairs(text[:2] - text[:2], slice(2), scores[0, :2]), wanted[0, :2])
    bare = calibration.Matching(matches.score)
    assert torch.equal(bare.pairs(slice(None), slice(None), scores), torch.sigmoid(5 * scores - 3))
    assert calibration.Matching(CSDScore(5.0)).pairs(slice(None), slice(None), scores) is None


def test_reliability_with_doubt_in_blocks_is_that_of_all_pairs(in_blocks):
    in_blocks(30)
    matches, scores, wanted = doubted()
    relevant = torch.rand(scores.shape, generator=torch.Generator().manual_seed(4)) < 0.3
    reader = calibration.MatchReliability(Relevance.from_dense(relevant), matches)
    for rows, block in large.row_blocks(scores.__getitem__, *scores.shape):
        reader.update(rows, block)
    want = calibration.reliability(wanted.flatten(), relevant.flatten(), calibration.LOG_ODDS)
    np.testing.assert_array_equal(reader.reliability().counts, want.counts)
    got = reader.reliability()
    np.testing.assert_allclose(got.probability, want.probability, rtol=1e-5)
    np.testing.assert_allclose(got.frequency, want.frequency)
    assert got.brier == pytest.approx(want.brier, rel=1e-5) and got.ece == pytest.approx(want.ece, rel=1e-5)
