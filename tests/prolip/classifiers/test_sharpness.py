"""Probabilities that hold, against brute force."""

import numpy as np
import pytest
from scipy.optimize import approx_fprime, minimize
from scipy.special import log_softmax, softmax

from prolip.classifiers.sharpness import fit_sharpness


def drawn(seed=0, n=4000, classes=5, scale=2.0, slope=0.5):
    """Logits that are too sharp by `scale`, and by exp(slope) more for each standard deviation of uncertainty."""
    random = np.random.default_rng(seed)
    true, u = random.normal(size=(n, classes)) * 1.5, random.normal(size=n)
    labels = np.array([random.choice(classes, p=row) for row in softmax(true, 1)])
    return true * scale * np.exp(slope * u)[:, None], labels, 3 + 7 * u


def posterior(x, parts, labels, u, loose=(1.0, 3.0, 1.0)):
    log_p = log_softmax(np.exp(-x[-1] * u)[:, None] * sum(np.exp(a) * part for a, part in zip(x, parts)), 1)
    return -log_p[np.arange(len(labels)), labels].sum() + 0.5 * ((x / np.array(loose)) ** 2).sum()


def test_it_finds_how_sharp_logits_were_made():
    logits, labels, uncertainty = drawn()
    found = fit_sharpness([logits], labels, uncertainty)
    assert found.weights[0] == pytest.approx(0.5, rel=0.1) and found.slope == pytest.approx(0.5, abs=0.08)
    p = softmax(found.logits([logits], uncertainty), 1)
    sure = p.max(1)
    right = p.argmax(1) == labels
    for low in (0.3, 0.5, 0.7):
        rows = (sure > low) & (sure <= low + 0.2)
        assert right[rows].mean() == pytest.approx(sure[rows].mean(), abs=0.04)


def test_it_is_the_mode_that_a_search_without_gradients_finds():
    logits, labels, uncertainty = drawn(n=60)
    other = np.random.default_rng(1).normal(size=logits.shape)
    found = fit_sharpness([logits, other], labels, uncertainty, loose=[1.0, 3.0])
    u = (uncertainty - uncertainty.mean()) / uncertainty.std()
    x = np.append(np.log(found.weights), found.slope)
    exactly = {"xatol": 1e-7, "fatol": 1e-10, "maxiter": 4000}
    wanted = minimize(posterior, np.zeros(3), ([logits, other], labels, u), "Nelder-Mead", options=exactly)
    np.testing.assert_allclose(x, wanted.x, atol=1e-4)
    np.testing.assert_allclose(approx_fprime(x, posterior, 1e-6, [logits, other], labels, u), 0, atol=2e-3)


def test_no_uncertain_image_is_made_surer_and_nothing_endlessly_sure():
    logits, labels, uncertainty = drawn(slope=-0.5)
    assert fit_sharpness([logits], labels, uncertainty).slope == 0
    even = fit_sharpness([logits], labels, np.full(len(labels), 0.1))
    assert even.slope == 0 and np.isfinite(even.logits([logits], np.full(len(labels), 5.0))).all()
    found = fit_sharpness([np.eye(3)], np.arange(3), np.zeros(3))
    assert 1 < found.weights[0] < 5
