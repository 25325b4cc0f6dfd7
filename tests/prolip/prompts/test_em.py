"""EM of all classes at once: what a loop over one class, prompt and point with torch.distributions gives."""

import math

import pytest
import torch
from torch.distributions import Dirichlet, Independent, Normal

from prolip.gaussian import Gaussian
from prolip.prompts import bprw
from prolip.prompts.bprw import fit_weights, inverse_traces, log_likelihoods


def problem(classes=5, prompts=4, dim=3, points=(7, 2, 0, 11, 1), seed=0):
    """Prompts that overlap, and points about them."""
    g = torch.Generator().manual_seed(seed)

    def noise(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    z = Gaussian(noise(classes, prompts, dim), 0.7 * noise(classes, prompts, dim) - 1)
    return z, [1.5 * noise(points[c % len(points)], dim) for c in range(classes)]


def normal(z, n, eps):
    return Independent(Normal(z.mean[n], (z.var[n] + eps).sqrt()), 1)


def by_hand(z, points, alpha, eps, start, steps):
    """One class by loops: the weights and the objective after each step, the start among them."""
    weights, found = start.clone(), []
    for _ in range(steps + 1):
        likelihood = torch.tensor(
            [[math.exp(normal(z, n, eps).log_prob(x)) for n in range(len(z.mean))] for x in points], dtype=torch.float64
        ).reshape(len(points), len(z.mean))
        objective = (likelihood @ weights).log().sum()
        objective += sum((a - 1) * w.log() for a, w in zip(alpha, weights) if w > 0)
        found.append((weights, objective))
        counts = torch.zeros(len(weights), dtype=torch.float64)
        for row in likelihood:
            counts += row * weights / (row * weights).sum()
        weights = (counts + alpha - 1).clamp(min=0)
        weights = weights / weights.sum()
    return found


def steps_of(z, points, alpha, eps, count):
    """The first steps of all classes by the module."""
    x = torch.nn.utils.rnn.pad_sequence(points, batch_first=True)
    observed = torch.arange(x.shape[1]) < torch.tensor([len(p) for p in points]).unsqueeze(1)
    found = bprw.em_steps(log_likelihoods(x, z, eps), alpha, inverse_traces(z), observed)
    return [next(found) for _ in range(count + 1)]


@pytest.mark.parametrize("eps", [0.0, 0.02])
def test_likelihoods_are_those_of_torch_distributions(eps):
    z, _ = problem(dim=300)
    z = Gaussian(z.mean + 40, z.log_var - 5)  # far from 0 and narrow, where a square alone would lose its digits
    x = z.mean[:, :2] + 0.1
    got = log_likelihoods(x, z, eps)
    want = torch.tensor([[[normal(z.select(c), n, eps).log_prob(p) for n in range(4)] for p in x[c]] for c in range(5)])
    torch.testing.assert_close(got, want.double(), rtol=1e-9, atol=1e-7)


@pytest.mark.parametrize("alpha", ["1", "own"])
def test_every_step_of_every_class_is_that_of_a_loop_whatever_the_number_of_points(alpha):
    z, points = problem()
    own = 1 + 3 * torch.rand(5, 4, dtype=torch.float64)
    alpha = own if alpha == "own" else torch.full((5, 4), float(alpha), dtype=torch.float64)
    got = steps_of(z, points, alpha, 0.05, 6)
    for c in (0, 1, 3, 4):
        want = by_hand(z.select(c), points[c], alpha[c], 0.05, inverse_traces(z)[c], 6)
        for (weights, objective), (w, o) in zip(got, want):
            torch.testing.assert_close(weights[c], w)
            torch.testing.assert_close(objective[c], o)
    for weights, _ in got[1:]:  # a class without points: the mode of its prior
        mode = (alpha[2] - 1) / (alpha[2] - 1).sum() if alpha[2].sum() > 4 else torch.full((4,), 0.25).double()
        torch.testing.assert_close(weights[2], mode)


def test_the_fit_is_the_maximum_over_all_weights_from_any_start():
    z, points = problem(seed=2)
    fit = fit_weights(z, points, 2.0, 0.02, tolerance=1e-12)
    assert fit.change <= 1e-12 and int(fit.steps.max()) < bprw.STEPS
    g = torch.Generator().manual_seed(0)
    start = torch.rand(5, 4, generator=g, dtype=torch.float64) + 0.01
    again = fit_weights(z, points, 2.0, 0.02, start / start.sum(1, keepdim=True), tolerance=1e-12)
    torch.testing.assert_close(again.weights, fit.weights, atol=1e-9, rtol=0)
    for _ in range(5):  # a strictly concave objective: no other weights are better
        other = Dirichlet(torch.ones(5, 4).double()).sample()
        mixed = 0.7 * fit.weights + 0.3 * other
        likelihood = torch.nn.utils.rnn.pad_sequence(points, batch_first=True)
        for c in (0, 1, 3, 4):
            density = log_likelihoods(likelihood[c : c + 1, : len(points[c])], z.select(slice(c, c + 1)), 0.02)[0].exp()
            assert (density @ mixed[c]).log().sum() + mixed[c].log().sum() <= fit.objective[c] + 1e-9


def test_many_classes_in_parts_are_the_same_as_one_after_the_other(monkeypatch):
    z, points = problem(classes=7)
    whole = fit_weights(z, points, 2.0, 0.02)
    monkeypatch.setattr(bprw, "CLASSES", 3)
    parts = fit_weights(z, iter(points), 2.0, 0.02)
    torch.testing.assert_close(parts.weights, whole.weights, atol=1e-5, rtol=0)  # which end a step sooner or later
    one = [fit_weights(z.select(slice(c, c + 1)), [points[c]], 2.0, 0.02) for c in range(7)]
    torch.testing.assert_close(torch.cat([fit.weights for fit in one]), parts.weights, atol=1e-5, rtol=0)
    assert parts.steps.tolist() == whole.steps.tolist() == [int(fit.steps) for fit in one]


def test_far_points_of_narrow_prompts_are_no_division_of_zero_by_zero():
    mean = torch.zeros(1, 3, 50)
    mean[0, 1], mean[0, 2] = 1, -1
    fit = fit_weights(Gaussian(mean, torch.full_like(mean, -12)), [torch.full((5, 50), 30.0)], 1.0)
    torch.testing.assert_close(fit.weights, torch.tensor([[0.0, 1.0, 0.0]]).double())


def test_an_alpha_below_one_leaves_prompts_out_and_the_rest_sums_to_one():
    mean = 10 * torch.eye(4).unsqueeze(0)
    z, points = Gaussian(mean, torch.full_like(mean, -2)), mean[0].repeat_interleave(torch.tensor([6, 3, 1, 0]), dim=0)
    for alpha, mass in ((0.5, [5.5, 2.5, 0.5, 0.0]), (3.0, [8.0, 5.0, 3.0, 2.0])):
        fit, want = fit_weights(z, [points], alpha), torch.tensor(mass, dtype=torch.float64)
        torch.testing.assert_close(fit.weights[0], want / want.sum(), atol=1e-9, rtol=0)
        assert fit.objective.isfinite().all()
    with pytest.raises(ValueError, match="could remove every prompt"):
        fit_weights(z, [points[:2]], 0.5)


def test_what_has_no_weights_is_refused():
    z, points = problem()
    for given, words in (
        ((z, points[:3], 2.0), "points of 3 classes for prompts of 5"),
        ((z, [*points, points[0]], 2.0), "more than classes"),
        ((z.select(0), points, 2.0), "give \\(classes, prompts, D\\)"),
        ((Gaussian(z.mean, torch.full_like(z.mean, -torch.inf)), points, 2.0), "trace of 0"),
    ):
        with pytest.raises(ValueError, match=words):
            fit_weights(*given)
    flat = Gaussian(z.mean, torch.full_like(z.mean, -torch.inf))
    even = torch.full((5, 4), 0.25)
    with pytest.raises(ValueError, match="variance of 0"):
        fit_weights(flat, points, 2.0, start=even)
    assert fit_weights(flat, points, 2.0, eps=0.1, start=even).weights.isfinite().all()
