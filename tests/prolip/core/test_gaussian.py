"""prolip.gaussian: trace, samples, mixtures."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from random_gaussians import gaussian
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from prolip.gaussian import Gaussian, concatenate, mixture


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


def test_select_to_detach_and_concatenate_keep_both_tensors_together():
    z = gaussian(4, 3)
    rows = torch.tensor([2, 0])
    assert all(torch.equal(x, whole[rows]) for x, whole in zip(z.select(rows), z))
    assert z.to(torch.float32).log_var.dtype == z.to(torch.float32).mean.dtype == torch.float32
    graph = Gaussian(z.mean.clone().requires_grad_(), z.log_var.clone().requires_grad_())
    assert not any(x.requires_grad for x in graph.detach())
    joined = concatenate(z.select(slice(i, i + 2)) for i in (0, 2))
    assert torch.equal(joined.mean, z.mean) and torch.equal(joined.log_var, z.log_var)
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
    with pytest.raises(ValueError, match=r"weights, a Tensor \(5,\) .*, do not match prompts \(2, 5\)"):
        mixture(gaussian(2, 5, 4), torch.full((5,), 0.2))
    for weights in ([1.5, -0.5], [2.0, 1.0], [0.5, 0.4], [float("nan"), 1.0]):
        with pytest.raises(ValueError, match="negative or do not sum to one"):
            mixture(gaussian(2, 4), torch.tensor(weights))
    assert mixture(gaussian(1000, 4), torch.full((1000,), 1e-3).half()).mean.isfinite().all()


# --- a tuple for all that takes tuples apart, and for nothing else ----------------------------------------------------
# Gaussian(1.0, 2.0) as pickled before it refused anything, by protocols 2 and 5.
OLD_PICKLES = (
    b"\x80\x02cprolip.gaussian\nGaussian\nq\x00G?\xf0\x00\x00\x00\x00\x00\x00G@\x00\x00\x00\x00\x00\x00\x00\x86q\x01\x81"
    b"q\x02.",
    b"\x80\x05\x956\x00\x00\x00\x00\x00\x00\x00\x8c\x0fprolip.gaussian\x94\x8c\x08Gaussian\x94\x93\x94G?\xf0\x00\x00\x00"
    b"\x00\x00\x00G@\x00\x00\x00\x00\x00\x00\x00\x86\x94\x81\x94.",
)


@pytest.mark.parametrize(
    "call, remedy",
    [
        (lambda z: z / z.norm(dim=-1, keepdim=True), "already have unit length"),
        (lambda z: torch.nn.functional.normalize(z, dim=-1), "already have unit length"),
        (lambda z: z.T, "pairwise_csd_similarity"),
        (lambda z: z.cpu(), r"z.to\("),
        (lambda z: z.shape, "z.mean and z.log_var"),
        (lambda z: z.variance, "a Gaussian has no 'variance'"),
    ],
)
def test_what_tensors_have_is_refused_with_where_it_is(call, remedy):
    with pytest.raises(AttributeError, match=remedy):
        call(gaussian(3, 4))
    assert not hasattr(gaussian(3, 4), "norm") and getattr(gaussian(3, 4), "shape", None) is None


def test_operators_comparisons_and_rows_of_a_tuple_are_refused_with_what_to_write():
    z, other = gaussian(3, 4), gaussian(3, 4, seed=1)
    for call in (lambda: z * 2, lambda: 2 * z, lambda: z + other, lambda: z.mean * z, lambda: sum([z, other])):
        with pytest.raises(TypeError, match=r"a Gaussian has no operator [+*]: .*prolip.gaussian"):
            call()
    for call in (lambda: z == other, lambda: z < z.mean, lambda: z != tuple(z), lambda: z.mean in z):
        with pytest.raises(TypeError, match="no operator .*torch.equal.*prolip.measures.csd_distance"):
            call()
    for index in (slice(2), None, True, torch.tensor(0), np.int64(0), "mean"):
        with pytest.raises(TypeError, match=r"indices 0 \(mean\) and 1 \(log_var\): take rows with z.select"):
            z[index]
    with pytest.raises(TypeError, match="one array"):
        np.asarray(z)
    mean, log_var = z
    assert z[0] is mean is z[-2] and z[1] is log_var and len(z) == 2 and (z == None) is False  # noqa: E711


@pytest.mark.parametrize("old", OLD_PICKLES)
def test_gaussians_pickled_before_are_read(old):
    z = pickle.loads(old)
    assert isinstance(z, Gaussian) and tuple(z) == (1.0, 2.0)


def test_copies_pickles_and_saved_files_hold_the_same_tensors(tmp_path):
    z = gaussian(3, 4)
    torch.save({"z": z}, tmp_path / "z.pt")
    copies = [copy.copy(z), copy.deepcopy(z), torch.load(tmp_path / "z.pt", weights_only=False)["z"]]
    copies += [pickle.loads(pickle.dumps(z, protocol)) for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1)]
    for twin in copies:
        assert type(twin) is Gaussian and torch.equal(twin.mean, z.mean) and torch.equal(twin.log_var, z.log_var)


def test_trees_keep_gaussians():
    z = gaussian(3, 4)
    doubled = tree_map(lambda x: 2 * x, {"z": [z]})["z"][0]
    assert isinstance(doubled, Gaussian) and torch.equal(doubled.log_var, 2 * z.log_var)
    leaves, spec = tree_flatten((z, 1))
    assert len(leaves) == 3 and isinstance(tree_unflatten(leaves, spec)[0], Gaussian)
    assert tree_map(lambda x: x.shape, z) is not None
    assert torch.utils.data.default_collate([z, z]).mean.shape == (2, 3, 4)


def test_compiled_functions_take_and_give_gaussians():
    def halve(z: Gaussian) -> tuple[Gaussian, torch.Tensor]:
        mean, log_var = z
        return Gaussian(mean / 2, log_var - math.log(4)).select(slice(0, 2)), z[0] + z.log_var

    z = gaussian(3, 4)
    compiled = torch.compile(halve, backend="eager", fullgraph=True)
    for _ in range(2):  # the second call passes the guards
        half, total = compiled(z)
        assert isinstance(half, Gaussian) and torch.equal(half.mean, z.mean[:2] / 2)
        assert torch.equal(total, z.mean + z.log_var)
    with pytest.raises(Exception, match="Gaussian|NamedTuple"):
        torch.compile(lambda z: z * 2, backend="eager", fullgraph=True)(z)
