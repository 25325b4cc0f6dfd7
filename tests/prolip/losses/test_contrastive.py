"""PPCL and the sigmoid loss of other factors against direct formulas: gradients, dtypes, extremes and memory."""

from __future__ import annotations

import math
import weakref

import pytest
import torch
import torch.nn.functional as F
from loss_cases import (
    DOUBLE,
    assert_same_value_and_gradients,
    brute_logits,
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
from prolip.losses import Matches, inclusion_loss, pairs, ppcl, vib
from prolip.losses.pairs import MIN_ROWS, PAIRS_CPU, default_block


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


def test_ppcl_backward_multiplies_by_grad_output_each_time():
    image, text, (scale, bias) = gaussian(5, 4, 4), gaussian(5, 4, 5), scalars()
    loss = ppcl(image, text, scale, bias)
    (once,) = torch.autograd.grad(loss, image.mean, retain_graph=True)
    (thrice,) = torch.autograd.grad(3 * loss, image.mean, retain_graph=True)
    torch.testing.assert_close(thrice, 3 * once)


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_ppcl_refuses_second_derivatives_instead_of_leaving_them_out(factor):
    """Also where the gradient that comes in is a constant, with which the kept ones would pass for constants too."""
    image, text, (scale, bias) = gaussian(5, 4, 4), gaussian(5, 4, 5), scalars()
    for weight in (factor, factor * scale):
        loss = ppcl(image, text, scale, bias) * weight
        with pytest.raises(RuntimeError, match="ppcl, is differentiable once.*leave out create_graph=True"):
            torch.autograd.grad(loss, image.mean, create_graph=True)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_ppcl_compiles_as_one_graph_with_its_gradients(backend):
    image, text, (scale, bias) = gaussian(5, 4, 4), gaussian(5, 4, 5), scalars()
    leaves = leaves_of(image, text, scale, bias)
    compiled = torch.compile(
        lambda a, b, c, d, s, t: ppcl(Gaussian(a, b), Gaussian(c, d), s, t), backend=backend, fullgraph=True
    )
    assert_same_value_and_gradients(compiled(*leaves), ppcl(image, text, scale, bias), leaves)


def test_ppcl_without_grad_mode_has_no_graph_and_the_same_value():
    image, text, (scale, bias) = gaussian(5, 4, 4), gaussian(5, 4, 5), scalars()
    with torch.no_grad():
        value = ppcl(image, text, scale, bias)
    assert not value.requires_grad
    assert torch.equal(value, ppcl(image, text, scale, bias).detach())


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
        assert got.dtype == torch.float32
        assert torch.equal(got, want)
        assert torch.equal(still, want)
        wanted = torch.autograd.grad(want, high[0].log_var)[0]
        found = torch.autograd.grad(got, low[0].log_var)[0]
        assert found.dtype == dtype
        assert torch.equal(found, wanted.to(dtype))


def test_ppcl_takes_numbers_and_one_element_tensors_for_scale_and_bias():
    image, text = gaussian(5, 4, 14), gaussian(5, 4, 15)
    scale, bias = scalars()
    want = ppcl(image, text, scale, bias)
    assert torch.equal(ppcl(image, text, 7.0, -4.0), want)
    vector = torch.full((1,), 7.0, dtype=torch.float32, requires_grad=True)
    got = ppcl(image, text, vector, bias)
    assert torch.equal(got, want)
    assert torch.autograd.grad(got, vector)[0].shape == (1,)


def test_known_matches_leave_out_padding_and_unknown_texts():
    image, text, (scale, bias) = gaussian(3, 4, 16), gaussian(3, 4, 17), scalars()
    none = Matches(torch.full((3, 2), -1), torch.full((3,), -1))
    assert torch.equal(ppcl(image, text, scale, bias, none), ppcl(image, text, scale, bias))
    everything = Matches(torch.zeros(3, 1, dtype=torch.int64), torch.zeros(3, dtype=torch.int64))
    want = F.softplus(-brute_logits(image, text, scale, bias)).sum() / 3
    torch.testing.assert_close(ppcl(image, text, scale, bias, everything), want)


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
    exact = [Gaussian(*(x.detach().double().requires_grad_() for x in z)) for z in (image, text)] + [
        *scalars(DOUBLE, scale, -10.0)
    ]
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


@pytest.mark.parametrize("shapes", [((3, 4), (4, 4)), ((3, 4), (3, 5)), ((0, 4), (0, 4)), ((2, 3, 4), (2, 3, 4))])
def test_ppcl_refuses_shapes_that_do_not_fit(shapes):
    image, text = (Gaussian(torch.zeros(s), torch.zeros(s)) for s in shapes)
    with pytest.raises(ValueError, match=r"ppcl got .*give \(B, D\)|differ in their last dimension D"):
        ppcl(image, text, 1.0, 0.0)


@pytest.mark.parametrize("block", [0, -1])
def test_ppcl_refuses_blocks_without_rows(block):
    """A negative block would score no pair at all, and give 0."""
    image, text = gaussian(3, 4, 0), gaussian(3, 4, 1)
    with pytest.raises(ValueError, match=f"block={block} rows score no pair: give 1 or more"):
        ppcl(image, text, 1.0, 0.0, block=block)


def test_ppcl_refuses_several_scales_and_vib_variances_that_do_not_fit():
    image, text = gaussian(3, 4, 0), gaussian(3, 4, 1)
    with pytest.raises(ValueError, match=r"scale is one number, got a tensor of shape \(2,\)"):
        ppcl(image, text, torch.ones(2), 0.0)
    with pytest.raises(ValueError, match=r"z: mean \(3, 4\) and log_var \(3, 1\) differ"):
        vib(Gaussian(image.mean, image.log_var[:, :1]))


def test_ppcl_refuses_labels_that_do_not_fit():
    image, text = gaussian(3, 4, 0), gaussian(3, 4, 1)
    with pytest.raises(ValueError, match=r"labels got .*give \(3, K\)"):
        ppcl(image, text, 1.0, 0.0, Matches(torch.zeros(2, 2).long(), torch.zeros(3).long()))


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


def test_the_matrix_of_a_block_is_gone_before_the_next_one_is_made(monkeypatch):
    made: list[weakref.ref[Tensor]] = []

    def watched(*arguments):
        assert [matrix() for matrix in made] == [None] * len(made)
        loss, gradient = pairs.sum_block(*arguments)
        made.append(weakref.ref(gradient.pairs))
        return loss, gradient

    monkeypatch.setattr(pairs, "choose_sum_block", lambda own: watched)
    ppcl(gaussian(8, 4, 22), gaussian(8, 4, 23), *scalars(), block=3)
    assert len(made) == 3


def test_default_block_bounds_the_workspace_linearly_in_the_batch():
    cpu = torch.device("cpu")
    for columns in (1, 512, 4096, 65536):
        assert default_block(columns, cpu) * columns <= max(PAIRS_CPU, MIN_ROWS * columns)
        assert default_block(columns, cpu) >= MIN_ROWS


@pytest.mark.parametrize(
    "labels",
    [
        torch.arange(4),
        torch.eye(4),
        [1, 2, 3, 4],
        (torch.zeros(4, 1).long(), torch.zeros(4).long()),
        Matches(torch.zeros(4, 1), torch.zeros(4).long()),
        Matches(torch.zeros(4, 1).long(), torch.zeros(4)),
    ],
)
def test_labels_that_are_no_matches_of_whole_numbers_are_refused(labels):
    z = gaussian(4, 3, 0)
    with pytest.raises(TypeError, match=r"want prolip.losses.Matches\(image, text\), ids in torch.int64"):
        ppcl(z, z, 10.0, -5.0, labels)
