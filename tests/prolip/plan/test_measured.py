"""Extrapolation by FLOPs against steps that are really taken, here, in turns."""

from __future__ import annotations

import statistics
import time

import pytest
import torch

from prolip import create_model
from prolip.methods import METHODS
from prolip.plan.models import count_of_run

ROWS, TURNS = 8, 3


def one_step(name, method):
    """A function that takes one step, without optimiser, and returns its CPU seconds: other programs do not count."""
    torch.manual_seed(0)
    network = create_model(name)
    config, objective = METHODS[method][:2]
    objective = objective(network, config())
    size = network.visual.image_size
    size = size if isinstance(size, int) else size[0]
    batch = {"image": torch.randn(ROWS, 3, size, size), "text": torch.randint(5, 500, (ROWS, network.context_length))}

    def step():
        start = time.process_time()
        objective(objective.prepare(batch, 0))["loss"].backward()
        network.zero_grad(set_to_none=True)
        return time.process_time() - start

    return step


def ratio_of_seconds(first, second, turns):
    """Median over turns of one step of the first over one step of the second, after one turn that does not count."""
    seconds = [(first(), second()) for _ in range(turns + 1)][1:]
    return statistics.median(a / b for a, b in seconds)


@pytest.mark.slow
@pytest.mark.parametrize(
    "first, second, tolerance",
    [
        (("ProLIP-ViT-B-16", "prolip"), ("ProLIP-ViT-S-16", "prolip"), 0.2),
        (("ProLIP-ViT-S-16", "prolip"), ("ProLIP-ViT-S-16", "siglip"), 0.1),
    ],
    ids=["B-16 over S-16", "ProLIP over SigLIP"],
)
def test_one_run_predicts_another_by_their_flops(first, second, tolerance):
    planned = count_of_run(*first, ROWS).flops / count_of_run(*second, ROWS).flops
    measured = ratio_of_seconds(one_step(*first), one_step(*second), TURNS)
    print(f"\n{first} over {second}: planned {planned:.3f}, measured {measured:.3f}")
    assert measured == pytest.approx(planned, rel=tolerance)
