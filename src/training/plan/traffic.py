"""What travels between GPUs in a step, how long it takes, and how much of that computation hides."""
from __future__ import annotations

import math
from typing import NamedTuple

import torch

from prolip.losses import default_block
from training.plan.hardware import Cluster
from training.plan.memory import ADAM_STATES, FLOAT, HALF, ID, MIB
from training.plan.models import PASSES, Model
from training.plan.question import Training

# Times that a matrix of pairs is read or written by them, and the share of the TF32 peak that their products reach.
PAIR_VISITS, PRODUCT_SHARE = 14, 0.4
BUCKET = 25 * MIB
# Parts of the pairs' work: scores, gradients of the rows, gradients of the columns.
PAIR_PRODUCTS = 3


class Ring(NamedTuple):
    """PPCL's ring on one rank and in one step. Messages to the right neighbour, bytes, seconds.

    text_bytes, sum_bytes: of one message; messages: of both kinds together; block_seconds: scoring one text block;
    message_seconds: one message over the slowest link; seconds: the whole exchange with its computation; exposed: what
    of it the same work without messages would not take.
    """

    text_bytes: int
    sum_bytes: int
    messages: int
    block_seconds: float
    message_seconds: float
    seconds: float
    exposed: float

    @property
    def sent(self) -> int:
        """Bytes that a rank sends in a step."""
        return (self.messages + 1) // 2 * self.text_bytes + self.messages // 2 * self.sum_bytes


class Step(NamedTuple):
    """Seconds of one step without jitter. forward and backward: computation of the towers; reduce: of the gradients'
    exchange in `buckets` parts, of which `reduce_exposed` is not hidden behind the backward pass (and, if `early`, the
    forward pass); they begin in the last `last_share` of the backward pass, that of the last micro-batch."""

    forward: float
    backward: float
    optimiser: float
    ring: Ring
    reduce: float
    reduce_bytes: float
    reduce_exposed: float
    buckets: int
    early: bool
    last_share: float

    @property
    def computing(self) -> float:
        """Without any communication."""
        return self.forward + self.backward + self.optimiser + self.ring.seconds - self.ring.exposed

    @property
    def seconds(self) -> float:
        """The step."""
        return self.forward + self.ring.seconds + self.backward + self.reduce_exposed + self.optimiser


def ring_message(local: int, dim: int, ids: bool = False) -> tuple[int, int]:
    """Bytes of a text block [mean, trace] (with the texts' ids) and of the accumulator of its gradients."""
    packed = local * (dim + 1) * FLOAT
    return packed + local * ID * ids, packed


def block_seconds(local: int, dim: int, cluster: Cluster, block: int | None = None) -> float:
    """Seconds to score `local` images against `local` texts: the longest of products, memory and starting kernels."""
    rows = min(local, block or default_block(local, torch.device("cuda")))
    products = PAIR_PRODUCTS * 2 * local * local * dim / (PRODUCT_SHARE * cluster.tf32)
    memory = PAIR_VISITS * FLOAT * local * local / cluster.memory_rate
    kernels = math.ceil(local / rows) * cluster.block_kernels
    return max(products + memory, kernels * cluster.launch)


def ring(local: int, dim: int, cluster: Cluster, block: int | None = None) -> Ring:
    """W - 1 text messages and W - 1 accumulators per rank; at each step one of both and one block of pairs.

    With equal ranks a step of the ring takes max(computation, both messages) over the slowest link, exact to within two
    messages; half of the own block comes first, half last, where the last accumulator comes home.
    """
    size = cluster.gpus
    text, sums = ring_message(local, dim)
    work = block_seconds(local, dim, cluster, block)
    if size == 1:
        return Ring(text, sums, 0, work, 0.0, work, 0.0)
    rate, delay = (cluster.intra_rate, cluster.intra_delay)
    if cluster.nodes > 1:
        rate, delay = min(rate, cluster.inter_rate), max(delay, cluster.inter_delay)
    message = max(text, sums) / rate + delay
    exposed = 2 * max(0.0, message - work / 2) + (size - 1) * max(0.0, 2 * message - work)
    return Ring(text, sums, 2 * (size - 1), work, message, size * work + exposed, exposed)


def gather_instead(local: int, dim: int, cluster: Cluster) -> tuple[float, float]:
    """(seconds, bytes held) of one all-gather of the texts and one reduce-scatter of their gradients in the ring's
    place: two collectives whatever the number of ranks, for a memory that grows with it."""
    size = cluster.gpus
    held = 2 * size * ring_message(local, dim)[0]
    return held * (size - 1) / size / cluster.collective_rate + 2 * collective_delay(cluster), held


def collective_delay(cluster: Cluster) -> float:
    """Seconds before a collective moves: up and down a tree of nodes, and round a node."""
    return 2 * (math.log2(cluster.nodes) * cluster.inter_delay + math.log2(cluster.per_node) * cluster.intra_delay)


def reduce_bytes(model: Model, training: Training, gpus: int) -> float:
    """Bytes that a rank sends to make gradients equal: ring all-reduce of float32 (DDP), or two all-gathers of bf16
    parameters and one reduce-scatter of float32 gradients (FSDP2)."""
    share = (gpus - 1) / gpus
    if training.parallel == "ddp":
        return 2 * share * model.parameters * FLOAT
    half = HALF if training.precision == "amp_bf16" else FLOAT
    return share * model.parameters * (2 * half + FLOAT)


def optimiser_seconds(model: Model, training: Training, cluster: Cluster) -> float:
    """AdamW reads parameter, gradient and moments and writes all but the gradient; the average is read and written."""
    visits = 2 * (1 + ADAM_STATES) + 1 + (3 if training.ema else 0)
    shards = cluster.gpus if training.parallel == "fsdp" else 1
    return visits * FLOAT * model.parameters / shards / cluster.memory_rate


def step_times(model: Model, training: Training, cluster: Cluster, flops_rate: float) -> Step:
    """The step at a rate of FLOP/s that a GPU computes at without waits.

    A third of the model FLOPs is the forward pass; full recomputation adds another third (selective: no product is
    repeated), and so do micro-batches, whose exact gradients need a pass without a graph first. DDP's buckets travel
    while the rest of the (last micro-batch's) backward pass computes, the last one after it; FSDP2's parameters travel
    during the forward pass too.
    """
    local = training.global_batch // cluster.gpus
    forward = model.flops / PASSES * local / flops_rate
    backward = forward * (PASSES - 1 + training.repeats)
    moved = reduce_bytes(model, training, cluster.gpus)
    parts = max(1, math.ceil(model.parameters * FLOAT / BUCKET))
    exchange = moved / cluster.collective_rate + parts * collective_delay(cluster) if cluster.gpus > 1 else 0.0
    early = training.parallel == "fsdp"
    hiding = backward / training.accum_freq + forward * early
    exposed = max(exchange / parts, exchange - hiding * (1 - 1 / parts))
    return Step(
        forward,
        backward,
        optimiser_seconds(model, training, cluster),
        ring(local, model.dim, cluster, training.block),
        exchange,
        moved,
        exposed,
        parts,
        early,
        1 / training.accum_freq,
    )
