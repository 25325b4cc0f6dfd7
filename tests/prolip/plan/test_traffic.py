"""The planner's messages are those of the ring and of gathering, counted on real ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from distributed_helpers import run_ranks
from kernel_stand_in import blocks_as_on_cuda
from torch.utils._python_dispatch import TorchDispatchMode

from prolip.gaussian import Gaussian
from prolip.losses import Matches, csd_factors, ppcl_over_ranks
from prolip.losses import exchanges as real_ring
from prolip.losses.exchanges import GRADIENT_TAG, TEXT_TAG, row_width, score_gathered
from prolip.losses.pairs import Columns, WantedGradients, finish, zero_rows
from prolip.plan.config import PlanConfig
from prolip.plan.models import build_cluster, count_of_run
from prolip.plan.phases import pairs, step_times

LOCAL, DIM = 6, 10
ALL = WantedGradients(*[True] * len(WantedGradients._fields))
WORLDS = {2: [0, 1], 3: [0, 1, 2], 4: [0, 1, 2, 3]}
# Operations that make a view or a constant: no kernel.
NO_KERNEL = ("c10d", "empty", "view", "slice", "select", "split", "diagonal", "permute", "transpose", "unsqueeze")
NO_KERNEL += ("expand", "alias", "detach", "aten.t.")


def instrumented(rank):
    """World size -> what this rank sent, as (tag, bytes) in order, and whose texts it scored, in order."""
    found = {}
    for size, members in WORLDS.items():
        group = dist.new_group(members)
        if rank not in members:
            continue
        sent, scored = [], []
        transfer, add = real_ring.Transfer.__init__, real_ring.add_pairs

        def count(self, group, out, *tags, sent=sent, transfer=transfer):
            sent += [(tag, x.numel() * x.element_size()) for tag, x in zip(tags, out)]
            transfer(self, group, out, *tags)

        def note(rows, columns, *rest, scored=scored, add=add):
            scored.append(round(float(-2 * columns.offset[0]) / DIM))
            add(rows, columns, *rest)

        real_ring.Transfer.__init__, real_ring.add_pairs = count, note
        try:
            place = members.index(rank)
            mean = F.normalize(torch.randn(LOCAL, DIM), dim=-1).requires_grad_()
            # Texts of rank r have variance r + 1 in every dimension: their traces tell whose they are.
            text = Gaussian(mean, torch.full((LOCAL, DIM), place + 1.0).log().requires_grad_())
            image = Gaussian(mean.detach().clone().requires_grad_(), text.log_var.detach().clone().requires_grad_())
            ppcl_over_ranks(image, text, torch.tensor(1.0, requires_grad=True), 0.0, group=group, exchange="ring")
        finally:
            real_ring.Transfer.__init__, real_ring.add_pairs = transfer, add
        found[size] = sent, [number - 1 for number in scored]
    return found


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


class CountKernels(TorchDispatchMode):
    """Operations that start a kernel."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not any(word in str(function) for word in NO_KERNEL):
            self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def gathered(rank):
    """World size -> (collectives of a step, the same with ids of captions, kernels that PPCL started)."""
    found = {}
    for size, members in WORLDS.items():
        group = dist.new_group(members)
        if rank not in members:
            continue
        image, text = (Gaussian(*(torch.randn(LOCAL, DIM, requires_grad=True) for _ in range(2))) for _ in range(2))
        known, seen = Matches(*(torch.zeros(shape, dtype=torch.int64) for shape in ((LOCAL, 2), (LOCAL,)))), []
        for labels in (None, known):
            with Collectives() as collectives:
                ppcl_over_ranks(image, text, torch.tensor(1.0), 0.0, labels, group=group, exchange="gather")
            seen.append(collectives)
        packed = [csd_factors(x.detach()) for x in (image, text)]
        scale, bias = torch.tensor(1.0), torch.tensor(0.0)
        with blocks_as_on_cuda() as kernel, CountKernels() as counter:
            score_gathered(*packed, (scale, bias), None, None, ALL, group)
        with CountKernels() as after:
            finish(zero_rows(packed[0], ALL), Columns(None, None), scale)
        found[size] = *seen, len(kernel.starts) + len(counter.names) - len(after.names)
    return found


@pytest.fixture(scope="module")
def real():
    return run_ranks(4, instrumented)


@pytest.fixture(scope="module")
def real_gathered():
    pytest.importorskip("triton")
    return run_ranks(4, gathered)


def cluster(gpus, **machines):
    return build_cluster(PlanConfig(**machines), gpus)


def ring(local, dim, cluster):
    return pairs("ring", local, dim, cluster)


def gather(local, dim, cluster):
    return pairs("gather", local, dim, cluster)


@pytest.mark.parametrize("size", WORLDS)
def test_messages_and_bytes_are_those_of_the_real_ring(real, size):
    planned = ring(LOCAL, DIM, cluster(size))
    for rank in WORLDS[size]:
        sent = real[rank][size][0]
        assert len(sent) == planned.messages
        assert sum(count for _, count in sent) == planned.messages * planned.message_bytes
        for wanted in (TEXT_TAG, GRADIENT_TAG):
            assert {count for tag, count in sent if tag == wanted} == {planned.message_bytes}


@pytest.mark.parametrize("size", WORLDS)
def test_bytes_of_gathered_texts_are_those_that_the_collectives_get(real_gathered, size):
    planned, text = gather(LOCAL, DIM, cluster(size)), LOCAL * row_width(DIM) * 4
    for rank in WORLDS[size]:
        seen, with_ids, _ = real_gathered[rank][size]
        assert seen == [("all_gather_into_tensor", text, size * text), ("reduce_scatter_tensor", size * text, text)]
        assert len(seen) == planned.messages
        # A rank passes on everything but one part: of what comes out of a gather, of what goes into a reduction.
        assert [abs(out - given) for _, given, out in seen] == [planned.message_bytes] * 2
        known = sum(given for name, given, _ in with_ids if name == "all_gather_into_tensor")
        assert known == text + 8 * LOCAL
    # Rows are padded for alignment, those of the ring are not.
    by_ring = ring(LOCAL, DIM, cluster(size))
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
