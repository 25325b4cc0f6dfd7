"""Every method with every setting of its tests on several ranks: terms and gradients of one process, under DDP."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import test_deterministic
import test_pcme
import test_pcmepp
import test_prolip
import test_source_free
import test_vacsr
import torch
from distributed_helpers import run_ranks
from method_checks import assert_close, gradients
from torch.nn.parallel import DistributedDataParallel

from prolip.methods.accumulate import accumulate_backward
from prolip.methods.base import RECALL

ROWS = 4
#: Of each rank's own rows, or the mean of its matches: for the log alone.
OWN = (RECALL, "sigma")


def source_free(rank: int = 0, world_size: int = 1):
    pool = test_source_free.share_of(test_source_free.make_pool(), rank, world_size)
    return test_source_free.make_objective(rank=rank, world_size=world_size, pool=pool)


#: (objective of a rank, global batch of so many rows), by method and settings.
CASES: dict[str, tuple[Callable, Callable]] = {"source-free": (source_free, test_source_free.make_batch)}
for name in test_deterministic.METHODS:
    CASES[name] = partial(test_deterministic.make_objective, name), partial(test_deterministic.make_batch, name)
for module in (test_pcme, test_pcmepp, test_vacsr):
    for name, settings in module.SETTINGS.items():
        if name == "first":  # of equal labels, in the order of columns, which is by rank
            settings = settings | {"known_matches": False}
        CASES[f"{module.__name__} {name}"] = partial(module.make_objective, settings), module.make_batch
for settings in ({}, {"known_matches": True}):
    CASES[f"prolip {settings}"] = partial(test_prolip.make_objective, **settings), test_prolip.make_batch


def batch_of(make: Callable, rank: int, world_size: int) -> dict:
    """Row g of the global batch is on rank g % W; a row is mixed with the next of its rank."""
    batch, rows = make(ROWS * world_size), torch.arange(ROWS * world_size)
    if "partner" in batch:
        batch["partner"] = (rows + world_size) % len(rows)
    own = {name: x if isinstance(x, int) else x[rank::world_size] for name, x in batch.items()}
    return own | ({"partner": own["partner"] // world_size} if "partner" in batch else {})


def train_rank(rank: int, world_size: int) -> dict:
    found = {}
    for place, (name, (make, batch)) in enumerate(CASES.items()):
        wrapper = DistributedDataParallel(make(rank=rank, world_size=world_size))
        own = wrapper.module.prepare(batch_of(batch, rank, world_size), 2)
        terms = accumulate_backward(wrapper, own, 1 + place % 2)  # every second case in two micro-batches
        found[name] = terms, gradients(wrapper.module)
    return found


def whole(name: str, world_size: int) -> tuple[dict, dict]:
    make, batch = CASES[name]
    objective, rows = make(), batch(ROWS * world_size)
    if "partner" in rows:
        rows["partner"] = (torch.arange(ROWS * world_size) + world_size) % (ROWS * world_size)
    return accumulate_backward(objective, objective.prepare(rows, 2)), gradients(objective)


@pytest.mark.parametrize(
    "world_size", [2, 3, pytest.param(1, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
)
def test_ranks_equal_one_process_on_the_interleaved_batch(world_size):
    ranks = run_ranks(world_size, train_rank, world_size)
    for name in CASES:
        terms, grads = whole(name, world_size)
        shares, tolerance = [rank[name] for rank in ranks], 1e-6 if name == "source-free" else 1e-9
        kept = [key for key in terms if key not in OWN]
        means = {f"{name} {key}": torch.stack([own[0][key] for own in shares]).mean(0) for key in kept}
        assert_close(means, {f"{name} {key}": terms[key] for key in kept}, tolerance)
        for _, own in shares:
            assert_close(own, grads, tolerance)
