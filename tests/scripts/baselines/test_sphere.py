"""Densities and points on the sphere against mpmath, scipy and moments."""

from __future__ import annotations

import mpmath
import pytest
import torch
from ambiguous_pairs import points
from scipy.stats import beta, kstest

from studies.uncertainty.baselines.sphere import power_spherical_sample, vmf_log_normaliser

KAPPAS = [0.0, 1e-3, 0.7, 12.0, 300.0, 2e4]


def exact(kappa: float, dim: int) -> tuple[float, float]:
    """log C_D(kappa) and its derivative, -I_(D/2) / I_(D/2 - 1), to 40 digits."""
    with mpmath.workdps(40):
        v, k = mpmath.mpf(dim) / 2 - 1, mpmath.mpf(kappa)
        if not kappa:
            return float(mpmath.loggamma(v + 1) - mpmath.log(2 * mpmath.pi ** (v + 1))), 0.0
        value = v * mpmath.log(k) - (v + 1) * mpmath.log(2 * mpmath.pi) - mpmath.log(mpmath.besseli(v, k))
        return float(value), float(-mpmath.besseli(v + 1, k) / mpmath.besseli(v, k))


@pytest.mark.parametrize("dim", [2, 3, 16, 65, 66, 512, 1024])
def test_normaliser_and_its_gradient_are_those_of_mpmath(dim):
    values, slopes = zip(*(exact(kappa, dim) for kappa in KAPPAS))
    kappa = torch.tensor(KAPPAS, dtype=torch.float64, requires_grad=True)
    found = vmf_log_normaliser(kappa, dim)
    (slope,) = torch.autograd.grad(found.sum(), kappa)
    torch.testing.assert_close(found, torch.tensor(values, dtype=torch.float64), rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(slope, torch.tensor(slopes, dtype=torch.float64), rtol=1e-6, atol=1e-7)
    single = kappa.detach().float().requires_grad_()
    found = vmf_log_normaliser(single, dim)
    (slope,) = torch.autograd.grad(found.sum(), single)
    torch.testing.assert_close(found.double(), torch.tensor(values, dtype=torch.float64), rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(slope.double(), torch.tensor(slopes, dtype=torch.float64), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dim", [2, 5, 64])
def test_points_have_the_distribution_of_their_cosine_and_are_uniform_around_it(dim):
    torch.manual_seed(0)
    mean, kappa = points(2, dim, dtype=torch.float64), torch.tensor([1.5, 40.0], dtype=torch.float64)
    x = power_spherical_sample(mean, kappa, 4000)
    torch.testing.assert_close(x.norm(dim=-1), torch.ones(4000, 2, dtype=torch.float64))
    half = (dim - 1) / 2
    for i in range(2):
        cosine = x[:, i] @ mean[i]
        assert kstest((cosine.numpy() + 1) / 2, beta(half + kappa[i].item(), half).cdf).pvalue > 1e-3
        across = x[:, i] - cosine.unsqueeze(1) * mean[i]
        spread = across.T @ across / (1 - cosine.square()).sum()  # of a uniform direction: (I - mu mu') / (D - 1)
        wanted = (torch.eye(dim, dtype=torch.float64) - torch.outer(mean[i], mean[i])) / (dim - 1)
        torch.testing.assert_close(spread, wanted, rtol=0, atol=6 / (4000 * (dim - 1)) ** 0.5)
