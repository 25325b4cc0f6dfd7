"""What traces are worth: rank correlations, their spread, values by decile, traces by length."""
from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.stats import ConstantInputWarning, spearmanr


class Deciles(NamedTuple):
    """Queries in ten (or fewer) equally large groups of rising trace, with the mean trace and value of each group.

    spearman_bins, spearman_queries: rank correlation of trace and value over groups and over single queries; -1 is what
    a calibrated uncertainty gives, for values where more is better.
    """

    trace: np.ndarray
    value: np.ndarray
    spearman_bins: float
    spearman_queries: float


class Length(NamedTuple):
    """The traces of all texts of one length: mean, lower and upper quartile, and how many texts."""

    length: int
    mean: float
    lower: float
    upper: float
    texts: int


def spearman(x: Sequence[float] | np.ndarray, y: Sequence[float] | np.ndarray) -> float:
    """Spearman's rank correlation, ties averaged; NaN for fewer than three values or a constant side."""
    if len(x) < 3:
        return float("nan")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConstantInputWarning)
        return float(spearmanr(x, y).statistic)


def partial_spearman(x: np.ndarray, y: np.ndarray, given: np.ndarray) -> float:
    """Spearman's correlation of x and y at equal `given`: (r_xy - r_xz r_yz) / sqrt((1 - r_xz^2) (1 - r_yz^2)).

    All (N,); NaN where a plain one is, or where `given` orders one side completely.
    """
    xy, xz, yz = spearman(x, y), spearman(x, given), spearman(y, given)
    unexplained = (1 - xz**2) * (1 - yz**2)
    return (xy - xz * yz) / unexplained**0.5 if unexplained > 0 else float("nan")


def spread(trace: np.ndarray) -> float:
    """(95th - 5th percentile) / median: near 0 the trace is one number for all inputs and can order none. (N,)."""
    low, middle, high = np.quantile(trace, (0.05, 0.5, 0.95))
    return float((high - low) / middle) if middle else float("nan")


def by_decile(trace: np.ndarray, value: np.ndarray, bins: int = 10) -> Deciles:
    """Mean value (a recall, say) by decile of trace, trace and value (Q,).

    Equal traces in random order, of which this is the expectation: each counts with the mean value of its tie, so a tie
    across an edge is shared by both deciles in proportion.
    """
    levels, tie, size = np.unique(trace, return_inverse=True, return_counts=True)
    expected = np.bincount(tie, weights=value, minlength=len(levels)) / size
    groups = [group for group in np.array_split(np.repeat(np.arange(len(levels)), size), bins) if len(group)]
    # A decile within one tie has exactly its values: their mean by summation could differ from that of the next decile.
    traces, values = (np.array([x[group[0]] if group[0] == group[-1] else x[group].mean() for group in groups])
                      for x in (levels, expected))  # fmt: skip
    return Deciles(traces, values, spearman(traces, values), spearman(trace, value))


def by_length(lengths: np.ndarray, trace: np.ndarray) -> list[Length]:
    """The traces grouped by length, shortest first. lengths, trace: (T,)."""
    out = []
    for length in np.unique(lengths):
        x = trace[lengths == length]
        lower, upper = np.quantile(x, (0.25, 0.75))
        out.append(Length(int(length), float(x.mean()), float(lower), float(upper), len(x)))
    return out
