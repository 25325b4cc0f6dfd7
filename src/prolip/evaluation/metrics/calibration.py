"""Calibration of match probabilities and class confidences: reliability by bins, expected calibration error."""

from __future__ import annotations

from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from prolip.evaluation.metrics import Array, as_array
from prolip.evaluation.metrics.streaming import Relevance
from prolip.gaussian import Gaussian, upcast
from prolip.scores import Score
from prolip.uncertainty.doubt import Evidence, hedge

#: Edges of 15 bins of equal width (Guo et al., ICML 2017).
EQUAL = np.linspace(0, 1, 16)
#: Edges one unit of log odds apart, for probabilities that are mostly tiny.
LOG_ODDS = np.concatenate([[0], 1 / (1 + np.exp(-np.arange(-16.0, 17.0))), [1]])


class Reliability(NamedTuple):
    """Predicted probabilities in bins (lower, upper], the first with its lower edge; all (bins,), NaN in empty bins."""

    counts: np.ndarray
    probability: np.ndarray  # mean of the predictions
    frequency: np.ndarray  # observed frequency of the outcome
    brier: float  # mean square of probability - outcome, over all predictions

    @property
    def ece(self) -> float:
        """Expected calibration error, sum_b counts_b / N |probability_b - frequency_b|."""
        return self._mean(np.abs(self.probability - self.frequency))

    def metrics(self, prefix: str) -> dict[str, float]:
        """Return `<prefix>/ece`, `max_error` of a bin, `mean_probability`, `base_rate` (share of true outcomes), their
        ratio `probability_over_base_rate` (1 is right on average, NaN without a true outcome), `brier`.
        """
        mean, base = self._mean(self.probability), self._mean(self.frequency)
        worst = float(np.nanmax(np.abs(self.probability - self.frequency)))
        found = {"ece": self.ece, "max_error": worst, "mean_probability": mean, "base_rate": base}
        found |= {"probability_over_base_rate": mean / base if base else float("nan"), "brier": float(self.brier)}
        return {f"{prefix}/{name}": value for name, value in found.items()}

    def _mean(self, values: np.ndarray) -> float:
        filled = self.counts > 0
        return float(np.average(values[filled], weights=self.counts[filled]))


class Bins:
    """Sums over bins of probability, for predictions that arrive in parts."""

    def __init__(self, edges: np.ndarray):
        self.edges = edges
        self.count, self.true = (np.zeros(len(edges) - 1, dtype=np.int64) for _ in range(2))
        self.total = np.zeros(len(edges) - 1)
        self.squares = 0.0

    def add(self, probability: np.ndarray, came_true: np.ndarray) -> None:
        """Add all predictions of a part (n,), and the probabilities of those that came true (m,)."""
        size, inner = len(self.count), self.edges[1:-1]
        place = np.searchsorted(inner, probability, side="left")
        self.count += np.bincount(place, minlength=size)
        self.total += np.bincount(place, weights=probability, minlength=size)
        self.true += np.bincount(np.searchsorted(inner, came_true, side="left"), minlength=size)
        p, q = (x.astype(np.float64, copy=False) for x in (probability, came_true))
        self.squares += float(p @ p - 2 * q.sum() + len(q))  # sum of (p - y)^2 for y of 0 or 1

    def reliability(self) -> Reliability:
        """Return the reliability of all added predictions. Raises ValueError for none."""
        if not self.count.sum():
            raise ValueError("no prediction was added: add at least one")
        filled = np.where(self.count > 0, self.count, np.nan)
        probability, frequency = self.total / filled, self.true / filled
        brier = self.squares / int(self.count.sum())
        return Reliability(self.count.copy(), probability, frequency, brier)


class Matching(NamedTuple):
    """A score's match probabilities, with doubts of images (N,) and shares of images per text (T,)."""

    score: Score
    doubt: Tensor | None = None
    share: Tensor | None = None

    @classmethod
    def of(cls, score: Score, evidence: Evidence | None, text: Gaussian) -> Matching:
        """Prepare the match probabilities of a test set's images, which are a gallery, and of texts (T, D)."""
        units, doubt = score.units, score.doubts(evidence, evidence)
        return cls(score, doubt, None if units is None else units.share(text.trace))

    def pairs(self, images: Tensor | slice, texts: Tensor | slice, scores: Tensor) -> Tensor | None:
        """Return the probability of pairs from their scores and places; None for a score without probabilities."""
        doubt = None if self.doubt is None else self.doubt[images]
        return self.score.match_probability(scores, doubt, 0.0 if self.share is None else self.share[texts])


class MatchReliability(Bins):
    """The reliability of the match probabilities of all pairs, from blocks of a score matrix."""

    def __init__(self, relevance: Relevance, matches: Matching):
        super().__init__(LOG_ODDS)
        self.relevance, self.matches = relevance, matches

    def update(self, rows: slice, block: Tensor) -> None:
        """Add the scores (b, T) of these images with all texts."""
        images = torch.arange(rows.start, rows.stop).unsqueeze(1)
        probability = cast(Tensor, self.matches.pairs(images, slice(None), block)).cpu()
        row, item = self.relevance.within(rows)
        self.add(probability.flatten().numpy(), probability[row, item].numpy())


def confidence(logits: Tensor, doubt: Tensor | None = None) -> Tensor:
    """Return the softmax probability of the chosen class, max_c softmax(logits)_c: (N, C), doubts (N,) -> (N,)."""
    logits = upcast(logits)
    log_p = logits.amax(1) - logits.logsumexp(1) if doubt is None else hedge(logits.log_softmax(1), doubt).amax(1)
    return log_p.exp().clamp(max=1)  # rounding may give 1 + 1e-7


def reliability(probability: Array, outcome: Array, edges: np.ndarray = EQUAL) -> Reliability:
    """Return the reliability of predictions (N,) in [0, 1] with outcomes (N,) of 0 or 1. ValueError for others."""
    p, y = as_array(probability, np.float64), as_array(outcome, np.float64)
    if p.ndim != 1 or p.shape != y.shape:
        raise ValueError(f"probabilities {p.shape} and outcomes {y.shape}: give one of each per prediction")
    if not ((p >= 0) & (p <= 1)).all() or not np.isin(y, (0, 1)).all():
        raise ValueError("probabilities must be in [0, 1] and outcomes 0 or 1: give sigmoid or softmax values")
    bins = Bins(edges)
    bins.add(p, p[y == 1])
    return bins.reliability()
