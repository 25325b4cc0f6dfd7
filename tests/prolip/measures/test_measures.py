"""prolip.measures, pair by pair: every formula against an oracle that does not share its algebra."""

import itertools
import math

import mpmath
import pytest
import torch
from random_gaussians import gaussian
from torch.distributions import Independent, Normal, kl_divergence

from prolip import measures
from prolip.gaussian import Gaussian

LEVELS = (-40.0, -20.0, -10.0, 0.0, 10.0)
SYMMETRIC = ("csd_distance", "csd_similarity", "mean_cosine", "wasserstein2", "js", "elk", "bhattacharyya")
ZERO_AT_EQUALITY = ("wasserstein2", "kl", "js", "bhattacharyya", "inclusion_test")
# Narrow in wide, wide in narrow, equal widths, equal means, equal Gaussians, far apart.
PAIRS_1D = [(0.1, -2.0, -0.3, 0.5), (0.0, 1.0, 0.8, -1.5), (1.0, -1.0, -0.5, -1.0), (0.2, -1.0, 0.2, 0.7)]
PAIRS_1D += [(0.3, -0.5, 0.3, -0.5), (3.0, -1.0, -2.0, 0.3)]


def point(mean: float, log_var: float) -> Gaussian:
    return Gaussian(torch.tensor([mean], dtype=torch.float64), torch.tensor([log_var], dtype=torch.float64))


def integral(pair: tuple, power1: float, power2: float) -> float:
    """int p^power1 q^power2 of two one-dimensional densities, by adaptive quadrature."""
    m1, l1, m2, l2 = pair

    def density(x, mean, log_var):
        var = mpmath.exp(log_var)
        return mpmath.exp(-((x - mean) ** 2) / (2 * var)) / mpmath.sqrt(2 * mpmath.pi * var)

    def integrand(x):
        return density(x, m1, l1) ** power1 * density(x, m2, l2) ** power2

    edges = sorted({m1, m2, (m1 + m2) / 2, min(m1, m2) - 12, max(m1, m2) + 12})
    return mpmath.quad(integrand, [-mpmath.inf, *edges, mpmath.inf])


@pytest.mark.parametrize("pair", PAIRS_1D)
def test_integral_measures_match_quadrature(pair):
    p, q = point(*pair[:2]), point(*pair[2:])
    squared_first, squared_second = (math.log(integral(pair, *powers)) for powers in ((2, 1), (1, 2)))
    close = {"rel": 1e-9, "abs": 1e-9}
    assert measures.log_inclusion(p, q).item() == pytest.approx(squared_first + math.log(2 * math.pi), **close)
    assert measures.log_inclusion(q, p).item() == pytest.approx(squared_second + math.log(2 * math.pi), **close)
    assert measures.inclusion_test(p, q).item() == pytest.approx(squared_first - squared_second, **close)
    printed = squared_first - squared_second + 0.5 * (pair[3] - pair[1])
    assert measures.inclusion_test(p, q, form="printed").item() == pytest.approx(printed, **close)
    overlap = -math.log(integral(pair, 1, 1)) - 0.5 * math.log(2 * math.pi)
    assert measures.elk(p, q).item() == pytest.approx(overlap, **close)
    assert measures.bhattacharyya(p, q).item() == pytest.approx(-math.log(integral(pair, 0.5, 0.5)), **close)


def test_printed_form_follows_the_normalisation_that_the_paper_prints():
    """ProLIP (3) as printed: log(1/sqrt(A)) - 2 log v1 - log v2 + B^2/(4A) - C, its precisions read as 1/sigma^2."""
    p, q = gaussian(7, 3), gaussian(7, 3, seed=1)

    def printed(inner, outer):
        (m1, v1), (m2, v2) = (inner.mean, inner.var), (outer.mean, outer.var)
        a, b, c = 1 / v1 + 0.5 / v2, 2 * m1 / v1 + m2 / v2, m1**2 / v1 + 0.5 * m2**2 / v2
        return (-0.5 * a.log() - 2 * v1.log() - v2.log() + b**2 / (4 * a) - c).sum(-1)

    torch.testing.assert_close(measures.inclusion_test(p, q, form="printed"), printed(p, q) - printed(q, p))


@pytest.mark.parametrize("eps", [0.0, -10.0, -20.0])
def test_eps_scales_the_mean_distance_only(eps):
    p, q = gaussian(7, 3), gaussian(7, 3, seed=1)
    scale = math.exp(0.5 * eps)
    shrunk_p, shrunk_q = Gaussian(p.mean * scale, p.log_var), Gaussian(q.mean * scale, q.log_var)
    for f in (measures.log_inclusion, measures.inclusion_test):
        torch.testing.assert_close(f(p, q, eps=eps), f(shrunk_p, shrunk_q))


def test_inclusion_test_is_the_difference_of_log_inclusions_and_the_sum_over_dimensions():
    p, q = gaussian(9, 4), gaussian(9, 4, seed=1)
    for eps in (0.0, -3.0):
        expected = measures.log_inclusion(p, q, eps) - measures.log_inclusion(q, p, eps)
        torch.testing.assert_close(measures.inclusion_test(p, q, eps), expected)
        per_dim = measures.inclusion_test_per_dim(p, q, eps)
        assert per_dim.shape == (9, 4)
        torch.testing.assert_close(per_dim.sum(-1), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("spread", [1e-6, 1e-2, 1.0, 15.0])
def test_inclusion_test_is_antisymmetric_bit_for_bit(dtype, spread):
    generator = torch.Generator().manual_seed(5)
    m1, m2, l1, l2 = (torch.randn(1001, 13, generator=generator, dtype=dtype) for _ in range(4))
    p, q = Gaussian(m1, spread * l1 - 10), Gaussian(m2, spread * l2 - 10)
    for form in ("exact", "printed"):
        forth, back = measures.inclusion_test(p, q, form=form), measures.inclusion_test(q, p, form=form)
        assert torch.equal(forth, -back)
        assert forth.ne(0).all()


def test_kl_matches_torch_distributions_and_js_is_its_symmetric_mean():
    p, q = gaussian(11, 5), gaussian(11, 5, seed=1)
    torch_p, torch_q = (Independent(Normal(z.mean, z.var.sqrt()), 1) for z in (p, q))
    forth, back = kl_divergence(torch_p, torch_q), kl_divergence(torch_q, torch_p)
    torch.testing.assert_close(measures.kl(p, q), forth)
    torch.testing.assert_close(measures.js(p, q), (forth + back) / 2)


def test_csd_is_the_expected_squared_distance_of_samples():
    p, q, count = gaussian(6, 3), gaussian(6, 3, seed=1), 60_000
    generator = torch.Generator().manual_seed(6)
    squares = (p.sample(count, generator) - q.sample(count, generator)).square().sum(-1)
    standard_error = squares.std(0) / count**0.5
    assert ((squares.mean(0) - measures.csd_distance(p, q)).abs() < 5 * standard_error).all()


def test_csd_similarity_is_one_minus_half_csd_for_unit_means():
    p, q = gaussian(6, 3), gaussian(6, 3, seed=1)
    p, q = (Gaussian(torch.nn.functional.normalize(z.mean, dim=-1), z.log_var) for z in (p, q))
    torch.testing.assert_close(measures.csd_similarity(p, q), 1 - measures.csd_distance(p, q) / 2)


def test_wasserstein2_is_the_optimal_transport_of_sorted_samples():
    """The optimal plan in one dimension pairs equal quantiles: int (F1^-1 - F2^-1)^2."""
    p, q = point(0.4, -1.0), point(-0.7, 0.9)
    levels = (torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000
    quantiles = [Normal(z.mean, z.var.sqrt()).icdf(levels) for z in (p, q)]
    transport = (quantiles[0] - quantiles[1]).square().mean()
    assert measures.wasserstein2(p, q).item() == pytest.approx(transport.item(), rel=1e-4)


def test_mean_cosine_ignores_lengths_and_variances():
    p, q = gaussian(6, 3), gaussian(6, 3, seed=1)
    expected = (p.mean * q.mean).sum(-1) / (p.mean.norm(dim=-1) * q.mean.norm(dim=-1))
    torch.testing.assert_close(measures.mean_cosine(p, q), expected)


@pytest.mark.parametrize("name", ZERO_AT_EQUALITY)
@pytest.mark.parametrize("level", LEVELS)
def test_equal_gaussians_are_at_distance_exactly_zero_with_zero_gradient(name, level):
    z = gaussian(5, 8, dtype=torch.float32)
    z = Gaussian(z.mean.requires_grad_(), (z.log_var + level).requires_grad_())
    value = measures.MEASURES[name].paired(z, z.detach())
    assert value.eq(0).all()
    if name != "inclusion_test":  # a signed test: its slope at equality is not zero
        assert all(g.eq(0).all() for g in torch.autograd.grad(value.sum(), z))


@pytest.mark.parametrize("name", SYMMETRIC)
def test_symmetric_measures_are_symmetric_to_the_last_bit(name):
    p, q = gaussian(101, 7, dtype=torch.float32), gaussian(101, 7, seed=1, dtype=torch.float32)
    f = measures.MEASURES[name].paired
    assert torch.equal(f(p, q), f(q, p))


def high_precision(name: str, m1: float, l1: float, m2: float, l2: float) -> float:
    """The definitions of spec section 2, one dimension, 60 digits: cancellation does not matter there."""
    with mpmath.workdps(60):
        m1, l1, m2, l2 = map(mpmath.mpf, (m1, l1, m2, l2))
        v1, v2, d = mpmath.exp(l1), mpmath.exp(l2), (m1 - m2) ** 2
        forth, back = ((v1 / v2 + d / v2 - 1 + l2 - l1) / 2, (v2 / v1 + d / v1 - 1 + l1 - l2) / 2)
        value = {
            "wasserstein2": lambda: d + (mpmath.sqrt(v1) - mpmath.sqrt(v2)) ** 2,
            "kl": lambda: forth,
            "js": lambda: (forth + back) / 2,
            "bhattacharyya": lambda: d / (v1 + v2) / 4 + mpmath.log((v1 + v2) / (2 * mpmath.sqrt(v1 * v2))) / 2,
            "inclusion_test": lambda: (
                (l2 - l1 + mpmath.log(v2 + 2 * v1) - mpmath.log(v1 + 2 * v2)) / 2
                - d / (v1 + 2 * v2)
                + d / (v2 + 2 * v1)
            ),
        }
        return float(value[name]())


@pytest.mark.parametrize("name", ZERO_AT_EQUALITY)
@pytest.mark.parametrize("dtype,rtol", [(torch.float32, 1e-5), (torch.float64, 2e-14)])
def test_tiny_differences_of_the_log_variance_do_not_cancel(name, dtype, rtol):
    """Relative accuracy down to differences of one unit in the last place, across the switch of branches."""
    steps = torch.tensor([2e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.09, 0.11, 0.2, 0.3, 0.7, 2.0, 7.0], dtype=dtype)
    for level, sign, d in itertools.product((-10.0, 0.0), (-1, 1), (0.0, 1e-4)):
        l1 = (level + sign * steps).unsqueeze(-1)
        p, q = Gaussian(torch.full_like(l1, d), l1), Gaussian(torch.zeros_like(l1), torch.full_like(l1, level))
        value = measures.MEASURES[name].paired(p, q)
        gap = p.mean[0].item()
        expected = [high_precision(name, gap, x.item(), 0.0, level) for x in l1]
        torch.testing.assert_close(value, torch.tensor(expected, dtype=dtype), rtol=rtol, atol=0)


def values_and_gradients(name: str, p: Gaussian, q: Gaussian) -> list[torch.Tensor]:
    leaves = [x.clone().requires_grad_() for x in (*p, *q)]
    value = measures.MEASURES[name].paired(Gaussian(*leaves[:2]), Gaussian(*leaves[2:]))
    grads = torch.autograd.grad(value.sum(), leaves, materialize_grads=True)
    return [value.detach(), *grads]


@pytest.mark.parametrize("jitter", [0.0, 1e-3, 0.3])
@pytest.mark.parametrize("name", measures.MEASURES)
def test_float32_values_and_gradients_match_float64_at_extreme_variances(name, jitter):
    """Every combination of LEVELS: relative error at most 1e-5, of each value and of each component of the gradient.

    elk and log_inclusion add a logarithm to a distance and may cross zero: 2e-6 absolute there.
    """
    rows = list(itertools.product(LEVELS, LEVELS, (0.0, 0.03, 0.7, -1.7)))
    l1, l2, d = torch.tensor(rows).unsqueeze(-1).unbind(1)
    l1 = l1 + jitter * torch.randn(l1.shape, generator=torch.Generator().manual_seed(7))
    p, q = Gaussian(torch.zeros_like(d), l1), Gaussian(d, l2)
    low = values_and_gradients(name, p, q)
    high = values_and_gradients(name, p.to(torch.float64), q.to(torch.float64))
    atol = 2e-6 if name in ("elk", "log_inclusion") else 1e-30
    for a, b in zip(low, high):
        assert a.isfinite().all()
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=atol)


@pytest.mark.parametrize("name", ["kl", "wasserstein2", "inclusion_test", "bhattacharyya"])
def test_gradients_in_float64_at_and_around_equal_variances(name):
    """The branches of the stable forms meet at log-variance differences 0, 0.05, 0.15 and 0.6."""
    log_var = torch.tensor([[0.0, 0.05, 0.15, 0.6]], dtype=torch.float64)
    mean = torch.tensor([[0.3, -0.1, 0.5, 0.2]], dtype=torch.float64)
    f = measures.MEASURES[name].paired
    leaves = [mean.requires_grad_(), log_var.requires_grad_()]
    assert torch.autograd.gradcheck(lambda m, v: f(Gaussian(m, v), Gaussian(m.detach() * 0, v.detach() * 0)), leaves)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", measures.MEASURES)
def test_half_precision_inputs_are_computed_in_float32(name, dtype):
    p, q = gaussian(5, 16, dtype=dtype), gaussian(5, 16, seed=1, dtype=dtype)
    m = measures.MEASURES[name]
    for f in (m.paired, m.pairwise):
        value = f(p, q)
        assert value.dtype == torch.float32
        assert torch.equal(value, f(p.float(), q.float()))
    leaf = p.mean.clone().requires_grad_()
    (m.paired(Gaussian(leaf, p.log_var), q).sum() + leaf.sum()).backward()
    assert leaf.grad.dtype == dtype
    assert leaf.grad.isfinite().all()


@pytest.mark.parametrize("name", measures.MEASURES)
def test_leading_dimensions_broadcast(name):
    p, q = gaussian(4, 1, 3), gaussian(5, 3, seed=1)
    f = measures.MEASURES[name].paired
    expected = torch.stack([torch.stack([f(p.select((i, 0)), q.select(j)) for j in range(5)]) for i in range(4)])
    torch.testing.assert_close(f(p, q), expected)
    assert f(gaussian(0, 3), gaussian(1, 3)).shape == (0,)
    assert f(gaussian(3), gaussian(3)).shape == ()


def test_shapes_that_do_not_fit_say_what_to_do():
    with pytest.raises(ValueError, match=r"\(5, 3\) and \(5, 4\) differ in their last dimension D"):
        measures.kl(gaussian(5, 3), gaussian(5, 4))
    with pytest.raises(ValueError, match="last dimension D"):
        measures.csd_distance(gaussian(5, 3), gaussian(5, 1))
    with pytest.raises(ValueError, match="use the pairwise_ function"):
        measures.js(gaussian(5, 3), gaussian(4, 3))
    with pytest.raises(ValueError, match="expand log_var"):
        measures.elk(Gaussian(torch.zeros(5, 3), torch.zeros(5, 1)), gaussian(5, 3))
    with pytest.raises(ValueError, match="'exact', 'printed'"):
        measures.inclusion_test(gaussian(5, 3), gaussian(5, 3), form="Exact")


def test_measures_are_found_by_name_and_unknown_names_list_the_near_ones():
    assert measures.get_measure("csd_distance").paired is measures.csd_distance
    with pytest.raises(ValueError, match="did you mean wasserstein2"):
        measures.get_measure("wasserstein")
    with pytest.raises(ValueError, match="mean_cosine"):
        measures.get_measure("cosine")
    with pytest.raises(ValueError, match="known are csd_distance, "):
        measures.get_measure("zzz")
