"""What a few images of each class say: Gaussian discriminant analysis with one covariance for all classes."""
from __future__ import annotations

from typing import NamedTuple

import numpy as np
from sklearn.covariance import ledoit_wolf

#: What is added to the covariance, as a share of its mean variance, so that it can be inverted.
RIDGE = 1e-3


class Discriminant(NamedTuple):
    """log N(x; mean_c, S) of classes but for what all of them share: weight x + offset, (C, D) and (C,)."""

    weight: np.ndarray
    offset: np.ndarray

    def logits(self, x: np.ndarray) -> np.ndarray:
        """(N, D) -> (N, C)."""
        return x @ self.weight.T + self.offset


def fit_discriminant(x: np.ndarray, labels: np.ndarray, classes: int) -> Discriminant:
    """Features (N, D) of `classes` classes, labels (N,) below that, an image or more of each.

    S: covariance within classes, shrunk by Ledoit and Wolf's share (2004); that of all images where no class has two.
    The classes are equally frequent: few shots do not say how often each is met.
    """
    x = np.asarray(x, np.float64)
    mean = np.stack([x[labels == c].mean(0) for c in range(classes)])
    apart, freedom = x - mean[labels], len(x) - classes
    if freedom < 1 or not apart.any():
        apart, freedom = x - x.mean(0), max(1, len(x) - 1)
    covariance = ledoit_wolf(apart, assume_centered=True)[0] * (len(x) / freedom)
    level = np.trace(covariance) / len(covariance)
    covariance[np.diag_indices_from(covariance)] += RIDGE * level if level > 0 else 1.0
    weight = np.linalg.solve(covariance, mean.T).T
    return Discriminant(weight, -0.5 * (weight * mean).sum(1))
