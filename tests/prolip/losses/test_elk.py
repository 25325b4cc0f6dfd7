"""elk as a score of a tile against the broadcast formula, in value and gradient, for any tiles of the pairs."""

from __future__ import annotations

import pytest
import torch
from loss_cases import assert_same_value_and_gradients, gaussian, leaves_of
from torch.autograd import gradcheck

from prolip.gaussian import Gaussian
from prolip.measures import pairwise_elk


def direct(p: Gaussian, q: Gaussian) -> torch.Tensor:
    """Over n x m x D, as PCME (B.4) writes it."""
    wide = p.var[:, None] + q.var[None]
    return -0.5 * ((p.mean[:, None] - q.mean[None]) ** 2 / wide + wide.log()).sum(-1)


@pytest.mark.parametrize("elements", [1, 24, 10**6])
def test_elk_equals_the_direct_formula_in_value_and_every_gradient(elements):
    """In tiles of one pair, of four, and of all."""
    p, q = gaussian(4, 5, 0), gaussian(3, 5, 1)
    weights = torch.randn(4, 3, dtype=torch.float64)
    found, want = weights * -pairwise_elk(p, q, elements), weights * direct(p, q)
    assert_same_value_and_gradients(found.sum(), want.sum(), leaves_of(p, q))
    torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)


def test_elk_passes_gradcheck():
    p, q = gaussian(3, 4, 2), gaussian(2, 4, 3)
    assert gradcheck(lambda a, b, c, d: pairwise_elk(Gaussian(a, b), Gaussian(c, d)), leaves_of(p, q))


@pytest.mark.parametrize("log_var", [-40.0, 10.0])
def test_elk_in_float32_is_right_at_extreme_variances(log_var):
    p, q = (gaussian(5, 16, seed, torch.float32, log_var) for seed in (4, 5))
    exact = [Gaussian(*(x.detach().double().requires_grad_() for x in z)) for z in (p, q)]
    found, want = -pairwise_elk(p, q), direct(*exact)
    torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-5)
    grads = (torch.autograd.grad(x.sum(), leaves_of(*z)) for x, z in ((found, (p, q)), (want, exact)))
    for got, wanted in zip(*grads):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()))
