"""What travels between GPUs in a step and from the loader to them, how long it takes, and how much of it is hidden."""
from __future__ import annotations

import math
from typing import NamedTuple

import torch

from planner.hardware import GB, Cluster
from planner.memory import ADAM_STATES, FLOAT, HALF, MIB, exchange_of, kernel_sums
from planner.models import Model
from planner.question import Supply, Training
from prolip.data.config import chunks_ahead
from prolip.flops import FORWARD_AND_BACKWARD
from prolip.losses.contrastive import Exchange
from prolip.losses.gathered import row_width
from prolip.losses.pairs import default_block

# Times that a matrix of pairs passes through memory: written by the product for the scores, read and written by the
# kernel (losses.fused), read by the products for the gradients of rows and of columns. The kernel's sums come on top.
PAIR_VISITS = 5
# Written by the kernel, read where they are added up.
SUM_VISITS = 2
# Of the FP32 peak, that the products of pairs reach: losses run with TF32 off.
PRODUCT_SHARE = 0.4
# Times that columns are read or written for each block of rows: means twice, gradients to be zeroed and added to.
COLUMN_VISITS = 5
BUCKET = 25 * MIB
# Parts of the pairs' work: scores, gradients of the rows, gradients of the columns.
PAIR_PRODUCTS = 3


class Pairs(NamedTuple):
    """PPCL over all ranks, on one rank and in one step. Bytes, seconds.

    exchange: how texts come to all ranks; messages: to the right neighbour (ring), or collectives (gather), of texts
    and of gradients together; text_bytes, sum_bytes: that a rank sends in one of each; blocks: text blocks (ring) or
    blocks of rows (gather), scored one after the other; block_seconds: of one; kernels: started for all of them;
    message_seconds: one message over the slowest link, or one collective; seconds: the whole exchange with its
    computation; exposed: what of it the same work without messages would not take.
    """

    exchange: Exchange
    messages: int
    text_bytes: int
    sum_bytes: int
    blocks: int
    block_seconds: float
    kernels: int
    message_seconds: float
    seconds: float
    exposed: float

    @property
    def sent(self) -> int:
        """Bytes that a rank sends in a step."""
        return self.messages * self.text_bytes

    @property
    def scoring(self) -> float:
        """Seconds of computation."""
        return self.blocks * self.block_seconds


class Step(NamedTuple):
    """Seconds of one step without jitter. forward and backward: computation of the towers; reduce: of the gradients'
    exchange in `buckets` parts, of which the towers' computation does not hide `reduce_exposed`."""

    forward: float
    backward: float
    optimiser: float
    pairs: Pairs
    reduce: float
    reduce_bytes: float
    reduce_exposed: float
    buckets: int

    @property
    def seconds(self) -> float:
        """The step."""
        return self.forward + self.pairs.seconds + self.backward + self.reduce_exposed + self.optimiser


def payload(local: int, width: int) -> int:
    """Bytes of one rank's texts, and as many of the accumulator of their gradients.

    width: numbers per text, D + 1 in the ring, `losses.gathered.row_width` where texts are gathered.
    """
    return local * width * FLOAT


def scoring(local: int, columns: int, dim: int, cluster: Cluster, block: int | None = None) -> tuple[float, int]:
    """(seconds, blocks of rows) to score `local` images against so many texts: the longer of products with memory and
    of starting kernels, which are as many for a block of few pairs as for one of many."""
    rows = min(local, block or default_block(columns, torch.device("cuda")))
    blocks = math.ceil(local / rows)
    products = PAIR_PRODUCTS * 2 * local * columns * dim / (PRODUCT_SHARE * cluster.fp32)
    visits = PAIR_VISITS * local * columns + blocks * COLUMN_VISITS * columns * dim
    visits += blocks * SUM_VISITS * kernel_sums(rows, columns)
    return max(products + visits * FLOAT / cluster.memory_rate, blocks * cluster.block_kernels * cluster.launch), blocks


def pairs(exchange: Exchange, local: int, dim: int, cluster: Cluster, block: int | None = None) -> Pairs:
    """PPCL by this exchange; one GPU has nothing to exchange."""
    if cluster.gpus == 1 or exchange == "ring":
        return ring(local, dim, cluster, block)
    return gather(local, dim, cluster, block)


def ring(local: int, dim: int, cluster: Cluster, block: int | None = None) -> Pairs:
    """losses.ring: W - 1 text messages and W - 1 accumulators; at each step one of both and one text block.

    With equal ranks a step of the ring takes max(computation, both messages) over the slowest link, exact to within two
    messages; half of the own block comes first, half last, where the last accumulator comes home.
    """
    size = cluster.gpus
    packed = payload(local, dim + 1)
    work, parts = scoring(local, local, dim, cluster, block)
    kernels = size * parts * cluster.block_kernels
    if size == 1:
        return Pairs("ring", 0, packed, packed, 1, work, kernels, 0.0, work, 0.0)
    rate, delay = cluster.intra_rate, cluster.intra_delay
    if cluster.nodes > 1:
        rate, delay = min(rate, cluster.inter_rate), max(delay, cluster.inter_delay)
    message = packed / rate + delay
    exposed = 2 * max(0.0, message - work / 2) + (size - 1) * max(0.0, 2 * message - work)
    return Pairs(
        "ring", 2 * (size - 1), packed, packed, size, work, kernels, message, size * work + exposed, exposed
    )


def gather(local: int, dim: int, cluster: Cluster, block: int | None = None) -> Pairs:
    """losses.gathered: one all-gather of the texts, all pairs in large blocks, one reduce-scatter of the gradients.

    Nothing hides the collectives. In each a rank sends its share of W - 1 parts of all.
    """
    size = cluster.gpus
    sent = (size - 1) * payload(local, row_width(dim))
    work, blocks = scoring(local, size * local, dim, cluster, block)
    # Whatever the size: every part makes W - 1 hops, of which one less than there are nodes lead from node to node.
    # NCCL knows no tree for these two, and reckons so when it chooses.
    start = cluster.intra_delay if cluster.nodes == 1 else max(cluster.intra_delay, cluster.inter_delay)
    inside = size - cluster.nodes
    delay = start + inside * cluster.intra_hop + (cluster.nodes - 1) * cluster.inter_hop
    collective = sent / cluster.collective_rate + delay
    exposed = 2 * collective
    return Pairs(
        "gather", 2, sent, sent, blocks, work / blocks, blocks * cluster.block_kernels, collective, work + exposed,
        exposed,
    )


def reduce_bytes(model: Model, training: Training, gpus: int) -> float:
    """Bytes that a rank sends to make gradients equal: ring all-reduce of float32 (DDP), or two all-gathers of bf16
    parameters and one reduce-scatter of float32 gradients (FSDP2)."""
    share = (gpus - 1) / gpus
    if not training.fsdp:
        return 2 * share * model.parameters * FLOAT
    half = HALF if training.precision == "amp_bf16" else FLOAT
    return share * model.parameters * (2 * half + FLOAT)


def optimiser_seconds(model: Model, training: Training, cluster: Cluster) -> float:
    """AdamW reads parameter, gradient and moments and writes all but the gradient; the average is read and written."""
    visits = 2 * (1 + ADAM_STATES) + 1 + (3 if training.ema_decay is not None else 0)
    shards = cluster.gpus if training.fsdp else 1
    return visits * FLOAT * model.parameters / shards / cluster.memory_rate


def step_times(model: Model, training: Training, cluster: Cluster, flops_rate: float) -> Step:
    """The step at a rate of FLOP/s that a GPU computes at without waits.

    A third of the model FLOPs is the forward pass; full recomputation adds another third (selective: no product is
    repeated), and so do micro-batches, whose exact gradients need a pass without a graph first. DDP's buckets travel
    while the rest of the (last micro-batch's) backward pass computes, the last one after it; FSDP2's parameters travel
    during the forward pass too.
    """
    local = training.global_batch_size // cluster.gpus
    forward = model.flops / FORWARD_AND_BACKWARD * local / flops_rate
    backward = forward * (FORWARD_AND_BACKWARD - 1 + training.repeats)
    moved = reduce_bytes(model, training, cluster.gpus)
    parts = max(1, math.ceil(model.parameters * FLOAT / BUCKET))
    # Before an all-reduce moves: up and down a tree of nodes, and round a node.
    delay = 2 * (math.log2(cluster.nodes) * cluster.inter_delay + math.log2(cluster.per_node) * cluster.intra_delay)
    exchange = moved / cluster.collective_rate + parts * delay if cluster.gpus > 1 else 0.0
    hiding = backward / training.accum_freq + (forward if training.fsdp else 0.0)
    exposed = max(exchange / parts, exchange - hiding * (1 - 1 / parts))
    return Step(
        forward,
        backward,
        optimiser_seconds(model, training, cluster),
        pairs(exchange_of(training, cluster.gpus, model.dim), local, model.dim, cluster, training.block),
        exchange,
        moved,
        exposed,
        parts,
    )


class Feed(NamedTuple):
    """What the loader can give, in samples/s of one GPU, by what limits it; and what the run asks for at `wanted`.

    bridged: seconds that one loader process may stand still before the step waits for it.
    """

    wanted: float
    decoding: float
    store: float
    streams: float
    cores_needed: float
    shards_per_second: float
    bytes_per_second: float
    open_streams: int
    bridged: float

    @property
    def limit(self) -> float:
        """The least of the limits, samples/s of one GPU."""
        return min(self.decoding, self.store, self.streams)

    @property
    def keeps_up(self) -> bool:
        """Whether the loader is as fast as the GPUs on average; scripts/simulate_steps.py says how often it is late."""
        return self.limit >= self.wanted


def feed(local: int, step_seconds: float, cluster: Cluster, supply: Supply) -> Feed:
    """What a batch of `local` samples per GPU every `step_seconds` asks for.

    A loader process decodes while its shard streams in, so each of the two limits it alone; opening a shard is waited
    for. Every process keeps one shard open. A chunk may begin `chunks_ahead` steps before it is due.
    """
    size = supply.sample_kb * 1e3
    cores = supply.workers
    wanted, ahead = local / step_seconds, chunks_ahead(supply.prefetch, local)
    opening = supply.open_ms * 1e-3 / supply.shard_samples
    per_core = 1 / (1 / supply.images_per_core + opening)
    per_stream = 1 / (size / (supply.stream_mbs * 1e6) + opening)
    return Feed(
        wanted,
        cores * per_core,
        supply.store_gbs * GB / cluster.per_node / size,
        cores * per_stream,
        wanted / per_core,
        wanted * cluster.gpus / supply.shard_samples,
        wanted * cluster.gpus * size,
        cores * cluster.gpus,
        max(0.0, ahead * step_seconds - local / cores * max(1 / per_core, 1 / per_stream)),
    )


def missing_shards(cluster: Cluster, supply: Supply) -> int:
    """Streams without a shard of their own: each stream needs at least one of the data's shards."""
    if supply.dataset_samples is None:
        return 0
    return max(0, supply.workers * cluster.gpus - int(supply.dataset_samples // supply.shard_samples))
