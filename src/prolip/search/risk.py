"""Refusal by risk: a threshold under which most questions are refused, so that at most a stated share of the answers
that are given is wrong.

Split fixed-sequence testing, of Learn then Test (Angelopoulos, Bates, Candes, Jordan and Lei, 2021, arXiv:2110.01052).
Questions with known answers are shared out at random. The first part chooses what to refuse by, the thresholds, and
their order, the safest first. The second tests, in this order, the hypothesis that more than `risk` of what a threshold
lets through is wrong: of n such answers k are wrong, and P(Bin(n, risk) <= k) is an exact p-value. The first that is
above `delta` ends it, and the threshold that answers most is taken of those before.

Guarantee: with probability 1 - delta over the questions that it was calibrated on, P(wrong | answered) <= risk for a
new question, or nothing is answered. Assumed: these questions and the new ones are independent draws of one
distribution (exchangeable alone is not enough for a binomial p-value); nothing is assumed of the model or of what is
refused by. It says nothing of questions of another kind, and of few answers more may be wrong by chance (`most_wrong`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from scipy.stats import binom

from prolip.evaluation.metrics.ranking import Array, as_array
from prolip.evaluation.metrics.selective import risk_coverage

#: The share of the questions that chooses, and thresholds that are tried at most.
CHOOSING, TRIED = 0.25, 100


class Threshold(NamedTuple):
    """Answer where the confidence called `by` is `least` or more; inf where no threshold holds: refuse all.

    risk, delta: what was promised; answered, wrong, tested: of the questions that it was tested on.
    """

    by: str
    least: float
    risk: float
    delta: float
    answered: int
    wrong: int
    tested: int

    @property
    def holds(self) -> bool:
        """Whether anything is answered."""
        return self.least < np.inf

    def answers(self, confidences: Mapping[str, Array]) -> np.ndarray:
        """Which questions are answered, (N,) bool. ValueError where they lack what they are refused by."""
        if self.by not in confidences:
            known = ", ".join(confidences)
            raise ValueError(
                f"the threshold is one of {self.by}, and these questions have {known} alone: calibrate on"
                " questions of the kind that is asked, texts or pictures"
            )
        sure = as_array(confidences[self.by], np.float64)
        return sure >= self.least if self.holds else np.zeros(len(sure), dtype=bool)

    def __str__(self) -> str:
        sure = f"with {1 - self.delta:.0%} confidence"
        if not self.holds:
            return (
                f"no threshold keeps the wrong answers to {self.risk:.0%} {sure} on {self.tested} questions: all"
                " are refused. Give more questions, a larger --risk, or a better model"
            )
        return (
            f"answers with a {self.by} of {self.least:.4g} or more: at most {self.risk:.0%} of them wrong {sure}"
            f" ({self.wrong} of {self.answered} were, of {self.tested} questions)"
        )


def p_value(wrong: int | np.ndarray, answered: int | np.ndarray, risk: float) -> np.ndarray:
    """P(Bin(answered, risk) <= wrong): at most u with probability u where a share of `risk` or more is wrong."""
    return np.asarray(binom.cdf(wrong, answered, risk))


def most_wrong(answers: int, risk: float, delta: float) -> int:
    """The most of so many new answers that are wrong, with probability 1 - delta, where their risk is kept."""
    return int(binom.ppf(1 - delta, answers, risk))


def find_threshold(
    confidences: Mapping[str, Array], wrong: Array, risk: float, delta: float = 0.1, seed: int = 0
) -> Threshold:
    """The threshold that answers most of those that keep the risk; see above for what is guaranteed.

    confidences: by name, (N,) each, larger is surer; wrong: (N,) whether the answer was. ValueError for fewer than two
    questions, NaN, other values than 0 and 1, and risks and deltas outside of (0, 1).
    """
    scores = {name: as_array(x, np.float64) for name, x in confidences.items()}
    error = as_array(wrong, np.float64)
    for name, value in (("risk", risk), ("delta", delta)):
        if not 0 < value < 1:
            raise ValueError(f"{name} {value}: give a share between 0 and 1, such as 0.1")
    if not scores or len(error) < 2 or any(x.shape != error.shape for x in scores.values()):
        raise ValueError(
            f"{len(error)} questions with {len(scores)} confidences: give one of each per question, for"
            " two questions or more"
        )
    if not np.isin(error, (0, 1)).all() or any(np.isnan(x).any() for x in scores.values()):
        raise ValueError("an answer is neither right nor wrong, or a confidence is NaN: leave out such questions")
    order = np.random.default_rng(seed).permutation(len(error))
    first, second = np.split(order, [max(1, round(CHOOSING * len(error)))])
    areas = {name: risk_coverage(-x[first], error[first]).aurc for name, x in scores.items()}
    by = min(areas, key=lambda name: areas[name])
    score = scores[by]
    known = np.unique(score[first])
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
    """Wrong ones and all of those that are answered, by each threshold."""
    answered = score >= tried[:, None]
    return answered @ error, answered.sum(1)
