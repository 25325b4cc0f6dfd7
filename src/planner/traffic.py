"""What travels between GPUs in a step and from the loader to them, how long it takes, and how much of it is hidden."""
from __future__ import annotations

import math
from typing import NamedTuple

from planner.config import FLOAT, PlanConfig
from planner.hardware import GB, INTER_DELAY, INTRA_DELAY, Cluster
from planner.memory import ADAM_STATES, exchange_of, gathered_bytes, kernel_sums, rows_of_block
from planner.models import Model
from planner.tables import Rows, Value, number, size, span, whole
from prolip.data.config import chunks_ahead
from prolip.flops import FORWARD_AND_BACKWARD
from prolip.losses.contrastive import Exchange
from prolip.losses.exchanges import row_width

# Kernels per block of PPCL: 17 of losses.pairs.add_pairs on CUDA, 4 around it; seconds to start one: assumed.
BLOCK_KERNELS, LAUNCH = 21, 5e-6
# Times that a matrix of pairs passes through memory: written by the product for the scores, read and written by the
# kernel (losses.fused), read by the products for the gradients of rows and of columns.
PAIR_VISITS = 5
# The kernel's sums: written by the kernel, read where they are added up.
SUM_VISITS = 2
# Times that columns are read or written for each block of rows: means twice, gradients to be zeroed and added to.
COLUMN_VISITS = 5
# Parts of the pairs' work: scores, gradients of the rows, gradients of the columns.
PAIR_PRODUCTS = 3
# Of the FP32 peak, that the products of pairs reach: losses run with TF32 off.
PRODUCT_SHARE = 0.4
# Bytes of one of DDP's buckets of gradients.
BUCKET = 25 * 2**20


class Pairs(NamedTuple):
    """PPCL over all ranks, on one rank and in one step. Bytes, seconds.

    messages: of texts and of gradients together, to the right neighbour (ring) or as collectives (gather);
    message_bytes: that a rank sends in one; blocks: of texts (ring) or of rows (gather), scored one after the other;
    kernels: started for all of them; exposed: what the computation does not hide.
    """

    exchange: Exchange
    messages: int
    message_bytes: int
    message_seconds: float
    blocks: int
    block_seconds: float
    kernels: int
    exposed: float

    @property
    def scoring(self) -> float:
        """Seconds of computation."""
        return self.blocks * self.block_seconds

    @property
    def seconds(self) -> float:
        """Seconds of the whole exchange with its computation."""
        return self.scoring + self.exposed


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


def scoring(local: int, columns: int, dim: int, cluster: Cluster) -> tuple[float, int]:
    """Return (seconds, blocks of rows) of scoring `local` images against so many texts.

    The longer of two times counts: products with memory, and the start of kernels, which are as many for a block of few
    pairs as for one of many.
    """
    rows = rows_of_block(local, columns)
    blocks = math.ceil(local / rows)
    products = PAIR_PRODUCTS * 2 * local * columns * dim / (PRODUCT_SHARE * cluster.sheet.fp32_tflops * 1e12)
    visits = PAIR_VISITS * local * columns + blocks * COLUMN_VISITS * columns * dim
    visits += blocks * SUM_VISITS * kernel_sums(rows, columns)
    return max(products + visits * FLOAT / (cluster.sheet.memory_gbs * GB), blocks * BLOCK_KERNELS * LAUNCH), blocks


def pairs(exchange: Exchange, local: int, dim: int, cluster: Cluster) -> Pairs:
    """Plan PPCL by this exchange; one GPU has nothing to exchange.

    The ring: W - 1 text messages and W - 1 accumulators. A step of the ring takes max(computation, one of both),
    exact to within two messages; half of the own block comes first, half last, where the last accumulator comes home.
    Gathered: an all-gather and a reduce-scatter, which nothing hides. In each a rank sends its share of W - 1
    parts, and every part makes W - 1 hops: NCCL knows no tree for these two.
    """
    ranks = cluster.gpus
    if exchange == "gather" and ranks > 1:
        sent = (ranks - 1) * local * row_width(dim) * FLOAT
        work, blocks = scoring(local, ranks * local, dim, cluster)
        collective = sent / cluster.collective_rate + cluster.delay + cluster.hops
        return Pairs("gather", 2, sent, collective, blocks, work / blocks, blocks * BLOCK_KERNELS, 2 * collective)
    sent = local * (dim + 1) * FLOAT
    work, parts = scoring(local, local, dim, cluster)
    message = sent / cluster.link_rate + cluster.delay if ranks > 1 else 0.0
    exposed = 2 * max(0.0, message - work / 2) + (ranks - 1) * max(0.0, 2 * message - work)
    return Pairs("ring", 2 * (ranks - 1), sent, message, ranks, work, ranks * parts * BLOCK_KERNELS, exposed)


def traffic(step: Step, local: int, dim: int, cluster: Cluster) -> Rows:
    """Return the table of a step's traffic, with PPCL by both exchanges."""
    chosen = step.pairs
    ring, gather = (pairs(exchange, local, dim, cluster) for exchange in ("ring", "gather"))
    return {
        "texts come by": chosen.exchange if cluster.gpus > 1 else "-",
        "messages or collectives": Value(chosen.messages, whole),
        "bytes sent in all": Value(chosen.messages * chosen.message_bytes, size),
        "kernels started": Value(chosen.kernels, whole),
        "PPCL": Value(chosen.seconds, span),
        "of it waiting for messages": Value(chosen.exposed, span),
        "PPCL by the ring": Value(ring.seconds, span),
        "PPCL with texts gathered": Value(gather.seconds, span),
        "gathered texts and sums": Value(gathered_bytes(local, dim, cluster.gpus), size),
        "gradients sent": Value(step.reduce_bytes, size),
        "gradient exchange": Value(step.reduce, span),
        "of it not hidden": Value(step.reduce_exposed, span),
    }


def step_times(model: Model, config: PlanConfig, cluster: Cluster, flops_rate: float) -> Step:
    """Plan the step at a rate of FLOP/s that a GPU computes at without waits.

    A third of the model FLOPs is the forward pass; full recomputation adds another third (selective: no product is
    repeated), and so do micro-batches, whose exact gradients need a pass without a graph first. DDP: float32 gradients
    go round in a ring all-reduce; buckets travel while the rest of the (last micro-batch's) backward pass computes, the
    last one after it. FSDP2: two all-gathers of parameters, which begin in the forward pass, and one reduce-scatter.
    AdamW reads parameter, gradient and moments and writes all but the gradient; the average is read and written.
    """
    local, gpus = config.global_batch_size // cluster.gpus, cluster.gpus
    forward = model.flops / FORWARD_AND_BACKWARD * local / flops_rate
    backward = forward * (FORWARD_AND_BACKWARD - 1 + config.repeats)
    visits = 2 * (1 + ADAM_STATES) + 1 + (3 if config.ema_decay is not None else 0)
    moved = (gpus - 1) / gpus * model.parameters * (2 * config.half + FLOAT if config.fsdp else 2 * FLOAT)
    parts = max(1, math.ceil(model.parameters * FLOAT / BUCKET))
    # Before an all-reduce moves: up and down a tree of nodes, and round a node.
    delay = 2 * (math.log2(cluster.nodes) * INTER_DELAY + math.log2(cluster.per_node) * INTRA_DELAY)
    reduce = moved / cluster.collective_rate + parts * delay if gpus > 1 else 0.0
    hiding = backward / config.accum_freq + (forward if config.fsdp else 0.0)
    return Step(
        forward,
        backward,
        optimiser=visits * FLOAT * model.parameters / cluster.shards / (cluster.sheet.memory_gbs * GB),
        pairs=pairs(exchange_of(config, gpus, model.dim), local, model.dim, cluster),
        reduce=reduce,
        reduce_bytes=moved,
        reduce_exposed=max(reduce / parts, reduce - hiding * (1 - 1 / parts)),
        buckets=parts,
    )


def feed(local: int, step_seconds: float, cluster: Cluster, config: PlanConfig) -> Rows:
    """Return what the loader can give, and what a batch of `local` samples per GPU every `step_seconds` wants.

    A loader process decodes while its shard streams in, so each of the two limits it alone; opening a shard is waited
    for. Every process keeps one shard open. A chunk may begin `chunks_ahead` steps before it is due.
    """
    sample, wanted = config.sample_kb * 1e3, local / step_seconds
    opening = config.open_ms * 1e-3 / config.shard_samples
    decoding, reading = 1 / config.images_per_core + opening, sample / (config.stream_mbs * 1e6) + opening
    ahead = chunks_ahead(config.prefetch, local) * step_seconds
    return {
        "wanted samples/s/GPU": Value(wanted, number),
        "decoding gives": Value(config.workers / decoding, whole),
        "the object store gives": Value(config.store_gbs * GB / cluster.per_node / sample, whole),
        "reading shards gives": Value(config.workers / reading, whole),
        "cores needed per GPU": Value(wanted * decoding, "{:.1f}".format),
        "read per second": Value(wanted * cluster.gpus * sample, size),
        "shards open": Value(config.workers * cluster.gpus, whole),
        "pause that prefetch bridges": Value(max(0.0, ahead - local / config.workers * max(decoding, reading)), span),
    }
