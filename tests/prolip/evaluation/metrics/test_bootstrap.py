"""Intervals against draws of the queries themselves, against theory, and in pairs."""

from statistics import harmonic_mean

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, recall_score

from prolip.evaluation.metrics import bootstrap
from prolip.evaluation.metrics.bootstrap import Clusters, clustered, combine, drawn_as, intervals, mean_of, paired
from prolip.evaluation.metrics.ranking import Ranking
from prolip.evaluation.metrics.selective import auroc, risk_coverage
from prolip.evaluation.tasks.retrieval import statistics_of

RNG = np.random.default_rng(3)
N, C = 60, 4
SCORES = RNG.normal(size=(N, C)).round(1)  # rounded, so that some are equal
TARGETS = RNG.random((N, C)) < 0.3
LABELS = RNG.integers(0, C, N)
HITS = RNG.random(N) < 0.4 + 0.1 * LABELS
UNSURE = RNG.normal(size=N).round(1)
WRONG = np.where(RNG.random(N) < 0.1, np.nan, RNG.random(N) < 0.5)  # NaN: not asked
VALUES = np.where(RNG.random(N) < 0.2, np.nan, RNG.random(N))

BY_HAND = {
    "mean": (mean_of(VALUES, "images"), lambda rows: np.nanmean(VALUES[rows])),
    "classes": (bootstrap.class_mean_of(HITS, LABELS, "images"), lambda rows: recall(LABELS[rows], HITS[rows])),
    "mAP": (
        bootstrap.average_precision_of(SCORES, TARGETS, "images"),
        lambda rows: np.mean([average_precision_score(TARGETS[rows, c], SCORES[rows, c]) for c in range(C)]),
    ),
    "risk": (bootstrap.risk_area_of(UNSURE, WRONG, "images"), lambda rows: risk_coverage(*asked(rows)).aurc),
    "auroc": (bootstrap.auroc_of(UNSURE, WRONG, "images"), lambda rows: auroc(*asked(rows))),
}


def asked(rows):
    rows = rows[~np.isnan(WRONG[rows])]
    return UNSURE[rows], WRONG[rows] > 0


def recall(labels, right):
    """Compute recall with predictions that belong to no class if they are wrong."""
    return recall_score(labels, np.where(right, labels, -1), labels=np.unique(labels), average="macro")


@pytest.mark.parametrize("name", BY_HAND)
def test_an_estimate_by_weights_is_that_of_the_queries_drawn(name):
    statistic, by_hand = BY_HAND[name]
    drawn = RNG.integers(0, N, size=(20, N))
    weights = np.array([np.bincount(rows, minlength=N) for rows in drawn], dtype=float)
    want = [by_hand(rows) for rows in drawn]
    np.testing.assert_allclose(statistic.estimate({"images": weights}), want, rtol=1e-12)
    assert intervals({name: statistic}, 2)[name].value == pytest.approx(by_hand(np.arange(N)))


def test_the_interval_of_a_share_is_that_of_the_binomial():
    hits = torch.arange(1000) < 300
    value, low, high = intervals({"acc1": mean_of(hits, "images")}, draws=4000)["acc1"]
    width = 1.96 * (0.3 * 0.7 / 1000) ** 0.5
    half, other = (intervals({"": mean_of(hits, "images")}, **how)[""] for how in ({"level": 0.5}, {"seed": 1}))
    assert (half.high - half.low) / (high - low) == pytest.approx(0.6745 / 1.96, rel=0.1) and other.low != low
    assert value == 0.3 and (low, high) == (pytest.approx(0.3 - width, abs=2e-3), pytest.approx(0.3 + width, abs=2e-3))


def test_a_difference_is_taken_on_the_same_draws():
    easy = RNG.normal(size=400)
    first = {"m": mean_of(easy, "images")}
    second = {"m": mean_of(easy + 0.1, "images"), "other": mean_of(easy, "images")}
    found = paired(first, second)
    assert list(found) == ["m"]
    np.testing.assert_allclose(found["m"], 0.1)  # what is hard for both leaves no trace
    alone = intervals(first)["m"]
    assert alone.high - alone.low > 0.1
    with pytest.raises(ValueError, match="the same test set"):
        paired(first, {"m": mean_of(easy[1:], "images")})


def test_sums_may_be_over_several_sets_of_queries_and_blocks_draw_what_one_block_draws(monkeypatch):
    images, texts = mean_of(HITS, "images"), mean_of(VALUES[:50], "texts")
    apart = intervals({"a": images, "b": drawn_as("novel", images)})
    assert apart["a"][0] == apart["b"][0] and apart["a"][1:] != apart["b"][1:]  # sets do not share their draws
    both = combine([(0.5, images), (0.5, texts)])
    assert both.sizes == {"images": N, "texts": 50}
    whole = intervals({"both": both, "images": images})
    assert whole["both"].value == pytest.approx((HITS.mean() + np.nanmean(VALUES[:50])) / 2)
    monkeypatch.setattr("prolip.evaluation.metrics.bootstrap.ELEMENTS", 7 * N)
    assert intervals({"both": both, "images": images}) == whole


def test_what_has_no_value_has_no_interval_and_bad_settings_are_refused():
    nothing = mean_of(np.full(5, np.nan), "images")
    assert np.isnan(intervals({"m": nothing})["m"]).all()
    for options in ({"draws": 1}, {"level": 1.0}):
        with pytest.raises(ValueError, match="two or more"):
            intervals({"m": nothing}, **options)


def test_a_harmonic_mean_of_two_test_sets_is_that_of_every_draw():
    base, novel = np.array([1.0, 0, 1, 1]), np.array([0.0, 1, 0])
    h = bootstrap.harmonic_mean_of(*(drawn_as(x, mean_of(y, "images")) for x, y in (("base", base), ("novel", novel))))
    assert h.sizes == {"base/images": 4, "novel/images": 3}
    rng = np.random.default_rng(0)
    draws = {name: rng.multinomial(size, np.full(size, 1 / size), 40).astype(float) for name, size in h.sizes.items()}
    got = h.estimate(draws)
    for i in range(40):
        a, b = draws["base/images"][i] @ base / 4, draws["novel/images"][i] @ novel / 3
        assert got[i] == pytest.approx(harmonic_mean([a, b]) if a and b else 0)
    assert (got == 0).any() and (got > 0.7).any()
    texts = clustered(mean_of(np.arange(8.0), "texts"), {"texts": Clusters("images", np.repeat(np.arange(4), 2), 4)})
    apart = drawn_as("novel", texts)
    assert apart.sizes == {"novel/texts": 8, "novel/images": 4}  # clusters keep their names apart, too
    assert intervals({"h": bootstrap.harmonic_mean_of(drawn_as("base", texts), apart)})["h"].value == 3.5
    none = mean_of([0.0], "images")
    assert bootstrap.harmonic_mean_of(none, none).estimate({"images": np.ones((1, 1))}) == 0


def captioned(seed, images, captions=5, spread=1.5):
    """Statistics of a simulated set: an image and its captions share a difficulty, which moves their log odds."""
    rng = np.random.default_rng(seed)
    odds = 1 / (1 + np.exp(-spread * rng.normal(size=images)))
    owners = np.repeat(np.arange(images), captions)
    hits = rng.random(images) < odds, rng.random(len(owners)) < odds[owners]
    first = (torch.from_numpy(np.where(hit, 1, 20)) for hit in hits)
    i2t, t2i = (Ranking(x, torch.ones_like(x), 1.0 / x, 1.0 / x) for x in first)
    clusters = {"texts": Clusters("images", owners, images)}
    names = ("i2t/R@1", "t2i/R@1", "mean_recall@1")
    return {name: clustered(statistics_of(i2t, t2i)[name], clusters) for name in names}


def test_intervals_of_clustered_captions_hold_the_truth_as_often_as_they_say():
    """The true value is 1/2 by symmetry. Captions drawn one by one would cover 82% of t2i."""
    held = {}
    for seed in range(120):
        for name, found in intervals(captioned(seed, 80), 150, seed=seed).items():
            held[name] = held.get(name, 0) + (found.low <= 0.5 <= found.high) / 120
    assert all(0.89 <= share <= 0.99 for share in held.values()), held


def test_differences_are_refused_between_other_clusters_and_taken_on_the_clusters_draws():
    values, owners = RNG.normal(size=60), np.repeat(np.arange(20), 3)
    first = {"m": clustered(mean_of(values, "texts"), {"texts": Clusters("images", owners, 20)})}
    second = {"m": clustered(mean_of(values + values[owners * 3], "texts"), {"texts": Clusters("images", owners, 20)})}
    change = paired(first, second)["m"]
    alone = intervals({"m": mean_of(values[::3], "images")})["m"]
    np.testing.assert_allclose(change, alone)
    shuffled = {"m": clustered(mean_of(values, "texts"), {"texts": Clusters("images", owners[::-1], 20)})}
    for other in (shuffled, {"m": mean_of(values, "texts")}):
        with pytest.raises(ValueError, match="clusters"):
            paired(first, other)
