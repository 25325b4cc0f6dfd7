"""Discriminant analysis against densities and scikit-learn's."""

import numpy as np
import pytest
from scipy.stats import multivariate_normal
from sklearn.covariance import ledoit_wolf

from prolip.classifiers.few_shot import RIDGE, fit_discriminant


@pytest.fixture
def shots():
    random = np.random.default_rng(0)
    labels = np.repeat(np.arange(4), 6)
    return random.normal(size=(4, 5))[labels] + random.normal(size=(24, 5)) * np.linspace(0.2, 2, 5), labels


def test_logits_are_log_densities_but_for_what_all_classes_share_and_of_one_shot_each_go_by_the_spread_of_all(shots):
    x, labels = shots
    mean = np.stack([x[labels == c].mean(0) for c in range(4)])
    covariance = ledoit_wolf(x - mean[labels], assume_centered=True)[0] * 24 / 20
    covariance += np.eye(5) * RIDGE * np.trace(covariance) / 5
    new = np.random.default_rng(1).normal(size=(7, 5))
    wanted = np.stack([multivariate_normal(m, covariance).logpdf(new) for m in mean], 1)
    found = fit_discriminant(x, labels, 4).logits(new) * 5  # by the dimension
    np.testing.assert_allclose(found - found[:, :1], wanted - wanted[:, :1], rtol=1e-8)
    x = np.array([[0.0, 0.0], [4.0, 0.0], [0.0, 3.0]])
    assert fit_discriminant(x, np.arange(3), 3).logits(x).argmax(1).tolist() == [0, 1, 2]
    same = fit_discriminant(np.ones((2, 3)), np.arange(2), 2).logits(np.ones((1, 3)))
    assert np.isfinite(same).all()
