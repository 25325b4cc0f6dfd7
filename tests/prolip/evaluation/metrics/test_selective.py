"""Risk-coverage curves and their areas, against loops, permutations, scikit-learn and worked examples."""

import math
from itertools import permutations

import numpy as np
import pytest
import torch
from scipy.stats import rankdata, spearmanr
from sklearn.metrics import roc_auc_score

from prolip.evaluation.metrics import selective
from prolip.gaussian import Gaussian


def test_four_samples_by_hand_and_equal_uncertainties_by_all_their_orders():
    # From certain to uncertain the errors are 0, 1, 0, 1: the risks are 0, 1/2, 1/3, 2/4.
    curve = selective.risk_coverage(np.array([0.3, 0.1, 0.4, 0.2]), np.array([0, 0, 1, 1]))
    np.testing.assert_allclose(curve.coverage, [0.25, 0.5, 0.75, 1])
    np.testing.assert_allclose(curve.risk, [0, 1 / 2, 1 / 3, 1 / 2])
    np.testing.assert_allclose(curve.oracle, [0, 0, 1 / 3, 1 / 2])
    assert curve.aurc == pytest.approx(1 / 3) and curve.oracle.mean() == pytest.approx(5 / 24)
    assert curve.error == 0.5
    assert curve.gain == pytest.approx((1 / 2 - 1 / 3) / (1 / 2 - 5 / 24))
    assert curve.at(0.75) == pytest.approx(1 / 3) and curve.at(0.5) == 0.5 and curve.at(0.01) == 0
    five = selective.risk_coverage(np.arange(5.0), np.array([0.0, 0, 1, 1, 1]))  # half of five keeps three
    assert five.at(0.5) == pytest.approx(1 / 3) and five.at(0.8) == 0.5
    uncertainty, error = np.array([1.0, 2, 2, 2, 3, 3]), np.array([0.0, 1, 0, 0.5, 1, 0])
    curves = []
    for order in permutations(range(6)):
        if all(uncertainty[a] <= uncertainty[b] for a, b in zip(order, order[1:])):
            curves.append(np.cumsum(error[list(order)]) / np.arange(1, 7))
    assert len(curves) == 12
    np.testing.assert_allclose(selective.risk_coverage(uncertainty, error).risk, np.mean(curves, axis=0))


def test_auroc_is_sklearns_and_knows_infinite_uncertainty():
    rng = np.random.default_rng(2)
    uncertainty, wrong = rng.integers(0, 8, 60).astype(float), rng.random(60) < 0.4
    assert selective.auroc(uncertainty, wrong) == pytest.approx(roc_auc_score(wrong, uncertainty))
    assert selective.auroc(np.array([np.inf, 1, -np.inf]), np.array([True, False, False])) == 1.0
    assert math.isnan(selective.auroc(uncertainty, np.ones(60)))


def clouds(count=30, dim=4, seed=0):
    """Samples of three classes, more uncertain the farther they lie from their own class's centre."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 3
    noise = torch.rand(count, 1, generator=g) * 1.5
    mean = torch.eye(3, dim)[labels] + noise * torch.randn(count, dim, generator=g)
    mean = torch.nn.functional.normalize(mean, dim=-1)
    return Gaussian(mean, noise.log().expand(-1, dim).contiguous()), labels


@pytest.mark.parametrize("elements", [100, 10**6])
def test_the_nearest_other_sample_decides_right_and_wrong(in_blocks, elements):
    in_blocks(elements)
    z, labels = clouds()
    cosines = (z.mean @ z.mean.mT).tolist()
    expected = []
    for i, row in enumerate(cosines):
        j = max((j for j in range(len(row)) if j != i), key=lambda j: row[j])
        expected.append(bool(labels[j] != labels[i]))
    got = selective.recall_auroc(z, labels, z.trace)
    assert got["1-NN"] == pytest.approx(1 - np.mean(expected)) and 0 < got["1-NN"] < 1
    assert got["R-AUROC"] == pytest.approx(roc_auc_score(expected, z.trace))
    names = np.array(["cat", "ant", "bee"])[labels]
    assert selective.recall_auroc(z, names, z.trace) == got
    assert got["R-AUROC"] > 0.6  # noise was given away by the trace


def test_the_table_holds_every_figure():
    rng = np.random.default_rng(3)
    uncertainty, wrong = rng.random(50), rng.random(50) < 0.5
    got = selective.selective_metrics(wrong, {"image": uncertainty, "nothing": np.zeros(50)}, "refusal/i2t")
    curve = selective.risk_coverage(uncertainty, wrong)
    assert got["refusal/i2t/image/aurc"] == curve.aurc
    assert got["refusal/i2t/image/aurc_excess"] == curve.aurc - got["refusal/i2t/image/aurc_oracle"] > 0
    assert got["refusal/i2t/image/error@80"] == pytest.approx(wrong[uncertainty.argsort()[:40]].mean())
    tenths = [got[f"refusal/i2t/image/error_decile{i}"] for i in range(1, 11)]
    assert tenths[9] == pytest.approx(wrong[uncertainty.argsort()[45:]].mean())
    assert np.mean(tenths) == pytest.approx(wrong.mean())
    assert got["refusal/i2t/image/spearman"] == pytest.approx(spearmanr(uncertainty, wrong).statistic)
    assert got["refusal/i2t/image/auroc"] == pytest.approx(roc_auc_score(wrong, uncertainty))
    assert got["refusal/i2t/nothing/aurc_gain"] == pytest.approx(0)
    assert got["refusal/i2t/nothing/auroc"] == 0.5 and math.isnan(got["refusal/i2t/nothing/spearman"])
    graded = selective.selective_metrics(rng.random(50), {"image": uncertainty})
    assert "refusal/image/aurc" in graded and "refusal/image/auroc" not in graded


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: selective.risk_coverage(np.zeros(3), np.zeros(2)), "give one of each per sample"),
        (lambda: selective.risk_coverage(np.zeros(0), np.zeros(0)), "at least one sample"),
        (lambda: selective.risk_coverage(np.zeros(2), np.array([1, np.nan])), "0 uncertainties and 1 errors are NaN"),
        (lambda: selective.recall_auroc(clouds(1)[0], [0], [0]), "give two samples or more"),
        (lambda: selective.recall_auroc(clouds(3)[0], [0], [0]), "one class label each"),
    ],
)
def test_wrong_inputs_are_refused_with_what_is_wanted(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_deciles_are_equal_groups_of_rising_trace_the_expectation_over_orders_of_equal_ones():
    trace = np.random.default_rng(0).permutation(100).astype(float)
    got = selective.by_decile(trace, 1 - trace / 100)
    np.testing.assert_allclose(got.trace, np.arange(10) * 10 + 4.5)
    np.testing.assert_allclose(got.value, 1 - got.trace / 100)
    assert got.spearman_bins == pytest.approx(-1) and got.spearman_queries == pytest.approx(-1)
    few = selective.by_decile(np.array([1.0, 1.0, 1.0]), np.array([0.0, 1.0, 0.0]))
    assert few.value.tolist() == [1 / 3] * 3 and math.isnan(few.spearman_bins)
    trace, value = np.array([1.0, 1, 2, 2, 2, 2, 3]), np.array([0.0, 1, 0.3, 0.9, 0, 1, 0.5])
    orders = [np.array([*a, *(2 + np.array(b)), 6]) for a in permutations(range(2)) for b in permutations(range(4))]
    want = np.mean([[value[group].mean() for group in np.array_split(order, 3)] for order in orders], axis=0)
    got = selective.by_decile(trace, value, 3)
    np.testing.assert_allclose(got.value, want, rtol=1e-12)
    np.testing.assert_allclose(got.trace, [4 / 3, 2, 2.5])
    rows = np.random.default_rng(0).permutation(7)
    for found, again in zip(got, selective.by_decile(trace[rows], value[rows], 3)):
        np.testing.assert_allclose(again, found, rtol=1e-12)
    errors = np.sort(np.random.default_rng(1).random(97))
    flat = selective.by_decile(np.full(97, 0.1), errors)
    assert len(set(flat.value)) == len(set(flat.trace)) == 1 and flat.value[0] == pytest.approx(errors.mean())
    assert math.isnan(flat.spearman_bins)  # no rank correlation of rounding


def test_spread_is_the_width_of_nine_tenths_over_the_median():
    assert selective.spread(np.arange(101.0) + 50) == pytest.approx(0.9)
    assert selective.spread(np.full(9, 0.7)) == 0 and math.isnan(selective.spread(np.zeros(3)))


def test_partial_spearman_is_the_correlation_of_what_the_third_leaves_of_both_ranks():
    draw = np.random.default_rng(0)
    given = draw.normal(size=200)
    x, y = given + draw.normal(size=200), given + draw.normal(size=200)
    ranks = [rankdata(v) for v in (x, y, given)]
    left = [r - np.polyval(np.polyfit(ranks[2], r, 1), ranks[2]) for r in ranks[:2]]
    assert selective.partial_spearman(x, y, given) == pytest.approx(np.corrcoef(*left)[0, 1])
    assert selective.spearman(x, y) > 0.3 > abs(selective.partial_spearman(x, y, given))
    assert math.isnan(selective.partial_spearman(given, y, given))
