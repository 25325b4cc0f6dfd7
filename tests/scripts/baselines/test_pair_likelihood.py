"""Variances by the likelihood of matched pairs: against torch's normal, gradients, extremes, known variances."""

from __future__ import annotations

import math

import pytest
import torch
from ambiguous_pairs import points

from prolip.embeddings import Pairs
from prolip.gaussian import Gaussian
from prolip.measures import elk
from studies.uncertainty.baselines.pair_likelihood import PairLikelihood, pair_loss


def test_the_loss_is_the_likelihood_of_the_difference_and_elk_with_one_variance_per_input():
    dim, g = 8, torch.Generator().manual_seed(0)
    image, text = (torch.randn(5, dim, generator=g, dtype=torch.float64) for _ in range(2))
    log_trace = torch.randn(2, 5, generator=g, dtype=torch.float64)
    found = 0.5 * dim * pair_loss((image - text).square().sum(1), *log_trace)
    variance = log_trace.exp().sum(0) / dim
    normal = torch.distributions.Normal(0.0, variance.sqrt().unsqueeze(1))
    exact = -normal.log_prob(image - text).sum(1)
    assert torch.allclose((found - exact).diff(), torch.zeros(4, dtype=torch.float64), atol=1e-10)
    sides = [Gaussian(m, (t - math.log(dim)).unsqueeze(1).expand(5, dim)) for m, t in zip((image, text), log_trace)]
    assert torch.allclose((found - elk(*sides)).diff(), torch.zeros(4, dtype=torch.float64), atol=1e-10)


def test_gradients_are_those_of_finite_differences_and_hold_at_extremes():
    g = torch.Generator().manual_seed(1)
    distance, a, b = torch.rand(6, generator=g, dtype=torch.float64), *torch.randn(2, 6, generator=g).double()
    assert torch.autograd.gradcheck(pair_loss, [x.requires_grad_() for x in (distance, a, b)])
    for extreme in (-40.0, 10.0):
        x = torch.tensor([extreme, 0.3], requires_grad=True)
        value = pair_loss(torch.tensor([1e-12, 1e-12]), x, torch.full((2,), extreme))
        value.sum().backward()
        assert value.isfinite().all() and x.grad.isfinite().all()


@pytest.mark.parametrize("seed", [0, 1])
def test_known_variances_of_samples_are_found_within_a_tenth(seed):
    """Texts of two kinds with traces of 0.1 and 0.4 around the points of their images, whose own trace is 0."""
    g, dim, rows = torch.Generator().manual_seed(seed), 64, 3000
    kind = torch.arange(rows) % 2
    image = points(rows, dim, seed=seed)
    image[:, 0] = 0.5 - kind.float()  # by which a head may know the kind
    image = torch.nn.functional.normalize(image, dim=1)
    trace = torch.tensor([0.1, 0.4])[kind]
    noise = torch.randn(rows, dim, generator=g) * (trace / dim).sqrt().unsqueeze(1)
    # unit means with exact distances: a text lies at its distance along the sphere
    text = torch.nn.functional.normalize(image + noise - (noise * image).sum(1, keepdim=True) * image, dim=1)
    measured = (image - text).square().sum(1)
    fitted = PairLikelihood.fit(Pairs.in_rows(image, text, 10.0), seed=seed)
    total = fitted.image(image) + fitted.text(text)
    for k in (0, 1):
        assert float(total[kind == k].mean()) == pytest.approx(float(measured[kind == k].mean()), rel=0.1)
