"""prolip.gaussian: trace, samples, mixtures."""
import pytest
import torch

from prolip.gaussian import Gaussian, concatenate, mixture, upcast


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Gaussian:
    generator = torch.Generator().manual_seed(seed)
    mean, log_var = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return Gaussian(mean.to(dtype), (log_var - 1).to(dtype))


def test_trace_is_the_sum_of_the_variances_and_of_the_covariance_of_samples():
    z = gaussian(3, 5)
    expected = [sum(torch.exp(v).item() for v in row) for row in z.log_var]
    torch.testing.assert_close(z.trace, torch.tensor(expected, dtype=torch.float64))
    points = z.sample(40_000, torch.Generator().manual_seed(1))
    torch.testing.assert_close(points.var(0).sum(-1), z.trace, rtol=0.03, atol=0)
    torch.testing.assert_close(z.var, z.log_var.exp())


def test_trace_of_half_precision_is_accumulated_in_float32():
    log_var = torch.full((2, 768), -10.0, dtype=torch.bfloat16)
    trace = Gaussian(torch.zeros_like(log_var), log_var).trace
    assert trace.dtype == torch.float32
    torch.testing.assert_close(trace, 768 * torch.full((2,), -10.0).exp(), rtol=1e-6, atol=0)


def test_samples_have_the_moments_of_the_gaussian():
    z, count = gaussian(4, 3), 40_000
    points = z.sample(count, torch.Generator().manual_seed(2))
    assert points.shape == (count, 4, 3)
    standard_error = (z.var / count).sqrt()
    assert ((points.mean(0) - z.mean).abs() < 5 * standard_error).all()
    torch.testing.assert_close(points.var(0), z.var, rtol=5 * (2 / count) ** 0.5, atol=0)


def test_samples_are_reproducible_and_differentiable():
    mean, log_var = (x.clone().requires_grad_() for x in gaussian(2, 3))

    def draw(mean, log_var):
        return Gaussian(mean, log_var).sample(4, torch.Generator().manual_seed(3))

    assert torch.equal(draw(mean, log_var), draw(mean, log_var))
    assert not torch.equal(draw(mean, log_var), Gaussian(mean, log_var).sample(4, torch.Generator().manual_seed(4)))
    assert torch.autograd.gradcheck(draw, (mean, log_var))


def test_half_precision_becomes_float32_and_float64_stays():
    assert gaussian(2, 3, dtype=torch.bfloat16).float().mean.dtype == torch.float32
    assert gaussian(2, 3, dtype=torch.float16).float().log_var.dtype == torch.float32
    assert gaussian(2, 3).float().log_var.dtype == torch.float64
    assert upcast(torch.ones(1, dtype=torch.float64)).dtype == torch.float64


def test_select_to_detach_and_concatenate_keep_both_tensors_together():
    z = gaussian(4, 3)
    rows = torch.tensor([2, 0])
    assert torch.equal(z.select(rows).mean, z.mean[rows])
    assert torch.equal(z.select(rows).log_var, z.log_var[rows])
    assert z.to(torch.float32).log_var.dtype == z.to(torch.float32).mean.dtype == torch.float32
    graph = Gaussian(z.mean.clone().requires_grad_(), z.log_var.clone().requires_grad_())
    assert not graph.detach().mean.requires_grad
    assert not graph.detach().log_var.requires_grad
    joined = concatenate(z.select(slice(i, i + 2)) for i in (0, 2))
    assert torch.equal(joined.mean, z.mean)
    assert torch.equal(joined.log_var, z.log_var)
    with pytest.raises(ValueError, match="give at least one"):
        concatenate([])


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
def test_mixture_is_the_weighted_average_of_means_and_variances(lead):
    z = gaussian(*lead, 5, 4)
    weights = torch.rand(*lead, 5, dtype=torch.float64).softmax(-1)
    out = mixture(z, weights, normalise=False)
    torch.testing.assert_close(out.mean, torch.einsum("...n,...nd->...d", weights, z.mean))
    torch.testing.assert_close(out.var, torch.einsum("...n,...nd->...d", weights, z.var))
    uniform = mixture(z, normalise=False)
    torch.testing.assert_close(uniform.mean, z.mean.mean(-2))
    torch.testing.assert_close(uniform.var, z.var.mean(-2))


def test_mixture_brings_the_mean_back_to_unit_length_unless_told_not_to():
    z = gaussian(3, 5, 4)
    unit, plain = mixture(z), mixture(z, normalise=False)
    torch.testing.assert_close(unit.mean.norm(dim=-1), torch.ones(3, dtype=torch.float64))
    torch.testing.assert_close(unit.mean, plain.mean / plain.mean.norm(dim=-1, keepdim=True))
    assert torch.equal(unit.log_var, plain.log_var)


def test_mixture_of_one_prompt_is_that_prompt():
    z = gaussian(3, 1, 4)
    out = mixture(z, normalise=False)
    assert torch.equal(out.mean, z.mean[:, 0])
    assert torch.equal(out.log_var, z.log_var[:, 0])


def test_the_mixture_of_points_is_a_point():
    """Models without variances have log_var = -inf: classes of theirs are points too."""
    points = Gaussian(torch.randn(2, 3, 4), torch.full((2, 3, 4), -torch.inf))
    mixed = mixture(points)
    torch.testing.assert_close(mixed.mean, torch.nn.functional.normalize(points.mean.mean(1), dim=-1))
    assert mixed.log_var.isneginf().all()
    one = Gaussian(points.mean, points.log_var.clone().index_fill_(1, torch.tensor(1), -3.0))  # beside a Gaussian
    torch.testing.assert_close(mixture(one).var, torch.full((2, 4), torch.tensor(-3.0).exp().item() / 3))


def test_mixture_gradients_are_right_also_at_weights_of_exactly_zero():
    mean, log_var = (x.clone().requires_grad_() for x in gaussian(2, 4, 3))
    weights = torch.tensor([[0.0, 0.5, 0.5, 0.0], [0.1, 0.2, 0.3, 0.4]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda m, v, w: mixture(Gaussian(m, v), w), (mean, log_var, weights))


def test_a_prompt_of_weight_zero_counts_for_nothing_however_wide_it_is():
    log_var = torch.tensor([[10.0], [-40.0], [-39.0]])
    log_var, mean = log_var.expand(3, 2).clone().requires_grad_(), torch.randn(3, 2, requires_grad=True)
    weights = torch.tensor([0.0, 0.25, 0.75], requires_grad=True)
    out = mixture(Gaussian(mean, log_var), weights, normalise=False)
    expected = mixture(Gaussian(mean[1:], log_var[1:]), weights[1:], normalise=False)
    torch.testing.assert_close(out.mean, expected.mean)
    torch.testing.assert_close(out.log_var, expected.log_var, rtol=1e-6, atol=0)
    (out.mean.sum() + out.log_var.sum()).backward()
    assert all(x.grad.isfinite().all() for x in (mean, log_var, weights))
    assert log_var.grad[0].eq(0).all()


@pytest.mark.parametrize("level", [-40.0, -20.0, -10.0, 0.0, 10.0])
def test_mixture_in_float32_matches_float64_at_extreme_variances(level):
    z = gaussian(6, 5, seed=4)
    z = Gaussian(z.mean, z.log_var + level).to(torch.float32)
    low, high = mixture(z), mixture(z.to(torch.float64))
    torch.testing.assert_close(low.to(torch.float64).log_var, high.log_var, rtol=0, atol=5e-6)
    torch.testing.assert_close(low.to(torch.float64).mean, high.mean, rtol=0, atol=1e-6)


def test_mixture_refuses_no_prompts_and_weights_of_another_shape():
    with pytest.raises(ValueError, match=r"N >= 1, got \(3, 0, 4\)"):
        mixture(gaussian(3, 0, 4))
    with pytest.raises(ValueError, match=r"N >= 1, got \(4,\)"):
        mixture(gaussian(4))
    with pytest.raises(ValueError, match=r"weights \(5,\) do not fit prompts \(2, 5\)"):
        mixture(gaussian(2, 5, 4), torch.full((5,), 0.2))
