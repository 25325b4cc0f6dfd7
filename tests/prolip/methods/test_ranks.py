"""Every method with every setting of its tests on several ranks: terms and gradients of one process, under DDP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from unittest.mock import patch

import pytest
import test_deterministic
import test_pcme
import test_pcmepp
import test_prolip
import test_source_free
import test_vacsr
import torch
import torch.distributed as dist
from distributed_helpers import run_worlds
from method_checks import assert_close, gradients
from torch.nn.parallel import DistributedDataParallel

import prolip
from prolip.methods.accumulate import accumulate_backward
from prolip.methods.base import RECALL

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
#: World sizes -> names: all settings where ranks are even and odd, one of each method alone and on four.
ONE = ["siglip", "clip", "likelihood-captions", "infonce", "vse", "triplet-sum", "test_pcme coco", "test_pcmepp full"]
ONE += ["test_vacsr paper", "prolip {'known_matches': True}", "source-free"]
WORLDS = {1: ONE, 2: [*CASES], 3: [*CASES], 4: ONE}


def batch_of(make: Callable, world_size: int) -> dict:
    """The global batch, of which row g is on rank g % W; a row is mixed with the next of its rank."""
    rows = torch.arange(4 * max(world_size, 2))
    batch = make(len(rows))
    return batch | ({"partner": (rows + world_size) % len(rows)} if "partner" in batch else {})


def share_of(batch: dict, rank: int, world_size: int) -> dict:
    own = {name: x if isinstance(x, int) else x[rank::world_size] for name, x in batch.items()}
    return own | ({"partner": own["partner"] // world_size} if "partner" in batch else {})


MODELS: dict[str, torch.nn.Module] = {}


@contextmanager
def made_once() -> Iterator[None]:
    """A model of the same settings is a copy of the first, as to make it takes longer than a step."""
    create = prolip.create_model

    def copied(*args, **options):
        name = repr((args, options))
        MODELS[name] = MODELS.get(name) or create(*args, **options)
        torch.manual_seed(0)
        return deepcopy(MODELS[name])

    with patch.object(prolip, "create_model", copied):
        yield


@made_once()
def train_rank(rank: int) -> dict:
    found, world_size = {}, dist.get_world_size()
    for place, name in enumerate(WORLDS[world_size]):
        make, batch = CASES[name]
        wrapper = DistributedDataParallel(make(rank=rank, world_size=world_size))
        own = wrapper.module.prepare(share_of(batch_of(batch, world_size), rank, world_size), 2)
        terms = accumulate_backward(wrapper, own, 1 + place % 2)  # every second case in two micro-batches
        found[name] = terms, gradients(wrapper.module)
    return found


@made_once()
def whole(name: str, world_size: int) -> tuple[dict, dict]:
    make, batch = CASES[name]
    objective = make()
    return accumulate_backward(objective, objective.prepare(batch_of(batch, world_size), 2)), gradients(objective)


@pytest.fixture(scope="module")
def found() -> dict[int, list[dict]]:
    return run_worlds([*WORLDS], train_rank)


@pytest.mark.parametrize("world_size", WORLDS)
def test_ranks_equal_one_process_on_the_interleaved_batch(found, world_size):
    for name in WORLDS[world_size]:
        terms, grads = whole(name, world_size)
        shares, tolerance = [rank[name] for rank in found[world_size]], 1e-6 if name == "source-free" else 1e-9
        kept = [key for key in terms if key not in OWN]
        means = {f"{name} {key}": torch.stack([own[0][key] for own in shares]).mean(0) for key in kept}
        assert_close(means, {f"{name} {key}": terms[key] for key in kept}, tolerance)
        for _, own in shares:
            assert_close(own, grads, tolerance)
