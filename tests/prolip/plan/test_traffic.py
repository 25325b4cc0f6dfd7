"""The planner's messages are those of the ring and of gathering, counted on real ranks."""

from __future__ import annotations

import re
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from distributed_helpers import run_ranks

from prolip.gaussian import Gaussian
from prolip.losses import Matches, exchanges, ppcl_over_ranks
from prolip.losses.exchanges import GRADIENT_TAG, TEXT_TAG, row_width
from prolip.plan.config import PlanConfig
from prolip.plan.models import build_cluster, count_of_run
from prolip.plan.phases import pairs, step_times

LOCAL, DIM = 6, 10
WORLDS = {2: [0, 1], 3: [0, 1, 2], 4: [0, 1, 2, 3]}


class Collectives:
    """Notes (operation, bytes put in, bytes got out) of the collectives of tensors while it is entered."""

    names = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_gather", "all_reduce", "broadcast")

    def __enter__(self):
        self.seen, self.honest = [], {name: getattr(dist, name) for name in self.names}
        for name, function in self.honest.items():
            setattr(dist, name, self.noting(name, function))
        return self.seen

    def noting(self, name, function):
        def note(out, given=None, *rest, **options):
            self.seen.append((name, getattr(given, "nbytes", None), getattr(out, "nbytes", None)))
            return function(out, given, *rest, **options)

        return note

    def __exit__(self, *error):
        for name, function in self.honest.items():
            setattr(dist, name, function)


def counted(rank):
    """World size -> (tag, bytes) of what this rank sent in the ring; collectives of gathering, without and with ids."""
    found = {}
    for size, members in WORLDS.items():
        group = dist.new_group(members)
        if rank not in members:
            continue
        sent, transfer = [], exchanges.Transfer.__init__

        def note(self, group, out, *tags, sent=sent, transfer=transfer):
            sent += [(tag, x.numel() * x.element_size()) for tag, x in zip(tags, out)]
            transfer(self, group, out, *tags)

        image, text = (Gaussian(*(torch.randn(LOCAL, DIM, requires_grad=True) for _ in range(2))) for _ in range(2))
        known, seen = Matches(*(torch.zeros(shape, dtype=torch.int64) for shape in ((LOCAL, 2), (LOCAL,)))), []
        with patch.object(exchanges.Transfer, "__init__", note):
            ppcl_over_ranks(image, text, torch.tensor(1.0), 0.0, group=group, exchange="ring")
        for labels in (None, known):
            with Collectives() as collectives:
                ppcl_over_ranks(image, text, torch.tensor(1.0), 0.0, labels, group=group, exchange="gather")
            seen.append(collectives)
        found[size] = sent, *seen
    return found


@pytest.fixture(scope="module")
def real():
    return run_ranks(4, counted)


def cluster(gpus, **machines):
    return build_cluster(PlanConfig(**machines), gpus)


@pytest.mark.parametrize("size", WORLDS)
def test_messages_and_bytes_are_those_of_the_real_ring(real, size):
    planned = pairs("ring", LOCAL, DIM, cluster(size))
    for rank in WORLDS[size]:
        sent = real[rank][size][0]
        assert len(sent) == planned.messages
        assert sum(count for _, count in sent) == planned.messages * planned.message_bytes
        for wanted in (TEXT_TAG, GRADIENT_TAG):
            assert {count for tag, count in sent if tag == wanted} == {planned.message_bytes}


@pytest.mark.parametrize("size", WORLDS)
def test_bytes_of_gathered_texts_are_those_that_the_collectives_get(real, size):
    planned, text = pairs("gather", LOCAL, DIM, cluster(size)), LOCAL * row_width(DIM) * 4
    for rank in WORLDS[size]:
        _, seen, with_ids = real[rank][size]
        assert seen == [("all_gather_into_tensor", text, size * text), ("reduce_scatter_tensor", size * text, text)]
        assert len(seen) == planned.messages
        # A rank passes on everything but one part: of what comes out of a gather, of what goes into a reduction.
        assert [abs(out - given) for _, given, out in seen] == [planned.message_bytes] * 2
        known = sum(given for name, given, _ in with_ids if name == "all_gather_into_tensor")
        assert known == text + 8 * LOCAL
    # Rows are padded for alignment, those of the ring are not.
    by_ring = pairs("ring", LOCAL, DIM, cluster(size))
    assert 2 * planned.message_bytes * (DIM + 1) == by_ring.messages * by_ring.message_bytes * row_width(DIM)


def test_gradients_are_reduced_in_float32_and_hidden_but_for_the_last_bucket():
    model, training = count_of_run("ProLIP-ViT-B-16", "prolip", 512), PlanConfig()
    step = step_times(model, training, cluster(32), 0.4 * 989e12)
    assert step.reduce_bytes == pytest.approx(2 * 31 / 32 * 4 * model.parameters)
    assert step.reduce_exposed == pytest.approx(step.reduce / step.buckets)
    slow = step_times(model, training, cluster(32, inter_gbs=0.1), 0.4 * 989e12)
    assert slow.reduce_exposed == pytest.approx(slow.reduce - slow.backward, rel=0.05)


def test_fsdp_moves_what_was_counted_with_the_padding_of_its_shards():
    page = (Path(__file__).parents[3] / "docs" / "benchmarks" / "scale.md").read_text()
    row = re.search(r"\| FSDP2 \| gradients of a block \| reduce-scatter \| \d+ \| ([\d, |]+) \|", page)[1]
    model = count_of_run("ProLIP-ViT-B-16", "prolip", 512)
    for ranks, counted in zip((2, 8, 64, 512, 4096), row.split(" | "), strict=True):
        moved = (ranks - 1) / ranks * model.padded(ranks) * 4
        assert moved == pytest.approx(int(counted.replace(",", "")), rel=1e-4)
