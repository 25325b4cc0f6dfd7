"""Seconds of a run's phases for any number of GPUs: start, step with its traffic, stop, save, load, failures."""

from __future__ import annotations

import math
from typing import NamedTuple

from prolip.data.config import chunks_ahead
from prolip.flops import FORWARD_AND_BACKWARD
from prolip.losses.contrastive import Exchange, choose_exchange
from prolip.losses.exchanges import row_width
from prolip.losses.pairs import default_block
from prolip.plan.config import FLOAT, HALF, PlanConfig
from prolip.plan.models import ADAM_STATES, CUDA, GB, INTER_DELAY, Cluster, ModelCount
from prolip.plan.tables import HOUR, MINUTE, Rows, Value, number, size, span, whole
from prolip.utils.flags import FlagError

# Kernels per block of PPCL: 17 of losses.pairs.add_pairs on CUDA, 4 around it; seconds to launch one: assumed.
BLOCK_KERNELS, LAUNCH = 21, 5e-6
# Memory passes of a matrix of pairs: written by the product for scores, read and written by losses.fused, read by the
# products for both gradients; of columns, for each block of rows: means twice, gradients zeroed and accumulated.
PAIR_VISITS, COLUMN_VISITS = 5, 5
# Products per pair (scores, both gradients), and the measured share of an H100's FP32 peak: losses do not use TF32.
PAIR_PRODUCTS, PRODUCT_SHARE = 3, 0.65
BUCKET = 25 * 2**20  # bytes of gradients, DDP's
# Seconds to import torch and OpenCLIP and to start CUDA; per rank, to connect; per look-up in a shared file system.
# Bytes/s between hosts outside NCCL. All assumed.
PROCESS, CONNECT, LOOKUP, TCP = 30.0, 3e-3, 1e-3, 1e9
# Seconds to read a shard's index entry, bytes per shard sent to all ranks: measured, docs/developing/data_order.md.
# Seconds to draw a parameter of a new model: measured, docs/benchmarks/planner.md.
INDEXED, SENT, DRAWN = 4e-6, 88, 7e-9
# Samples in the shuffle buffer of a loader process, and bytes of its data position: a test compares the loader's.
BUFFER, PLACE = 5000, 100
# Seconds and steps between two rounds in which ranks exchange their requests: a test compares training's.
ROUND, MOST_STEPS = 0.25, 100


class PairExchange(NamedTuple):
    """PPCL of one rank in one step. Bytes, seconds."""

    exchange: Exchange
    messages: int  # texts and gradients together, to the right neighbour (ring) or as collectives (gather)
    message_bytes: int
    message_seconds: float
    blocks: int  # of texts (ring) or rows (gather), scored one after the other
    scoring: float  # seconds of computation
    exposed: float  # seconds of messages that computation does not hide

    @property
    def seconds(self) -> float:
        """Seconds of the whole exchange, including computation."""
        return self.scoring + self.exposed


class Step(NamedTuple):
    """Seconds of one step without jitter."""

    forward: float  # computation of the towers
    backward: float
    optimiser: float
    pairs: PairExchange
    reduce: float  # exchange of the gradients
    reduce_bytes: float
    reduce_exposed: float  # part that the towers' computation does not hide
    buckets: int  # number of its parts

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return self.forward + self.pairs.seconds + self.backward + self.reduce_exposed + self.optimiser


def scoring(local: int, columns: int, dim: int, cluster: Cluster) -> tuple[float, int]:
    """Return (seconds, blocks of rows) of `local` images against `columns` texts: the larger of products, launches."""
    blocks = math.ceil(local / min(local, default_block(columns, CUDA)))
    products = PAIR_PRODUCTS * 2 * local * columns * dim / (PRODUCT_SHARE * cluster.sheet.fp32_tflops * 1e12)
    visits = PAIR_VISITS * local * columns + blocks * COLUMN_VISITS * columns * dim
    return max(products + visits * FLOAT / (cluster.sheet.memory_gbs * GB), blocks * BLOCK_KERNELS * LAUNCH), blocks


def pairs(exchange: Exchange, local: int, dim: int, cluster: Cluster) -> PairExchange:
    """Plan PPCL with this exchange; one GPU exchanges nothing.

    The ring: W - 1 text messages and W - 1 accumulators. A step of the ring takes max(computation, one of both), exact
    to within two messages; half of the own block is scored first, half last, when the last accumulator returns.
    Gathered: an all-gather and a reduce-scatter of W - 1 hops each, not hidden: NCCL has no tree for them.
    """
    ranks = cluster.gpus
    if exchange == "gather" and ranks > 1:
        sent = (ranks - 1) * local * row_width(dim) * FLOAT
        work, blocks = scoring(local, ranks * local, dim, cluster)
        collective = sent / cluster.collective_rate + cluster.delay + cluster.hops
        return PairExchange("gather", 2, sent, collective, blocks, work, 2 * collective)
    sent = local * (dim + 1) * FLOAT
    work, _ = scoring(local, local, dim, cluster)
    message = sent / cluster.link_rate + cluster.delay if ranks > 1 else 0.0
    exposed = 2 * max(0.0, message - work / 2) + (ranks - 1) * max(0.0, 2 * message - work)
    return PairExchange("ring", 2 * (ranks - 1), sent, message, ranks, ranks * work, exposed)


def step_times(model: ModelCount, config: PlanConfig, cluster: Cluster, flops_rate: float) -> Step:
    """Plan the step at `flops_rate` FLOP/s, the speed of a GPU without waits.

    A third of the model FLOPs is the forward pass; full recomputation adds another (selective: no product is repeated),
    as do micro-batches, whose exact gradients first need a pass without a graph. DDP: an all-reduce of float32
    gradients, in buckets during the (last micro-batch's) backward pass, the last one after it. FSDP2: two all-gathers
    of parameters, from the forward pass on, and a reduce-scatter. AdamW reads all state, and writes all but gradients.
    """
    local, gpus = config.global_batch_size // cluster.gpus, cluster.gpus
    half = FLOAT if config.precision == "fp32" else HALF
    forward = model.flops / FORWARD_AND_BACKWARD * local / flops_rate
    backward = forward * (FORWARD_AND_BACKWARD - 1 + config.repeats)
    visits = 2 * (1 + ADAM_STATES) + 1 + (3 if config.ema_decay is not None else 0)
    whole = model.padded(gpus) * (2 * half + FLOAT) if config.fsdp else model.parameters * 2 * FLOAT
    moved = (gpus - 1) / gpus * whole
    parts = max(1, math.ceil(model.parameters * FLOAT / BUCKET))
    reduce = moved / cluster.collective_rate + parts * 2 * cluster.tree if gpus > 1 else 0.0  # up and down the tree
    hiding = backward / config.accum_freq + (forward if config.fsdp else 0.0)
    exposed = max(reduce / parts, reduce - hiding * (1 - 1 / parts))
    optimiser = visits * FLOAT * model.parameters / cluster.shards / (cluster.sheet.memory_gbs * GB)
    chosen = pairs(choose_exchange(gpus, local, model.dim, CUDA), local, model.dim, cluster)
    return Step(forward, backward, optimiser, chosen, reduce, moved, exposed, parts)


def traffic(step: Step, local: int, dim: int, cluster: Cluster) -> Rows:
    """Return the table of a step's traffic, with both exchanges of PPCL."""
    ring, gather = (pairs(exchange, local, dim, cluster) for exchange in ("ring", "gather"))
    return {
        "text exchange": step.pairs.exchange if cluster.gpus > 1 else "-",
        "messages, bytes": Value(step.pairs.messages * step.pairs.message_bytes, size),
        "messages, not hidden": Value(step.pairs.exposed, span),
        "PPCL by the ring": Value(ring.seconds, span),
        "PPCL with texts gathered": Value(gather.seconds, span),
        "gradients, bytes": Value(step.reduce_bytes, size),
        "gradient exchange": Value(step.reduce, span),
        "gradients, not hidden": Value(step.reduce_exposed, span),
    }


def feed(local: int, step_seconds: float, cluster: Cluster, config: PlanConfig) -> Rows:
    """Return the table of the loader's rates, and of the need of `local` samples per GPU every `step_seconds`.

    A loader process decodes while its open shard streams in, so the slower of the two limits it.
    """
    sample, needed = config.sample_kb * 1e3, local / step_seconds
    opening = config.open_ms * 1e-3 / config.shard_samples
    decoding, reading = 1 / config.images_per_core + opening, sample / (config.stream_mbs * 1e6) + opening
    ahead, chunk = chunks_ahead(config.prefetch, local) * step_seconds, local / config.workers * max(decoding, reading)
    return {
        "needed samples/s/GPU": Value(needed, number),
        "decoding gives": Value(config.workers / decoding, whole),
        "the object store gives": Value(cluster.store_rate / cluster.per_node / sample, whole),
        "reading shards gives": Value(config.workers / reading, whole),
        "cores needed per GPU": Value(needed * decoding, "{:.1f}".format),
        "read per second": Value(needed * cluster.gpus * sample, size),
        "shards open": Value(config.workers * cluster.gpus, whole),
        "pause that prefetch bridges": Value(max(0.0, ahead - chunk), span),
    }


def read_seconds(samples: float, config: PlanConfig, cluster: Cluster) -> float:
    """Return the seconds in which every loader process reads `samples`, at the rate of its stream or the store."""
    share = cluster.store_rate / (cluster.per_node * config.workers)
    return samples * config.sample_kb * 1e3 / min(config.stream_mbs * 1e6, share)


def start(model: ModelCount, config: PlanConfig, cluster: Cluster) -> dict[str, float]:
    """Return the seconds of a start by part.

    W ranks connect in c W (assumed). Rank 0 looks up S shards, once each, and sends them down a tree of log2 W sends
    (counts and bytes measured by bench/train/scale.py). Every rank draws the model (measured); DDP sends rank 0's.
    Shuffle buffers fill to a fifth, first chunks are decoded (rates assumed).
    """
    shards = (config.dataset_samples or config.max_samples) / config.shard_samples
    chunk, sends = config.global_batch_size / cluster.gpus / config.workers, math.ceil(math.log2(cluster.gpus))
    sent = 0.0 if config.fsdp or not sends else model.parameters * FLOAT / cluster.collective_rate + cluster.tree
    filled = config.open_ms * 1e-3 + read_seconds(BUFFER / 5 + chunk, config, cluster)
    return {
        "processes": PROCESS,
        "ranks connecting": CONNECT * cluster.gpus,
        "shards listed": shards * (LOOKUP + INDEXED + sends * SENT / TCP),
        "model": model.parameters * DRAWN + sent,
        "first samples": filled + chunk / config.images_per_core,
    }


def known_to_all(step: float) -> float:
    """Return an upper bound of the seconds until all ranks have a request: two rounds of StopConsensus (by test)."""
    return 2 * step * min(max(1, round(ROUND / step)), MOST_STEPS)


def save(saved: float, config: PlanConfig, cluster: Cluster) -> tuple[float, float]:
    """Return (seconds without training, seconds of writing during training) of a checkpoint; rates assumed.

    Rank 0 gathers the positions of all loader processes, two messages per rank. DDP: it copies and writes all. FSDP2:
    each rank copies 1/W, all nodes write, up to the rate of the store.
    """
    gathered = (cluster.gpus - 1) * (2 * INTER_DELAY + config.workers * PLACE / TCP)
    rate = min(config.checkpoint_gbs * (cluster.nodes if config.fsdp else 1), config.store_total_gbs)
    return gathered + saved / cluster.shards / (config.copy_gbs * GB), saved / (rate * GB)


def load(saved: float, config: PlanConfig, cluster: Cluster) -> dict[str, float]:
    """Return the additional seconds of a resume by part, after a start; rates assumed.

    Rank 0 reads the whole checkpoint for its checksums. Then each node reads it once for its ranks (FSDP2: its own
    part), and each rank copies its part to its GPU. Each of P loader processes reads again the shards of the B samples
    in its shuffle buffer, and the open one: at most about min(B ln(B P) + a shard, its samples of an epoch) + a shard.
    """
    streams = cluster.gpus * config.workers
    own = (config.dataset_samples or config.max_samples) / streams
    again = min(BUFFER * math.log(BUFFER * streams) + config.shard_samples, own) + config.shard_samples
    read = saved / (cluster.nodes if config.fsdp else 1) / cluster.store_rate
    return {
        "checked": saved / (min(config.store_gbs, config.store_total_gbs) * GB),
        "read and copied": read + saved / cluster.shards / (config.copy_gbs * GB),
        "shards read again": read_seconds(again, config, cluster),
    }


def phases(model: ModelCount, config: PlanConfig, cluster: Cluster, step: float) -> Rows:
    """Return the table of a run's phases. A checkpoint has parameters, moments and averaged weights in float32."""
    saved = model.parameters * FLOAT * (1 + ADAM_STATES + (config.ema_decay is not None))
    begins, resumes = start(model, config, cluster), load(saved, config, cluster)
    (still, written), known = save(saved, config, cluster), known_to_all(step)
    seconds = {
        "start": sum(begins.values()),
        **{f"- {name}": part for name, part in begins.items()},
        "step": step,
        "stop": known + still + written,
        "- known to all ranks": known,
        "save, training paused": still,
        "save, in the background": written,
        "load": sum(resumes.values()),
        **{f"- {name}": part for name, part in resumes.items()},
    }
    return {"checkpoint": Value(saved, size)} | {name: Value(part, span) for name, part in seconds.items()}


def failures(config: PlanConfig, cluster: Cluster, parts: Rows) -> tuple[float, Rows]:
    """Return (seconds of the run from start to end, the table of its failures), given the table of its phases.

    A failure costs the restart, half an interval tau, and the work done while the last file was being written:
    wall = start + work (1 + still / tau) / (1 - (tau / 2 + written + restart) / M), M = 50,000 GPU-hours / W (Llama 3).
    tau: as given, or Young's sqrt(2 still M), but not below the time to write. FlagError for a run without end.
    """
    step, still, write = parts["step"], parts["save, training paused"], parts["save, in the background"]
    restart = config.queue_minutes * MINUTE + parts["start"] + parts["load"]
    mean, work = HOUR * config.mtbf_gpu_hours / cluster.gpus, config.max_samples / config.global_batch_size * step
    best = max(math.sqrt(2 * still * mean), write)
    every = best if config.save_every_samples is None else config.save_every_samples / config.global_batch_size * step
    every = max(min(every, work), step)  # at most the whole run
    lost = every / 2 + write
    if lost + restart >= mean:
        raise FlagError(
            f"a failure every {span(mean)} costs {span(lost + restart)}, so the run never ends: give a larger "
            "--mtbf-gpu-hours, a smaller --save-every-samples, or a smaller --queue-minutes"
        )
    wall = parts["start"] + work * (1 + still / every) / (1 - (lost + restart) / mean)
    return wall, {
        "between failures": Value(mean, span),
        "failures in the run": Value(wall / mean, "{:.2g}".format),
        "best interval (Young)": Value(best, span),
        "interval used": Value(every, span),
        "work lost per failure": Value(lost, span),
        "restart": Value(restart, span),
        "time lost in the run": Value(1 - work / wall, "{:.2%}".format),
    }
