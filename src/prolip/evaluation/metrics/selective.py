"""Selective prediction: risk-coverage curves, AURC, AUROC, and rank correlations of uncertainty and error.

Every metric is the expectation over the orders of equal uncertainties: constant uncertainties refuse at random.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from scipy.stats import ConstantInputWarning, spearmanr
from sklearn.metrics import roc_auc_score

from prolip.evaluation.metrics import Array, as_array
from prolip.evaluation.metrics.streaming import Nearest, PairScores
from prolip.gaussian import Gaussian
from prolip.scores import MeanScore

COVERAGES = (0.9, 0.8, 0.5)


class RiskCoverage(NamedTuple):
    """Mean error of answered samples against coverage; all (N,), from the most certain sample to all samples."""

    coverage: np.ndarray
    risk: np.ndarray
    oracle: np.ndarray

    @property
    def aurc(self) -> float:
        """Area under the curve, 1/N sum_i risk_i; less is better (Geifman, Uziel and El-Yaniv, ICLR 2019)."""
        return float(self.risk.mean())

    @property
    def error(self) -> float:
        """Mean error without refusal, equal to the area of random refusal."""
        return float(self.risk[-1])

    @property
    def gain(self) -> float:
        """Share of the oracle's gain over random refusal: 1 oracle, 0 chance; NaN if no refusal can help."""
        possible = self.error - float(self.oracle.mean())
        return (self.error - self.aurc) / possible if possible > 1e-12 else float("nan")

    def at(self, coverage: float) -> float:
        """Return the mean error of the most certain `coverage` of the samples, at least one."""
        return float(self.risk[max(1, int(np.ceil(coverage * len(self.risk) - 1e-9))) - 1])


def risk_coverage(uncertainty: Array, error: Array) -> RiskCoverage:
    """Compute the risk-coverage curve of an uncertainty: (N,), (N,). ValueError for unequal lengths, none, or NaN."""
    uncertainty, error = _checked(uncertainty, error)
    _, group, size = np.unique(uncertainty, return_inverse=True, return_counts=True)
    expected = np.repeat(np.bincount(group, weights=error) / size, size)  # by rising uncertainty; ties share their mean
    count = np.arange(1, len(error) + 1)
    return RiskCoverage(count / len(error), np.cumsum(expected) / count, np.cumsum(np.sort(error)) / count)


def auroc(uncertainty: Array, wrong: Array) -> float:
    """Return the probability that a wrong answer is more uncertain than a right one, ties half; NaN for one kind."""
    uncertainty, wrong = _checked(uncertainty, wrong)
    if len(np.unique(wrong > 0)) < 2:
        return float("nan")
    order = np.unique(uncertainty, return_inverse=True)[1]  # scikit-learn refuses infinite scores
    return float(roc_auc_score(wrong > 0, order))


def recall_auroc(z: Gaussian, labels: Array, uncertainty: Array) -> dict[str, float]:
    """Return R-AUROC of the URL benchmark (Kirchhof et al. 2023): do uncertain embeddings have wrong neighbours?

    z (N, D); labels, uncertainty (N,). `1-NN`: share of samples whose nearest other sample has the same class.
    """
    labels, count = torch.from_numpy(np.unique(as_array(labels), return_inverse=True)[1]), len(z.mean)
    if count < 2 or labels.shape != (count,):
        given = f"{count} samples and labels {tuple(labels.shape)}"
        raise ValueError(f"{given}: give two samples or more, with one class label each")
    nearest = Nearest(count)
    for rows, block in PairScores.from_gaussians(z, z, MeanScore()).blocks():
        itself = torch.arange(rows.start, rows.stop)
        block[itself - rows.start, itself] = -torch.inf
        nearest.update(rows, block)
    wrong = labels[nearest.item] != labels
    return {"R-AUROC": auroc(uncertainty, wrong), "1-NN": 1 - float(wrong.double().mean())}


def selective_metrics(error: Array, uncertainties: Mapping[str, Array], prefix: str = "refusal") -> dict[str, float]:
    """Return every metric of refusal by each uncertainty: error (N,), uncertainties (N,) by name.

    Keys `<prefix>/<name>/...`: `error` without refusal, `error@<percent answered>`, `aurc`, `aurc_oracle`,
    `aurc_excess`, `aurc_gain`, `spearman` of uncertainty and error (more is better), `spearman_deciles` of their means
    by decile, `error_decile1` of the most certain tenth to `error_decile10`, and `auroc` if the error is 0 or 1.
    """
    out: dict[str, float] = {}
    for name, uncertainty in uncertainties.items():
        u, e = _checked(uncertainty, error)
        curve, deciles = risk_coverage(u, e), by_decile(u, e)
        oracle = float(curve.oracle.mean())
        found = {
            "error": curve.error,
            **{f"error@{round(100 * c)}": curve.at(c) for c in COVERAGES},
            "aurc": curve.aurc,
            "aurc_oracle": oracle,
            "aurc_excess": curve.aurc - oracle,  # E-AURC of the same paper
            "aurc_gain": curve.gain,
            "spearman": deciles.spearman_queries,
            "spearman_deciles": deciles.spearman_bins,
            **{f"error_decile{i}": float(value) for i, value in enumerate(deciles.value, 1)},
        }
        if np.isin(e, (0, 1)).all():
            found["auroc"] = auroc(u, e)
        out |= {f"{prefix}/{name}/{key}": value for key, value in found.items()}
    return out


def _checked(uncertainty: Array, error: Array) -> tuple[np.ndarray, np.ndarray]:
    """Return both as float64 arrays (N,). Raises ValueError."""
    u, e = (as_array(x, np.float64) for x in (uncertainty, error))
    if u.ndim != 1 or u.shape != e.shape or not len(u):
        raise ValueError(f"uncertainty {u.shape} and error {e.shape}: give one of each per sample, at least one sample")
    if np.isnan(u).any() or np.isnan(e).any():
        lost = f"{int(np.isnan(u).sum())} uncertainties and {int(np.isnan(e).sum())} errors are NaN"
        raise ValueError(f"{lost}: remove the queries without a match, and look for a diverged model")
    return u, e


class Deciles(NamedTuple):
    """Queries in ten (or fewer) equally large groups of rising trace, with the mean trace and value of each group."""

    trace: np.ndarray
    value: np.ndarray
    spearman_bins: float  # of trace and value over groups: -1 is ideal if more value is better
    spearman_queries: float  # over single queries


def spearman(x: Sequence[float] | np.ndarray, y: Sequence[float] | np.ndarray) -> float:
    """Return Spearman's rank correlation, ties averaged; NaN for fewer than three values or a constant side."""
    if len(x) < 3:
        return float("nan")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConstantInputWarning)
        return float(spearmanr(x, y).statistic)


def partial_spearman(x: np.ndarray, y: np.ndarray, given: np.ndarray) -> float:
    """Return Spearman's correlation at equal `given`, (N,): (r_xy - r_xz r_yz) / sqrt((1 - r_xz^2) (1 - r_yz^2))."""
    xy, xz, yz = spearman(x, y), spearman(x, given), spearman(y, given)
    unexplained = (1 - xz**2) * (1 - yz**2)
    return (xy - xz * yz) / unexplained**0.5 if unexplained > 0 else float("nan")


def spread(trace: np.ndarray) -> float:
    """Return (95th - 5th percentile) / median of traces (N,): near 0 the trace is the same for all inputs."""
    low, middle, high = np.quantile(trace, (0.05, 0.5, 0.95))
    return float((high - low) / middle) if middle else float("nan")


def by_decile(trace: np.ndarray, value: np.ndarray, bins: int = 10) -> Deciles:
    """Average a value, such as a recall, by decile of trace (Q,), in expectation over orders of equal traces."""
    levels, tie, size = np.unique(trace, return_inverse=True, return_counts=True)
    expected = np.bincount(tie, weights=value, minlength=len(levels)) / size
    groups = [group for group in np.array_split(np.repeat(np.arange(len(levels)), size), bins) if len(group)]
    # A decile within one tie has exactly its value: a mean by summation could differ from the next decile's.
    traces, values = (
        np.array([x[group[0]] if group[0] == group[-1] else x[group].mean() for group in groups])
        for x in (levels, expected)
    )
    return Deciles(traces, values, spearman(traces, values), spearman(trace, value))
