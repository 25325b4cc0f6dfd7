"""Losses of points: match odds by every pair of samples, uniformity by every pair of points, also over ranks."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck

from prolip.losses import log_match_odds, uniformity_over_ranks

DOUBLE = torch.float64


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def exhaustive(x, y, a, b):
    """p of every pair by a loop over all pairs of samples."""
    p = torch.empty(len(x), len(y), dtype=DOUBLE)
    for i, points in enumerate(x):
        for j, others in enumerate(y):
            p[i, j] = sum(1 / (1 + math.exp(a * math.dist(v.tolist(), t.tolist()) - b)) for v in points for t in others)
    return p / (x.shape[1] * y.shape[1])


def test_odds_are_those_of_the_probability_by_exhaustive_pairs():
    x, y = draw(4, 3, 5) * 0.3, draw(6, 2, 5, seed=1) * 0.3
    p = exhaustive(x, y, 4.0, 3.0)
    torch.testing.assert_close(log_match_odds(x, y, 4.0, 3.0), (p / (1 - p)).log())
    matched = torch.rand(4, 6, dtype=DOUBLE) < 0.5
    loss = F.binary_cross_entropy_with_logits(log_match_odds(x, y, 4.0, 3.0), matched.double(), reduction="sum")
    torch.testing.assert_close(loss, -torch.where(matched, p.log(), (1 - p).log()).sum())


@pytest.mark.parametrize(("a", "b"), [(500.0, 0.0), (0.01, 200.0), (100.0, 100.0)])
def test_odds_and_gradients_are_finite_where_a_probability_is_0_or_1(a, b):
    x, y = (draw(3, 4, 8, seed=s).float().requires_grad_() for s in (0, 1))
    odds = log_match_odds(x, y, a, b)
    F.softplus(odds).sum().backward()
    assert odds.isfinite().all() and odds.abs().amax() > 50
    assert x.grad.isfinite().all() and y.grad.isfinite().all()


def test_gradients_are_those_of_differences():
    x, y = draw(2, 2, 3).requires_grad_(), draw(3, 2, 3, seed=1).requires_grad_()
    a, b = torch.tensor(2.0, dtype=DOUBLE, requires_grad=True), torch.tensor(1.0, dtype=DOUBLE, requires_grad=True)
    assert gradcheck(log_match_odds, (x, y, a, b))


def by_loops(points: torch.Tensor) -> torch.Tensor:
    places = range(len(points))
    exponents = [-2 * (points[i] - points[j]).square().sum() for i in places for j in places if i != j]
    return torch.stack(exponents).exp().mean().log()


def test_uniformity_is_the_log_of_the_mean_over_different_points():
    points = draw(7, 4).requires_grad_()
    found, expected = uniformity_over_ranks(points), by_loops(points)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(x, points)[0] for x in (found, expected)))
    far = draw(5, 4).float() * 100
    assert uniformity_over_ranks(far).isfinite()  # the mean itself is 0
    with pytest.raises(ValueError, match="1 points have no pairs"):
        uniformity_over_ranks(points[:1])
