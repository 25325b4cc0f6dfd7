"""The planner's messages are those that prolip.ring sends, counted on real ranks."""
from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from distributed_helpers import run_ranks
from torch.utils._python_dispatch import TorchDispatchMode

import prolip.ring
from prolip.gaussian import Gaussian
from prolip.losses import Needs, Packed, Positives, add_pairs, zero_columns, zero_rows
from prolip.ring import GRADIENT_TAG, TEXT_TAG, ppcl_over_ranks
from training.plan.hardware import build_cluster
from training.plan.models import describe
from training.plan.question import Machines, Training
from training.plan.simulate import Draws, Links, exchange
from training.plan.traffic import ring, ring_message, step_times

LOCAL, DIM = 6, 10
WORLDS = {2: [0, 1], 3: [0, 1, 2], 4: [0, 1, 2, 3]}
# Operations that make a view or a constant: no kernel.
NO_KERNEL = ("view", "slice", "select", "permute", "transpose", "unsqueeze", "expand", "alias", "detach", "aten.t.")


def instrumented(rank):
    """World size -> what this rank sent, as (tag, bytes) in order, and whose texts it scored, in order."""
    found = {}
    for size, members in WORLDS.items():
        group = dist.new_group(members)
        if rank not in members:
            continue
        sent, scored = [], []
        transfer, add = prolip.ring.Transfer.__init__, prolip.ring.add_pairs

        def count(self, ring, out, into, tags, sent=sent, transfer=transfer):
            sent += [(tag, x.numel() * x.element_size()) for tag, x in zip(tags, out)]
            transfer(self, ring, out, into, tags)

        def note(rows, columns, *rest, scored=scored, add=add):
            scored.append(round(float(columns.trace[0]) / DIM))
            add(rows, columns, *rest)

        prolip.ring.Transfer.__init__, prolip.ring.add_pairs = count, note
        try:
            place = members.index(rank)
            mean = F.normalize(torch.randn(LOCAL, DIM), dim=-1).requires_grad_()
            # Texts of rank r have variance r + 1 in every dimension: their traces tell whose they are.
            text = Gaussian(mean, torch.full((LOCAL, DIM), place + 1.0).log().requires_grad_())
            image = Gaussian(mean.detach().clone().requires_grad_(), text.log_var.detach().clone().requires_grad_())
            ppcl_over_ranks(image, text, torch.tensor(1.0, requires_grad=True), 0.0, group=group)
        finally:
            prolip.ring.Transfer.__init__, prolip.ring.add_pairs = transfer, add
        found[size] = sent, [number - 1 for number in scored]
    return found


@pytest.fixture(scope="module")
def real():
    return run_ranks(4, instrumented)


def cluster(gpus, **machines):
    return build_cluster(Machines(**machines), gpus)


@pytest.mark.parametrize("size", WORLDS)
def test_messages_and_bytes_are_those_of_the_real_ring(real, size):
    planned = ring(LOCAL, DIM, cluster(size))
    for rank in WORLDS[size]:
        sent = real[rank][size][0]
        assert len(sent) == planned.messages
        assert sum(count for _, count in sent) == planned.sent
        assert {count for tag, count in sent if tag == TEXT_TAG} == {planned.text_bytes}
        assert {count for tag, count in sent if tag == GRADIENT_TAG} == {planned.sum_bytes}


@pytest.mark.parametrize("size", WORLDS)
def test_blocks_are_scored_in_the_order_of_the_real_ring(real, size):
    links = Links(torch.full((size,), 1e-3).numpy(), torch.full((size,), 1e-3).numpy())
    simulated = exchange(torch.zeros(size).numpy(), 1e-3, links, Draws(0), 0.0, record=True).scored
    for rank in WORLDS[size]:
        own, *others, again = real[rank][size][1]
        assert own == again == rank
        assert others == simulated[rank].tolist()


def test_ids_of_captions_add_eight_bytes_a_text():
    assert ring_message(64, 768, ids=True)[0] == ring_message(64, 768)[0] + 8 * 64


class CountKernels(TorchDispatchMode):
    """Operations that start a kernel."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not any(word in str(function) for word in NO_KERNEL):
            self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_kernels_of_a_text_block_are_counted():
    needs = Needs(*[True] * len(Needs._fields))
    image, text = (Packed(torch.randn(LOCAL, DIM), torch.rand(LOCAL)) for _ in range(2))
    rows, out = zero_rows(image, needs), zero_columns(text, needs)
    scale, bias = torch.tensor(10.0), torch.tensor(-10.0)
    with CountKernels() as counter:
        add_pairs(rows, text, out, scale, bias, Positives(), LOCAL)
    around = 4  # zeros and sum of an accumulator, two messages
    assert len(counter.names) + around == pytest.approx(Machines().block_kernels, abs=2), counter.names


@pytest.mark.parametrize("gpus, share", [(8, 0.001), (64, 0.001)])
def test_a_ring_that_computes_long_enough_waits_for_no_message(gpus, share):
    found = ring(512, 768, cluster(gpus, launch_us=50.0))
    assert found.exposed <= share * found.seconds
    assert found.seconds == pytest.approx(gpus * found.block_seconds, rel=share)


def test_a_slow_network_makes_the_ring_wait_for_two_messages_a_step():
    found = ring(512, 768, cluster(64, inter_gbs=0.5))
    assert found.seconds == pytest.approx(64 * 2 * found.message_seconds, rel=0.05)
    assert found.exposed > 0.9 * found.seconds


def test_one_gpu_sends_nothing():
    found = ring(512, 768, cluster(1))
    assert (found.messages, found.sent, found.exposed) == (0, 0, 0.0)
    model = describe("ProLIP-ViT-test", "prolip", 64)
    assert step_times(model, Training(global_batch=64, gpus=[1]), cluster(1), 1e12).reduce == 0


def test_gradients_are_reduced_in_float32_and_hidden_but_for_the_last_bucket():
    model, training = describe("ProLIP-ViT-B-16", "prolip", 512), Training()
    step = step_times(model, training, cluster(32), 0.4 * 989e12)
    assert step.reduce_bytes == pytest.approx(2 * 31 / 32 * 4 * model.parameters)
    assert step.reduce_exposed == pytest.approx(step.reduce / step.buckets)
    slow = step_times(model, training, cluster(32, inter_gbs=0.1), 0.4 * 989e12)
    assert slow.reduce_exposed == pytest.approx(slow.reduce - slow.backward, rel=0.05)


def test_recomputing_everything_takes_a_third_longer_in_the_towers():
    model = describe("ProLIP-ViT-B-16", "prolip", 512)
    plain, again = (step_times(model, Training(recompute=r), cluster(32), 4e14) for r in ("none", "full"))
    assert again.forward + again.backward == pytest.approx((plain.forward + plain.backward) * 4 / 3)
