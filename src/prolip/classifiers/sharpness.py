"""Calibrated probabilities: temperature scaling (Guo et al., ICML 2017) with a temperature for each image.

p(c|x) = softmax_c exp(-s u(x)) sum_k w_k l_k(x, c), s >= 0, u the uncertainty in standard deviations from its mean. The
mode of log w_k ~ N(0, deviation^2) and s ~ |N(0, 1)|: few images change them little; uncertainty never adds confidence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import minimize
from scipy.special import log_softmax


class Sharpness(NamedTuple):
    """Weights (K,) of the kinds of logits, slope s, and centre and spread of the uncertainties in the fit."""

    weights: np.ndarray
    slope: float = 0.0
    centre: float = 0.0
    spread: float = 1.0

    def logits(self, parts: Sequence[np.ndarray], uncertainty: np.ndarray) -> np.ndarray:
        """Combine K kinds of logits (N, C) and uncertainties (N,) into calibrated logits (N, C)."""
        whole = sum(w * np.asarray(part, np.float64) for w, part in zip(self.weights, parts))
        u = (np.asarray(uncertainty, np.float64) - self.centre) / self.spread
        return np.exp(-self.slope * u)[:, None] * whole if self.slope else whole


def fit_sharpness(
    parts: Sequence[np.ndarray], labels: np.ndarray, uncertainty: np.ndarray, loose: Sequence[float] | None = None
) -> Sharpness:
    """Fit to K kinds of logits (N, C), the true classes (N,) and uncertainties (N,) of labelled images.

    loose: the prior deviations of the log weights, default 1. The slope is 0 if all are equally uncertain.
    """
    deviation = np.append(np.ones(len(parts)) if loose is None else np.asarray(loose, np.float64), 1.0)
    uncertainty = np.asarray(uncertainty, np.float64)
    centre, spread = float(uncertainty.mean()), float(uncertainty.std())
    varies = spread > 1e-6 * max(1.0, float(np.abs(uncertainty).max()))
    spread = spread if varies else 1.0
    u = (uncertainty - centre) / spread if varies else np.zeros(len(labels))
    stacked, rows = np.stack([np.asarray(part, np.float64) for part in parts]), np.arange(len(labels))

    def loss(x: np.ndarray) -> tuple[float, np.ndarray]:
        """Return -log posterior and its gradient by log w and s."""
        shown = np.exp(x[:-1])[:, None, None] * np.exp(-x[-1] * u)[:, None] * stacked
        log_p = log_softmax(shown.sum(0), axis=1)
        apart = np.exp(log_p)
        apart[rows, labels] -= 1
        by_part = (apart * shown).sum((1, 2))
        by_slope = -(u[:, None] * apart * shown.sum(0)).sum()
        y = x / deviation
        return -log_p[rows, labels].sum() + 0.5 * y @ y, np.append(by_part, by_slope) + y / deviation

    bounds = [(-20.0, 20.0)] * len(parts) + [(0.0, 20.0 if varies else 0.0)]
    found = minimize(loss, np.zeros(len(parts) + 1), jac=True, bounds=bounds, method="L-BFGS-B").x
    return Sharpness(np.exp(found[:-1]), float(found[-1]), centre, spread)
