"""prolip.measures.match_probability: PCME's Monte-Carlo estimate, paired and pairwise."""

import mpmath
import pytest
import torch
from random_gaussians import gaussian

from prolip import measures
from prolip.gaussian import Gaussian

SCALE, BIAS = 3.0, 2.0


def seeded(seed: int = 9) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("m1,l1,m2,l2", [(0.2, -1.0, -0.1, -2.0), (1.0, 0.0, -1.0, -1.0), (0.0, -3.0, 0.0, -3.0)])
def test_its_mean_is_the_integral_over_the_distribution_of_the_difference(m1, l1, m2, l2):
    """One dimension needs no samples but one integral: z1 - z2 ~ N(m1 - m2, v1 + v2)."""
    var = mpmath.exp(l1) + mpmath.exp(l2)

    def integrand(u):
        density = mpmath.exp(-((u - (m1 - m2)) ** 2) / (2 * var)) / mpmath.sqrt(2 * mpmath.pi * var)
        return density / (1 + mpmath.exp(SCALE * abs(u) - BIAS))

    expected = float(mpmath.quad(integrand, [-mpmath.inf, -3, 0, m1 - m2, 3, mpmath.inf]))
    repeats = 4000
    p = Gaussian(*(torch.full((repeats, 1), x, dtype=torch.float64) for x in (m1, l1)))
    q = Gaussian(*(torch.full((repeats, 1), x, dtype=torch.float64) for x in (m2, l2)))
    estimates = measures.match_probability(p, q, SCALE, BIAS, samples=8, generator=seeded())
    assert abs(estimates.mean() - expected) < 5 * estimates.std() / repeats**0.5


def test_it_is_the_plain_mean_over_all_pairs_of_samples():
    p, q, samples = gaussian(4, 3), gaussian(4, 3, seed=1), 5
    generator = seeded()
    z1, z2 = p.sample(samples, generator), q.sample(samples, generator)
    expected = torch.zeros(4, dtype=torch.float64)
    for i in range(samples):
        for j in range(samples):
            expected += torch.sigmoid(-SCALE * (z1[i] - z2[j]).norm(dim=-1) + BIAS) / samples**2
    torch.testing.assert_close(measures.match_probability(p, q, SCALE, BIAS, samples, seeded()), expected)
    torch.testing.assert_close(measures.log_match_probability(p, q, SCALE, BIAS, samples, seeded()), expected.log())


@pytest.mark.parametrize("max_elements", [1, 600, 2**22])
def test_pairwise_is_the_same_estimate_for_every_pair(max_elements):
    p, q, samples = gaussian(6, 3), gaussian(5, 3, seed=1), 4
    generator = seeded()
    z1, z2 = p.sample(samples, generator), q.sample(samples, generator)
    distances = (z1[:, None, :, None] - z2[None, :, None]).norm(dim=-1)
    expected = torch.sigmoid(-SCALE * distances + BIAS).mean((0, 1))
    options = {"max_elements": max_elements}
    value = measures.pairwise_match_probability(p, q, SCALE, BIAS, samples, seeded(), **options)
    torch.testing.assert_close(value, expected)
    log_value = measures.pairwise_log_match_probability(p, q, SCALE, BIAS, samples, seeded(), **options)
    torch.testing.assert_close(log_value, expected.log())


@pytest.mark.parametrize("max_elements", [30, 2**22])
def test_gradients_reach_both_gaussians_the_scale_and_the_bias(max_elements):
    leaves = [x.clone().requires_grad_() for x in (*gaussian(3, 2), *gaussian(4, 2, seed=1))]
    leaves += [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (SCALE, BIAS)]

    def pairwise(m1, l1, m2, l2, scale, bias):
        p, q = Gaussian(m1, l1), Gaussian(m2, l2)
        return measures.pairwise_log_match_probability(p, q, scale, bias, 3, seeded(), max_elements=max_elements)

    def paired(m1, l1, m2, l2, scale, bias):
        return measures.match_probability(Gaussian(m1, l1), Gaussian(m2[:3], l2[:3]), scale, bias, 3, seeded())

    assert torch.autograd.gradcheck(pairwise, leaves)
    assert torch.autograd.gradcheck(paired, leaves)


def test_negated_scale_and_bias_give_the_log_of_the_complement():
    p, q = gaussian(6, 3), gaussian(6, 3, seed=1)
    for f in (measures.log_match_probability, measures.pairwise_log_match_probability):
        match, other = f(p, q, SCALE, BIAS, generator=seeded()), f(p, q, -SCALE, -BIAS, generator=seeded())
        torch.testing.assert_close(match.exp() + other.exp(), torch.ones_like(match))


@pytest.mark.parametrize("level", [-40.0, -20.0, -10.0, 0.0, 10.0])
@pytest.mark.parametrize("f", [measures.log_match_probability, measures.pairwise_log_match_probability])
def test_values_and_gradients_are_finite_at_extreme_variances_and_scales(f, level):
    p, q = gaussian(4, 6, dtype=torch.float32), gaussian(4, 6, seed=1, dtype=torch.float32)
    leaves = [x.clone().requires_grad_() for x in (p.mean, p.log_var + level, q.mean, q.log_var + level)]
    value = f(Gaussian(*leaves[:2]), Gaussian(*leaves[2:]), 1e4, 1.0, generator=seeded())
    assert value.dtype == torch.float32
    assert value.isfinite().all()
    assert (value < -200).any()  # where the probability itself is 0 in float32
    assert all(g.isfinite().all() for g in torch.autograd.grad(value.sum(), leaves))


def test_coinciding_samples_have_finite_gradients():
    """The square root has an infinite slope at distance 0; the subgradient there is 0."""
    mean = torch.randn(3, 4, generator=seeded()).requires_grad_()
    log_var = torch.full((3, 4), -80.0, requires_grad=True)
    z = Gaussian(mean, log_var)
    value = measures.pairwise_log_match_probability(z, z, SCALE, BIAS, 2, seeded())
    assert value.isfinite().all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(value.diagonal().sum(), z))


def test_bad_arguments_say_what_to_do():
    with pytest.raises(ValueError, match="samples is 0: give at least 1"):
        measures.match_probability(gaussian(2, 3), gaussian(2, 3), SCALE, BIAS, samples=0)
    with pytest.raises(ValueError, match="last dimension D"):
        measures.match_probability(gaussian(2, 3), gaussian(2, 4), SCALE, BIAS)
    with pytest.raises(ValueError, match="flatten the leading dimensions"):
        measures.pairwise_match_probability(gaussian(3), gaussian(2, 3), SCALE, BIAS)
