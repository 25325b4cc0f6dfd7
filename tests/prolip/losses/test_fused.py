"""The Triton kernel of PPCL against the plain operations, compiled on CUDA and interpreted without it.

`tests/rehearsal/test_kernel_binaries.py` compiles it for GPUs that are not there.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from loss_cases import gaussian

from prolip.gaussian import Gaussian
from prolip.losses import Factors, Matches, pairs, ppcl
from prolip.losses.positives import Positives

pytest.importorskip("triton")
from prolip.losses import fused  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def block_of(n: int, m: int, seed: int = 0, spread: float = 6.0) -> tuple[torch.Tensor, ...]:
    """Factors of products and biases whose logits lie some tens either side of zero."""
    draw = torch.Generator().manual_seed(seed)
    scaled, means = (torch.randn(rows, 24, generator=draw) for rows in (n, m))
    block = scaled * spread, means, torch.randn(n, generator=draw) - 4, torch.randn(m, generator=draw)
    return tuple(x.to(DEVICE) for x in block)


def ids_of(n: int, m: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Three ids for each row, of few, some missing; and one for each column, some unknown."""
    draw = torch.Generator().manual_seed(seed)
    rows, columns = torch.randint(-1, 9, (n, 3), generator=draw), torch.randint(-1, 9, (m,), generator=draw)
    return rows.to(DEVICE), columns.to(DEVICE)


def sums_of_both(block: tuple[torch.Tensor, ...], positives: Positives, factor: float, atol: float):
    """The kernel's, when they are those of the plain operations."""
    got, want = (way.sum_block(*block, positives, factor, True) for way in (fused, pairs))
    for mine, plain in zip((got[0], *got[1]), (want[0], *want[1])):
        torch.testing.assert_close(mine, plain, rtol=2e-5, atol=atol)
    return got


@pytest.mark.parametrize("n,m", [(1, 1), (7, 130), (32, 128), (33, 257), (70, 40)])
@pytest.mark.parametrize("diagonal", [None, 0, 5, -3, 300])
def test_the_kernel_gives_the_sums_of_the_plain_operations(n, m, diagonal):
    own = diagonal if diagonal is None or -n < diagonal < m else 0
    assert sums_of_both(block_of(n, m), Positives(own), 0.125, 2e-5)[0].isfinite()


@pytest.mark.parametrize("diagonal", [None, 2])
def test_the_kernel_finds_known_matches(diagonal):
    got = sums_of_both(block_of(37, 150), Positives(diagonal, *ids_of(37, 150)), 1.0, 1e-4)
    assert (got[1].pairs < 0).sum() > 37


def test_the_kernel_keeps_the_digits_of_pairs_on_the_right_side_and_overflows_nowhere():
    ends, middle = [1e30, 1e4, 200.0, 87.0, 80.0, 30.0, 29.9, 10.0, 1.0, 0.35, 1e-4], [0.0, torch.nan, torch.inf]
    logits = torch.tensor([*(-x for x in ends), *middle, *ends], device=DEVICE)
    zeros = logits.new_zeros(1, 1)
    one_by_one = [fused.sum_block(zeros, zeros, zeros[0], x[None], Positives(), 1.0, True) for x in logits]
    exact = logits.double()
    close = partial(torch.testing.assert_close, rtol=1e-6, atol=1e-40, equal_nan=True)
    close(torch.stack([loss for loss, _ in one_by_one]), F.softplus(exact).float())
    close(torch.stack([gradient.rows[0] for _, gradient in one_by_one]), exact.sigmoid().float())


@pytest.mark.parametrize("labelled", [False, True])
@pytest.mark.parametrize("block", [None, 11])
def test_ppcl_is_the_same_with_the_kernel(monkeypatch, labelled, block):
    labels = Matches(*ids_of(45, 45)) if labelled else None
    results = []
    for devices in (frozenset(), frozenset({DEVICE})):
        monkeypatch.setattr(pairs, "FUSED_DEVICES", devices)
        sides = [gaussian(45, 16, seed, torch.float32, log_var=-4.0, grad=False).to(DEVICE) for seed in (2, 3)]
        image, text = (Gaussian(*(x.requires_grad_() for x in z)) for z in sides)
        scale, bias = (torch.tensor(x, device=DEVICE, requires_grad=True) for x in (10.0, -4.0))
        assert pairs.choose_sum_block(Factors(*image)) is (fused.sum_block if devices else pairs.sum_block)
        value = ppcl(image, text, scale, bias, labels, block)
        results.append([value, *torch.autograd.grad(value, [*image, *text, scale, bias])])
    for mine, plain in zip(*results):
        torch.testing.assert_close(mine, plain, rtol=1e-5, atol=1e-7)
