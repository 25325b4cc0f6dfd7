"""Inclusion and VIB against direct formulas in float64, their gradients and extremes."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from loss_cases import assert_same_value_and_gradients, gaussian, leaves_of
from torch import Tensor
from torch.autograd import gradcheck
from torch.distributions import Normal, kl_divergence

from prolip.gaussian import Gaussian
from prolip.losses import inclusion_loss, vib


def direct_h(inner: Gaussian, outer: Gaussian, eps: float, printed: bool) -> Tensor:
    """H per dimension from the integrals' closed forms as the specification writes them (section 2)."""

    def log_inclusion(p: Gaussian, q: Gaussian) -> Tensor:
        wide = p.var + 2 * q.var
        return -p.log_var / 2 - wide.log() / 2 - math.exp(eps) * (p.mean - q.mean) ** 2 / wide

    h = log_inclusion(inner, outer) - log_inclusion(outer, inner)
    return h + (outer.log_var - inner.log_var) / 2 if printed else h


@pytest.mark.parametrize("form", ["exact", "printed"])
@pytest.mark.parametrize("reduction", ["dim", "pair"])
@pytest.mark.parametrize("scale,eps", [(10.0, -10.0), (1000.0, -20.0), (0.5, 0.0)])
def test_inclusion_loss_equals_the_specified_formula(form, reduction, scale, eps):
    inner, outer = gaussian(5, 4, 22), gaussian(5, 4, 23, log_var=-1.5)
    h = direct_h(inner, outer, eps, form == "printed")
    want = -F.logsigmoid(scale * (h if reduction == "dim" else h.sum(-1))).mean()
    got = inclusion_loss(inner, outer, scale, eps, form, reduction)
    assert_same_value_and_gradients(got, want, leaves_of(inner, outer), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("form", ["exact", "printed"])
@pytest.mark.parametrize("reduction", ["dim", "pair"])
def test_inclusion_loss_passes_gradcheck(form, reduction):
    def run(a, b, c, d):
        return inclusion_loss(Gaussian(a, b), Gaussian(c, d), 2.0, 0.0, form, reduction)

    assert gradcheck(run, leaves_of(gaussian(3, 4, 24), gaussian(3, 4, 25)))


@pytest.mark.parametrize("reduction", ["dim", "pair"])
def test_an_empty_batch_gives_zero_with_a_graph_and_an_unknown_reduction_is_refused(reduction):
    inner, outer = gaussian(0, 4, 0), gaussian(0, 4, 1)
    with pytest.raises(ValueError, match="reduction 'sum' is unknown: use 'dim' or 'pair'"):
        inclusion_loss(inner, outer, reduction="sum")
    loss = inclusion_loss(inner, outer, reduction=reduction) + vib(inner)
    loss.backward()
    assert loss.item() == 0
    assert inner.log_var.grad is not None and inner.log_var.grad.shape == (0, 4)


def test_vib_equals_the_kl_to_a_standard_normal_per_dimension():
    z = gaussian(6, 5, 30, log_var=0.5)
    normal = Normal(z.mean, (z.log_var / 2).exp())
    want = kl_divergence(normal, Normal(torch.zeros_like(z.mean), torch.ones_like(z.mean))).mean()
    assert_same_value_and_gradients(vib(z), want, leaves_of(z))


def test_vib_keeps_its_digits_near_the_standard_normal():
    """The loss at log_var = 1e-3 is log_var^2 / 4 to first order, which v - log v - 1 loses in float32."""
    log_var = torch.full((2, 3), 1e-3)
    z = Gaussian(torch.zeros(2, 3), log_var)
    exact = 0.5 * (math.expm1(1e-3) - 1e-3)
    torch.testing.assert_close(vib(z), torch.tensor(exact), rtol=2e-4, atol=0)
    assert vib(Gaussian(torch.zeros(2, 3), torch.zeros(2, 3))) == 0


def test_inclusion_and_vib_are_finite_at_extreme_variances():
    for low, high in [(-40.0, 10.0), (10.0, -40.0), (-40.0, -40.0), (10.0, 10.0)]:
        inner, outer = (Gaussian(F.normalize(torch.randn(3, 4), dim=-1), torch.full((3, 4), v)) for v in (low, high))
        for z in (*inner, *outer):
            z.requires_grad_()
        loss = inclusion_loss(inner, outer, 1000.0, -20.0) + inclusion_loss(inner, outer, 10.0, 0.0) + vib(inner)
        grads = torch.autograd.grad(loss, leaves_of(inner, outer))
        assert loss.isfinite() and all(g.isfinite().all() for g in grads)


def test_tensors_without_values_are_taken():
    z = Gaussian(*torch.zeros(2, 4, 8, device="meta"))
    assert all(loss.is_meta and loss.shape == () for loss in (vib(z), inclusion_loss(z, z)))
