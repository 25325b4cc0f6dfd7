"""Pairs over ranks by ring or gather: values and gradients of one process, rows of gathered texts."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.distributed as dist
from distributed_helpers import run_ranks
from loss_cases import gaussian, scalars, some_matches
from torch import Tensor

from prolip.gaussian import Gaussian, concatenate
from prolip.losses import Matches, ppcl, ppcl_over_ranks
from prolip.losses.contrastive import choose_exchange

# Gathered rows of 9 means and a trace are padded.
RANKS, BATCH, DIM, SCALE, BIAS = 4, 5, 9, 6.0, -3.0
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
# Which processes form a group: the worlds 1..4, and one whose ranks are not 0..W-1.
GROUPS = {"1": [0], "2": [0, 1], "3": [0, 1, 2], "4": [0, 1, 2, 3], "2 of 4": [1, 3]}
EXCHANGES = ("ring", "gather")
CASES = list(product(GROUPS, TOLERANCE, (False, True), EXCHANGES))


def batch(member: int, dtype: torch.dtype) -> tuple[Gaussian, Gaussian, Tensor, Tensor, Matches]:
    """Leaves of the member-th rank of a group, and ids drawn from few, so that texts of other ranks match too."""
    image, text = (gaussian(BATCH, DIM, 2 * member + side, dtype) for side in (0, 1))
    return image, text, *scalars(dtype, SCALE, BIAS), some_matches(BATCH, 100 + member, width=3)


def gradients(loss: Tensor, image: Gaussian, text: Gaussian, scale: Tensor, bias: Tensor) -> dict[str, Tensor]:
    leaves = (*image, *text, scale, bias)
    names = ("image.mean", "image.log_var", "text.mean", "text.log_var", "scale", "bias")
    return {"loss": loss.detach(), **dict(zip(names, torch.autograd.grad(loss, leaves)))}


def ring_case(member: int, group, dtype: torch.dtype, labelled: bool, exchange: str) -> dict[str, Tensor]:
    image, text, scale, bias, labels = batch(member, dtype)
    labels = labels if labelled else None
    loss = ppcl_over_ranks(image, text, scale, bias, labels, group, block=2, exchange=exchange)
    found = gradients(loss, image, text, scale, bias)
    with torch.no_grad():
        found["no_grad"] = ppcl_over_ranks(image, text, scale, bias, labels, group, exchange=exchange)
    only_text = Gaussian(text.mean.detach(), text.log_var)
    frozen = ppcl_over_ranks(image.detach(), only_text, SCALE, BIAS, labels, group, exchange=exchange)
    found["only text.log_var"] = torch.autograd.grad(frozen, text.log_var)[0]
    frozen = ppcl_over_ranks(image, text.detach(), SCALE, BIAS, labels, group, exchange=exchange)
    found["only image.mean"] = torch.autograd.grad(frozen, image.mean)[0]
    return found


def all_cases(rank: int) -> dict:
    """Every check of this file, in one spawn. All processes make all groups; only its members use one."""
    groups = {name: dist.new_group(ranks) for name, ranks in GROUPS.items()}
    groups["4"] = None
    found: dict = {}
    for name, *case in CASES:
        if rank in GROUPS[name]:
            member = GROUPS[name].index(rank)
            found[(name, *case)] = ring_case(member, groups[name], *case)
    return found


@pytest.fixture(scope="module")
def found() -> list[dict]:
    return run_ranks(RANKS, all_cases)


def whole(size: int, dtype: torch.dtype, labelled: bool):
    """The same batch, scale, bias and labels in one process."""
    images, texts, _, _, labels = zip(*(batch(member, dtype) for member in range(size)))
    image, text = (Gaussian(*(x.detach().requires_grad_() for x in concatenate(side))) for side in (images, texts))
    joined = Matches(*map(torch.cat, zip(*labels))) if labelled else None
    return image, text, *scalars(dtype, SCALE, BIAS), joined


def close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(got, want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("name,dtype,labelled,exchange", CASES)
def test_ranks_match_one_process_on_the_concatenated_batch(found, name, dtype, labelled, exchange):
    ranks = GROUPS[name]
    size = len(ranks)
    got = [found[rank][name, dtype, labelled, exchange] for rank in ranks]
    image, text, scale, bias, labels = whole(size, dtype, labelled)
    want = gradients(ppcl(image, text, scale, bias, labels), image, text, scale, bias)
    for key in ("loss", "scale", "bias"):
        close(torch.stack([g[key] for g in got]).mean(0), want[key], dtype)
    close(torch.stack([g["no_grad"] for g in got]).mean(0), want["loss"], dtype)
    for key in ("image.mean", "image.log_var", "text.mean", "text.log_var"):
        close(torch.cat([g[key] for g in got]), want[key] * size, dtype)
    close(torch.cat([g["only text.log_var"] for g in got]), want["text.log_var"] * size, dtype)
    close(torch.cat([g["only image.mean"] for g in got]), want["image.mean"] * size, dtype)


def test_devices_gather_what_fits_and_others_go_round_the_ring():
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert choose_exchange(32, 512, 768, gpu) == choose_exchange(1024, 64, 768, gpu) == "gather"
    assert choose_exchange(2, 512, 768, gpu) == choose_exchange(1024, 512, 768, gpu) == "ring"
    assert choose_exchange(32, 512, 768, cpu) == "ring"
