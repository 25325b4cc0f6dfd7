"""Rows of gathered texts: what they hold, where they lie. test_ring.py has their values over ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from distributed_helpers import run_ranks

from prolip.gaussian import Gaussian
from prolip.losses import Factors, contrastive, ppcl_over_ranks
from prolip.losses.exchanges import pack_rows, row_width

RANKS, ROWS, DIM = 3, 4, 5


@pytest.mark.parametrize("dim, width", [(1, 4), (3, 4), (4, 8), (768, 772), (1152, 1156)])
def test_rows_hold_vector_and_offset_and_are_whole_parts_of_16_bytes(dim, width):
    assert row_width(dim) == width
    text = Factors(torch.randn(ROWS, dim), torch.rand(ROWS))
    rows = pack_rows(text)
    assert rows.shape == (ROWS, width) and rows.stride(0) * rows.element_size() % 16 == 0
    assert torch.equal(rows[:, :dim], text.vector) and torch.equal(rows[:, dim], text.offset)
    assert not rows[:, dim + 1 :].any()


def sums_sent(rank: int) -> torch.Tensor:
    """The rows of sums that a rank gives to the reduce-scatter: (RANKS * ROWS, row_width(DIM))."""
    torch.manual_seed(rank)
    image, text = (Gaussian(*(torch.randn(ROWS, DIM, requires_grad=True) for _ in range(2))) for _ in range(2))
    honest, sent, choose = dist.reduce_scatter_tensor, [], contrastive.choose_exchange

    def note(out, given, **options):
        sent.append(given.clone())
        return honest(out, given, **options)

    dist.reduce_scatter_tensor, contrastive.choose_exchange = note, lambda *facts: "gather"
    try:
        ppcl_over_ranks(image, text, 0.1, 0.0)
    finally:
        dist.reduce_scatter_tensor, contrastive.choose_exchange = honest, choose
    return sent[0]


def test_padded_sums_are_zero_and_all_others_are_not():
    for sums in run_ranks(RANKS, sums_sent):
        assert sums.shape == (RANKS * ROWS, row_width(DIM)) == (12, 8)
        assert not sums[:, DIM + 1 :].any()
        assert sums[:, : DIM + 1].ne(0).all()
