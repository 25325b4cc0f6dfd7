"""Refusal by risk: what is guaranteed holds over many draws, and where nothing holds nothing is answered."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binom

from prolip.search.risk_control import Threshold, find_threshold, most_wrong, p_value


def draw(count: int, rng: np.random.Generator) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Confidences c uniform on (0, 1) of answers that are wrong with probability 0.6 (1 - c)^2, and one of noise.

    Of those with c >= t a share of 0.2 (1 - t)^2 is wrong.
    """
    sure = rng.random(count)
    return {"sure": sure, "noise": rng.random(count)}, (rng.random(count) < 0.6 * (1 - sure) ** 2).astype(float)


def true_risk(found) -> float:
    return 0.2 * (1 - max(0.0, found.least)) ** 2 if found.by == "sure" else 0.2


@pytest.mark.parametrize("count", [150, 1000])
@pytest.mark.parametrize("risk, delta", [(0.1, 0.1), (0.15, 0.3)])
def test_the_risk_is_kept_as_often_as_promised_and_much_is_answered(count, risk, delta):
    rng, draws = np.random.default_rng(0), 250
    found = [find_threshold(*draw(count, rng), risk, delta, seed) for seed in range(draws)]
    broken = np.mean([x.holds and true_risk(x) > risk for x in found])
    assert broken <= delta + 3 * np.sqrt(delta * (1 - delta) / draws)
    answered = [1 - max(0.0, x.least) for x in found if x.holds and x.by == "sure"]
    best = (risk / 0.2) ** 0.5
    if count == 1000:
        assert len(answered) > 0.95 * draws and np.mean(answered) > 0.7 * best


def test_more_wrong_answers_than_are_risked_are_never_promised_away():
    rng = np.random.default_rng(1)
    found = [find_threshold({"c": rng.random(300)}, rng.random(300) < 0.15, 0.1, 0.1, seed) for seed in range(300)]
    assert np.mean([x.holds for x in found]) <= 0.1 + 3 * np.sqrt(0.09 / 300)  # no confidence helps here


@pytest.mark.parametrize("seed", range(20))
def test_thresholds_are_tested_one_after_the_other_up_to_the_first_failure(seed):
    rng = np.random.default_rng(seed)
    score, risk, delta, answered = rng.random(80), 0.3, 0.1, 0
    wrong = rng.random(80) > 0.4 + 0.6 * score

    def p(queries, least):
        return p_value(wrong[queries][score[queries] >= least].sum(), (score[queries] >= least).sum(), risk)

    first, second = np.split(np.random.default_rng(seed).permutation(80), [20])
    for least in sorted([-np.inf, *np.sort(score[first])], key=lambda least: p(first, least)):
        if p(second, least) > delta:
            break
        answered = max(answered, (score[second] >= least).sum())
    assert find_threshold({"c": score}, wrong, risk, delta, seed).answered == answered


def test_new_answers_are_rarely_more_wrong_than_is_said():
    rng, beyond = np.random.default_rng(2), 0
    for seed in range(300):
        found = find_threshold(*draw(600, rng), 0.1, 0.1, seed)
        confidence, wrong = draw(200, rng)
        given = found.answers(confidence)
        beyond += wrong[given].sum() > most_wrong(int(given.sum()), 0.1, 0.1)
    assert beyond / 300 <= 0.2


def test_the_p_value_is_the_binomials_and_never_too_small():
    assert p_value(2, 20, 0.1) == pytest.approx(sum(binom.pmf(k, 20, 0.1) for k in range(3)))
    drawn = np.random.default_rng(3).binomial(40, 0.1, 20_000)
    for level in (0.01, 0.1, 0.3):
        assert (p_value(drawn, np.full(20_000, 40), 0.1) <= level).mean() <= level + 0.01
    assert p_value(0, 0, 0.1) == 1


@pytest.mark.parametrize("wrong", [np.ones(200), np.zeros(8), np.array([0.0, 1.0])])
def test_where_no_threshold_holds_all_is_refused_and_said(wrong):
    found = find_threshold({"c": np.linspace(0, 1, len(wrong))}, wrong, 0.1, 0.1)
    assert not found.holds and not found.answers({"c": np.array([0.5, np.inf])}).any()
    assert "all are refused" in str(found)


@pytest.mark.parametrize(
    "by, least, words, first",
    [
        (
            "log probability",
            math.log(0.75),
            "probability among all items is at least 75%",
            "probability among all items 25%",
        ),
        ("similarity", 0.75, "similarity is at least 0.75", "similarity 0.25"),
    ],
)
def test_a_confidence_is_printed_with_the_name_and_unit_of_its_threshold(by, least, words, first):
    threshold = Threshold(by, least, 0.2, 0.1, 95, 12, 274)
    counts = "of 274 test queries 95 are answered, 12 of them wrong"
    bound = "with 90% confidence at most 20% of new answers are wrong"
    assert str(threshold) == f"answers if the {words}; {counts}: {bound}"
    assert threshold.compared(math.log(0.25) if by == "log probability" else 0.25) == first


def test_the_table_of_few_queries_counts_the_fewest_that_are_answered():
    def answered(count: int, right: float, risk: float, sorts: bool) -> float:
        wrong, draws = np.arange(count) < round(count * (1 - right)), range(100)
        orders = (np.arange(count) if sorts else np.random.default_rng(seed).permutation(count) for seed in draws)
        return np.mean([find_threshold({"c": x}, wrong, risk, 0.1, seed).holds for seed, x in zip(draws, orders)])

    page = (Path(__file__).parents[3] / "docs/reference/search_index.md").read_text()
    rows = re.findall(r"^\| (0\.\d) \| (.+) \| (.+) \| (.+) \|$", page, re.M)
    assert [row[0] for row in rows] == ["0.1", "0.2", "0.4"]
    for risk, *cells in rows:
        for right, cell in zip((1.0, 0.9, 0.7), cells):
            for sorts, count in zip((True, False), cell.split(", ")):
                if count == "never":
                    assert answered(400, right, float(risk), sorts) < 0.2
                else:
                    assert answered(int(count) - 1, right, float(risk), sorts) < 0.9
                    assert answered(int(count), right, float(risk), sorts) >= 0.9


def test_one_query_calibrates_nothing():
    with pytest.raises(ValueError, match="needs two queries with known answers or more, not 1$"):
        find_threshold({"score": np.array([0.5])}, np.array([0.0]), 0.1)
