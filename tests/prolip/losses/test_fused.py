"""The Triton kernel of PPCL against the plain operations, compiled on CUDA and interpreted without it.

`tests/rehearsal/test_kernel_binaries.py` compiles it for GPUs that are not there.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

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


@pytest.mark.parametrize("n,m", [(1, 1), (7, 130), (32, 128), (33, 257), (70, 40)])
@pytest.mark.parametrize("diagonal", [None, 0, 5, -3, 300])
def test_the_kernel_gives_the_sums_of_the_plain_operations(n, m, diagonal):
    if diagonal is not None and not -n < diagonal < m:
        diagonal = 0
    block = block_of(n, m)
    got = fused.sum_block(*block, Positives(diagonal), 0.125, True)
    want = pairs.sum_block(*block, Positives(diagonal), 0.125, True)
    for mine, plain in zip((got[0], *got[1]), (want[0], *want[1])):
        torch.testing.assert_close(mine, plain, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("diagonal", [None, 2])
def test_the_kernel_finds_known_matches(diagonal):
    block, ids = block_of(37, 150), ids_of(37, 150)
    got = fused.sum_block(*block, Positives(diagonal, *ids), 1.0, True)
    want = pairs.sum_block(*block, Positives(diagonal, *ids), 1.0, True)
    assert (got[1].pairs < 0).sum() > 37
    for mine, plain in zip((got[0], *got[1]), (want[0], *want[1])):
        torch.testing.assert_close(mine, plain, rtol=2e-5, atol=1e-4)


def test_the_kernel_keeps_the_digits_of_pairs_on_the_right_side_and_overflows_nowhere():
    ends, middle = [1e30, 1e4, 200.0, 87.0, 80.0, 30.0, 29.9, 10.0, 1.0, 0.35, 1e-4], [0.0, torch.nan, torch.inf]
    logits = torch.tensor([*(-x for x in ends), *middle, *ends], device=DEVICE)
    zeros = logits.new_zeros(1, 1)
    one_by_one = [fused.sum_block(zeros, zeros, zeros[0], x[None], Positives(), 1.0, True) for x in logits]
    exact = logits.double()
    torch.testing.assert_close(
        torch.stack([loss for loss, _ in one_by_one]), F.softplus(exact).float(), rtol=1e-6, atol=1e-40, equal_nan=True
    )
    torch.testing.assert_close(
        torch.stack([gradient.rows[0] for _, gradient in one_by_one]),
        exact.sigmoid().float(),
        rtol=1e-6,
        atol=1e-40,
        equal_nan=True,
    )


@pytest.mark.parametrize("labelled", [False, True])
@pytest.mark.parametrize("block", [None, 11])
def test_ppcl_is_the_same_with_the_kernel(monkeypatch, labelled, block):
    labels = Matches(*ids_of(45, 45)) if labelled else None
    results = []
    for devices in (frozenset(), frozenset({DEVICE})):
        monkeypatch.setattr(pairs, "FUSED_DEVICES", devices)
        draw = torch.Generator().manual_seed(2)
        image, text = (
            Gaussian(
                F.normalize(torch.randn(45, 16, generator=draw), dim=-1).to(DEVICE).requires_grad_(),
                (torch.randn(45, 16, generator=draw) - 4).to(DEVICE).requires_grad_(),
            )
            for _ in range(2)
        )
        scale, bias = (torch.tensor(x, device=DEVICE, requires_grad=True) for x in (10.0, -4.0))
        assert pairs.choose_sum_block(Factors(*image)) is (fused.sum_block if devices else pairs.sum_block)
        value = ppcl(image, text, scale, bias, labels, block)
        results.append([value, *torch.autograd.grad(value, [*image, *text, scale, bias])])
    for mine, plain in zip(*results):
        torch.testing.assert_close(mine, plain, rtol=1e-5, atol=1e-7)
