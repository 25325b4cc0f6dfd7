"""PPCL and the sigmoid loss of other factors against direct formulas: gradients, dtypes, extremes and memory."""

from __future__ import annotations

import math

import pytest
import torch
from loss_cases import (
    DOUBLE,
    assert_same_value_and_gradients,
    brute_mask,
    brute_ppcl,
    gaussian,
    leaves_of,
    scalars,
    some_matches,
)
from open_clip.loss import SigLipLoss
from torch import Tensor
from torch.autograd import gradcheck
from torch.utils._python_dispatch import TorchDispatchMode

from prolip.gaussian import Gaussian
from prolip.losses import Matches, inclusion_loss, ppcl, vib


@pytest.mark.parametrize("labelled", [False, True])
@pytest.mark.parametrize("block", [None, 1, 3, 7, 100])
def test_ppcl_equals_the_double_sum_in_value_and_every_gradient(block, labelled):
    image, text, (scale, bias) = gaussian(7, 5, 0), gaussian(7, 5, 1), scalars()
    labels = some_matches(7) if labelled else None
    assert not labelled or brute_mask(labels, 7).sum() > 7
    got = ppcl(image, text, scale, bias, labels, block)
    want = brute_ppcl(image, text, scale, bias, labels)
    assert_same_value_and_gradients(got, want, leaves_of(image, text, scale, bias))


def test_ppcl_passes_gradcheck():
    image, text = gaussian(4, 3, 2), gaussian(4, 3, 3)
    labels = some_matches(4)

    def run(a, b, c, d, scale, bias):
        return ppcl(Gaussian(a, b), Gaussian(c, d), scale, bias, labels, block=3)

    assert gradcheck(run, leaves_of(image, text, *scalars()))


@pytest.mark.parametrize("needed", range(6))
def test_ppcl_gives_the_one_gradient_that_is_needed(needed):
    image, text, (scale, bias) = gaussian(5, 4, 4), gaussian(5, 4, 5), scalars()
    leaves = leaves_of(image, text, scale, bias)
    (want,) = torch.autograd.grad(brute_ppcl(image, text, scale, bias), leaves[needed])
    kept = [x if i == needed else x.detach() for i, x in enumerate(leaves)]
    loss = ppcl(Gaussian(*kept[:2]), Gaussian(*kept[2:4]), *kept[4:], block=2)
    (got,) = torch.autograd.grad(loss, kept[needed])
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_ppcl_refuses_second_derivatives_instead_of_leaving_them_out(factor):
    """Also where the gradient that comes in is a constant, with which the kept ones would pass for constants too."""
    image, text, (scale, bias) = gaussian(5, 4, 4), gaussian(5, 4, 5), scalars()
    for weight in (factor, factor * scale):
        loss = ppcl(image, text, scale, bias) * weight
        with pytest.raises(RuntimeError, match="ppcl are differentiable only once.*remove create_graph=True"):
            torch.autograd.grad(loss, image.mean, create_graph=True)


def test_ppcl_compiles_as_one_graph_with_its_gradients():
    image, text, (scale, bias) = gaussian(5, 4, 4), gaussian(5, 4, 5), scalars()
    leaves = leaves_of(image, text, scale, bias)
    compiled = torch.compile(
        lambda a, b, c, d, s, t: ppcl(Gaussian(a, b), Gaussian(c, d), s, t), backend="aot_eager", fullgraph=True
    )
    assert_same_value_and_gradients(compiled(*leaves), ppcl(image, text, scale, bias), leaves)


def test_ppcl_equals_open_clips_siglip_loss_when_traces_vanish():
    image, text, (scale, bias) = gaussian(6, 5, 8), gaussian(6, 5, 9), scalars()
    points = [Gaussian(z.mean, torch.full_like(z.mean, -math.inf)) for z in (image, text)]
    want = SigLipLoss()(image.mean, text.mean, scale, bias)
    assert_same_value_and_gradients(ppcl(*points, scale, bias), want, [image.mean, text.mean, scale, bias])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_losses_run_in_float32_on_low_precision_inputs_under_autocast(dtype):
    low = [gaussian(8, 16, seed, dtype) for seed in (12, 13)]
    high = [Gaussian(*(x.detach().float().requires_grad_() for x in z)) for z in low]
    scale, bias = scalars(torch.float32)
    for loss in (lambda z: ppcl(*z, scale, bias), lambda z: inclusion_loss(*z), lambda z: vib(z[0])):
        want = loss(high)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = loss(low)
            still = loss(high)
        assert got.dtype == torch.float32 and torch.equal(got, want) and torch.equal(still, want)
        wanted = torch.autograd.grad(want, high[0].log_var)[0]
        found = torch.autograd.grad(got, low[0].log_var)[0]
        assert found.dtype == dtype and torch.equal(found, wanted.to(dtype))


@pytest.mark.parametrize("log_var", [-40.0, 0.0, 10.0])
@pytest.mark.parametrize("scale", [0.0, 10.0, 100.0])
def test_ppcl_is_finite_and_right_at_extreme_variances(log_var, scale):
    image, text = (
        Gaussian(z.mean, (z.log_var * 0 + log_var).detach().requires_grad_())
        for z in (gaussian(6, 8, 18, torch.float32), gaussian(6, 8, 19, torch.float32))
    )
    a, b = scalars(torch.float32, scale, -10.0)
    loss = ppcl(image, text, a, b)
    grads = torch.autograd.grad(loss, leaves_of(image, text, a, b))
    exact = [Gaussian(*(x.detach().double().requires_grad_() for x in z)) for z in (image, text)]
    exact += scalars(DOUBLE, scale, -10.0)
    want = brute_ppcl(*exact)
    torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=0)
    for got, wanted in zip(grads, torch.autograd.grad(want, leaves_of(*exact))):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-3, atol=1e-6 * float(wanted.abs().max()))


def test_ppcl_keeps_the_gradient_of_pairs_far_on_the_right_side():
    """Well separated pairs have gradients near exp(-|logit|), which 1 - sigmoid would round to nothing."""
    image = Gaussian(torch.eye(2).requires_grad_(), torch.full((2, 2), -math.inf))
    loss = ppcl(image, image.detach(), 80.0, -40.0)
    torch.testing.assert_close(loss.detach(), torch.tensor(2 * math.log1p(math.exp(-40))), rtol=1e-5, atol=0)
    grad = torch.autograd.grad(loss, image.mean)[0]
    torch.testing.assert_close(grad, 40 * math.exp(-40) * (1 - 2 * torch.eye(2)), rtol=1e-5, atol=0)


@pytest.mark.parametrize("wrong", [21.5, 90.0, 800.0])
def test_ppcl_of_a_pair_on_the_wrong_side_keeps_its_last_digits_in_float64(wrong):
    z = gaussian(1, 3, 0)
    want = torch.tensor(wrong + math.log1p(math.exp(-wrong)), dtype=DOUBLE)
    torch.testing.assert_close(ppcl(z, z, 0.0, -wrong).detach(), want, rtol=1e-15, atol=0)


class Allocations(TorchDispatchMode):
    """Elements of the largest tensor that any operation made."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, Tensor):
                self.largest = max(self.largest, x.untyped_storage().nbytes() // x.element_size())
        return out


@pytest.mark.parametrize("labelled", [False, True])
def test_ppcl_makes_and_keeps_no_matrix_of_all_pairs(labelled):
    rows, dim, block = 64, 4, 8
    image, text, (scale, bias) = gaussian(rows, dim, 20), gaussian(rows, dim, 21), scalars()
    labels = some_matches(rows, width=16) if labelled else None
    kept: list[Tensor] = []
    with Allocations() as made, torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        ppcl(image, text, scale, bias, labels, block).backward()
    assert made.largest == max(block * rows, 16 * rows if labelled else 0) < rows * rows
    # Gradients of means (2 B D), exp(log_var) of both traces (2 B D), gradients of traces, and scalars.
    assert sum(x.numel() for x in kept) <= 4 * rows * dim + 2 * rows + 8


def test_ppcl_refuses_what_does_not_fit():
    """A negative block would score no pair at all, and give 0."""
    z, (whole, floats) = gaussian(3, 4, 0), (torch.zeros(3, 1).long(), torch.zeros(3))
    for error, words, text, more in (
        (ValueError, r"ppcl got .*give \(B, D\)", gaussian(4, 4, 1), {}),
        (ValueError, "differ in their last dimension D", gaussian(3, 5, 1), {}),
        (ValueError, "block is -1: give 1 or more", z, {"block": -1}),
        (ValueError, r"scale must be one number, got a tensor of shape \(2,\)", z, {"scale": torch.ones(2)}),
        (ValueError, r"labels got .*give \(3, K\)", z, {"labels": Matches(whole[:2], floats.long())}),
        (TypeError, r"prolip.losses.Matches\(image, text\) with ids in torch", z, {"labels": Matches(whole, floats)}),
        (TypeError, r"prolip.losses.Matches\(image, text\) with ids in torch", z, {"labels": torch.eye(3)}),
    ):
        with pytest.raises(error, match=words):
            ppcl(z, text, **{"scale": 1.0, "bias": 0.0} | more)
