"""Refusal by risk: a threshold that refuses enough queries to bound the share of wrong answers.

Guarantee: with probability 1 - delta over the calibration queries, P(wrong | answered) <= risk for a new query, or
every query is refused, if these and the new queries are independent draws from one distribution.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from scipy.stats import binom

from prolip.evaluation.metrics import Array, as_array
from prolip.evaluation.metrics.selective import risk_coverage

CHOOSING, TRIED = 0.25, 100  # share of the queries used to choose; most thresholds tested
#: Name of a confidence that is a logarithm -> name of its exponential, which is printed.
PRINTED = {
    "share": "share among the first 20",
    "log probability": "probability among all items",
    "familiarity": "probability that the query is familiar by its novelty",
    "joint log probability": "probability that the query is familiar and the answer right",
}


class Threshold(NamedTuple):
    """Answer if the confidence called `by` is at least `least`; inf: no threshold is guaranteed, refuse all."""

    by: str
    least: float
    risk: float  # guaranteed
    delta: float
    answered: int  # test queries
    wrong: int
    tested: int

    @property
    def holds(self) -> bool:
        return self.least < np.inf

    def answers(self, confidences: Mapping[str, Array]) -> np.ndarray:
        """Return which queries to answer, (N,) bool. ValueError if they lack the confidence `by`."""
        if self.by not in confidences:
            what = f"the threshold is for {self.by}, but these queries have only {', '.join(confidences)}"
            raise ValueError(f"{what}. Calibrate on queries of the same kind, texts or images")
        sure = as_array(confidences[self.by], np.float64)
        return sure >= self.least if self.holds else np.zeros(len(sure), dtype=bool)

    def compared(self, confidence: float) -> str:
        """Return the printed name and number of a confidence, a percentage for a logarithm."""
        name = PRINTED.get(self.by)
        return f"{self.by} {confidence:.4g}" if name is None else f"{name} {100 * np.exp(confidence):.4g}%"

    def __str__(self) -> str:
        sure, remedy = (
            f"with {1 - self.delta:.0%} confidence",
            "Give more queries, a larger --risk, or a better model",
        )
        if not self.holds:
            kept = f"no threshold limits the wrong answers to {self.risk:.0%} {sure} on {self.tested} queries"
            return f"{kept}, so all are refused. {remedy}"
        name, _, least = self.compared(self.least).rpartition(" ")
        counts = f"of {self.tested} test queries {self.answered} are answered, {self.wrong} of them wrong"
        bound = f"at most {self.risk:.0%} of new answers are wrong"
        return f"answers if the {name} is at least {least}; {counts}: {sure} {bound}"


def p_value(wrong: int | np.ndarray, answered: int | np.ndarray, risk: float) -> np.ndarray:
    """Return P(Bin(answered, risk) <= wrong): at most u with probability u if at least a share `risk` is wrong."""
    return np.asarray(binom.cdf(wrong, answered, risk))


def most_wrong(answers: int, risk: float, delta: float) -> int:
    """Return the most wrong answers among new ones, with probability 1 - delta, if their risk holds."""
    return int(binom.ppf(1 - delta, answers, risk))


def find_threshold(
    confidences: Mapping[str, Array], wrong: Array, risk: float, delta: float = 0.1, seed: int = 0
) -> Threshold:
    """Find the threshold with the most answers that keeps the risk, with the guarantee above. confidences: name
    -> (N,), larger is more certain; wrong: (N,) 0 or 1. ValueError for too few queries, NaN, and risks outside (0, 1).

    Split fixed-sequence testing of Learn then Test (Angelopoulos et al. 2021, arXiv 2110.01052): a random part of the
    queries chooses the confidence, the thresholds and their order, the safest first. The rest test, in this order, that
    more than `risk` of the answers above a threshold are wrong, by the exact binomial p-value, until the first p-value
    above `delta`.
    """
    scores = {name: as_array(x, np.float64) for name, x in confidences.items()}
    error = as_array(wrong, np.float64)
    for name, value in (("risk", risk), ("delta", delta)):
        if not 0 < value < 1:
            raise ValueError(f"{name} {value}: give a share between 0 and 1, such as 0.1")
    if len(error) < 2:
        raise ValueError(f"a threshold needs two queries with known answers or more, not {len(error)}")
    if not scores or any(x.shape != error.shape for x in scores.values()):
        raise ValueError(f"confidences of {len(error)} queries: give one of each kind per query")
    if not np.isin(error, (0, 1)).all() or any(np.isnan(x).any() for x in scores.values()):
        raise ValueError("an answer is not 0 or 1, or a confidence is NaN. Remove these queries")
    order = np.random.default_rng(seed).permutation(len(error))
    first, second = np.split(order, [max(1, round(CHOOSING * len(error)))])
    areas = {name: risk_coverage(-x[first], error[first]).aurc for name, x in scores.items()}
    by = min(areas, key=lambda name: areas[name])
    score, known = scores[by], np.unique(scores[by][first])
    spread = known[np.linspace(0, len(known) - 1, min(len(known), TRIED)).round().astype(int)]
    tried = np.unique(np.append(spread, -np.inf))
    tried = tried[np.argsort(p_value(*_counts(score[first], error[first], tried), risk), kind="stable")]
    bad, answered = _counts(score[second], error[second], tried)
    before = np.logical_and.accumulate(p_value(bad, answered, risk) <= delta)
    best = (answered * before).argmax()
    if not before[best]:
        return Threshold(by, float("inf"), risk, delta, 0, 0, len(second))
    return Threshold(by, float(tried[best]), risk, delta, int(answered[best]), int(bad[best]), len(second))


def _counts(score: np.ndarray, error: np.ndarray, tried: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    answered = score >= tried[:, None]
    return answered @ error, answered.sum(1)
