"""A cluster of GPUs; a model's parameters, FLOPs and shapes; the memory of one GPU at the peak of a step."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import nn

from prolip.flops import FORWARD_AND_BACKWARD, PEAK_TFLOPS, forward_flops, image_sides
from prolip.losses.contrastive import Exchange, choose_exchange
from prolip.losses.exchanges import row_width
from prolip.losses.pairs import default_block
from prolip.methods import find_method
from prolip.models.prolip import ProLIP
from prolip.models.registry import get_model_config
from prolip.plan.config import FLOAT, HALF, PlanConfig
from prolip.plan.tables import Rows, Value, size
from prolip.uncertainty.token_stats import as_tokens
from prolip.utils.flags import FlagError

CONTEXT = 3e9  # CUDA context, NCCL's buffers, kernels' workspaces and fragmentation: assumed
ADAM_STATES = 2
CUDA = torch.device("cuda")


GB = 1e9
LINK_SHARE = 0.8  # achievable share of a link's rate: assumed; sources of the table: docs/benchmarks/planner.md
INTRA_DELAY, INTER_DELAY = 10e-6, 20e-6  # seconds before a message moves within a node and between nodes: assumed
# Seconds per hop of an all-gather within a node and between nodes: NCCL's own latencies of its slowest protocol.
INTRA_HOP, INTER_HOP = 3.4e-6, 14e-6


class GPU(NamedTuple):
    """Data sheet, SXM form: dense peaks in TFLOP/s, GB, GB/s (links one way), dollars per hour or None if unknown."""

    peak_tflops: float
    fp32_tflops: float
    memory_gb: float
    memory_gbs: float
    intra_gbs: float
    inter_gbs: float
    price: float | None


GPUS = {
    "A100-40GB": GPU(PEAK_TFLOPS["A100"], 19.5, 40.0, 1555.0, LINK_SHARE * 300.0, LINK_SHARE * 25.0, 1.844),
    "A100-80GB": GPU(PEAK_TFLOPS["A100"], 19.5, 80.0, 2039.0, LINK_SHARE * 300.0, LINK_SHARE * 25.0, None),
    "H100": GPU(PEAK_TFLOPS["H100"], 67.0, 80.0, 3350.0, LINK_SHARE * 450.0, LINK_SHARE * 50.0, 4.916),
    "H200": GPU(PEAK_TFLOPS["H200"], 67.0, 141.0, 4800.0, LINK_SHARE * 450.0, LINK_SHARE * 50.0, 5.408),
    "B200": GPU(PEAK_TFLOPS["B200"], 75.0, 180.0, 8000.0, LINK_SHARE * 900.0, LINK_SHARE * 50.0, None),
}


class Cluster(NamedTuple):
    """W GPUs in nodes. Rates in FLOP/s and bytes/s, times in seconds."""

    sheet: GPU  # the data sheet, with the given values
    gpus: int
    per_node: int
    nodes: int
    peak: float
    link_rate: float  # of the slowest link of a ring over all GPUs
    delay: float  # of that link
    collective_rate: float  # of that ring, NCCL's bus bandwidth
    hops: float  # once round the ring
    tree: float  # latency of a tree over all GPUs
    store_rate: float  # of each node while all read
    shards: int  # number of parts of parameters, gradients and optimiser state


def build_cluster(config: PlanConfig, gpus: int) -> Cluster:
    """Build a cluster of `gpus` GPUs; fewer than a node holds form one node. FlagError unless all nodes are full."""
    per_node = min(gpus, config.gpus_per_node)
    nodes, rest = divmod(gpus, per_node)
    if rest:
        raise FlagError(
            f"--gpus {gpus} is not a multiple of {per_node} (--gpus-per-node): give {gpus - rest + per_node}"
        )
    given = {name: value for name in GPU._fields if (value := getattr(config, name, None)) is not None}
    sheet = GPUS[config.gpu]._replace(**given)
    link, delay = (sheet.intra_gbs, INTRA_DELAY) if nodes == 1 else (sheet.inter_gbs, INTER_DELAY)
    return Cluster(
        sheet,
        gpus,
        per_node,
        nodes,
        # fp32 towers multiply in TF32, at half of bf16's peak on all these GPUs
        peak=sheet.peak_tflops * 1e12 / (2 if config.precision == "fp32" else 1),
        link_rate=link * GB,
        delay=delay,
        collective_rate=min(sheet.intra_gbs, per_node * link) * GB,  # all links of a node carry it
        hops=(gpus - nodes) * INTRA_HOP + (nodes - 1) * INTER_HOP,
        tree=math.log2(nodes) * INTER_DELAY + math.log2(per_node) * INTRA_DELAY,
        store_rate=min(config.store_gbs, config.store_total_gbs / nodes) * GB,
        shards=gpus if config.fsdp else 1,
    )


class Pass(NamedTuple):
    """One sample's pass through a tower; sizes that differ between blocks, as in a pyramid, are averaged."""

    name: str
    flops: int  # of the forward pass; multiply and add count separately
    tokens: float
    width: float  # mean over tokens
    hidden: float  # width of the MLP's hidden layer, mean over tokens
    layers: int
    inputs: int  # elements saved by the first layer
    share: float = 1.0  # rows per sample of the batch


class ModelCount(NamedTuple):
    """Counts of a model."""

    parameters: int
    dim: int  # of its embeddings
    passes: tuple[Pass, ...]
    shapes: tuple[tuple[int, int], ...]  # first dimension and elements of each parameter

    def padded(self, gpus: int) -> int:
        """Return the elements that FSDP2 moves: it pads first dimensions to a multiple of the ranks."""
        return sum(count // rows * gpus * math.ceil(rows / gpus) for rows, count in self.shapes)

    @property
    def flops(self) -> float:
        """Model FLOPs of one sample, forward and backward, without recomputation."""
        return FORWARD_AND_BACKWARD * sum(part.flops * part.share for part in self.passes)


def count_of_run(name: str, method: str, local_batch: int) -> ModelCount:
    """Count a model trained with a method at a batch per GPU, which rounds the rows of additional views."""
    model, (config, objective) = build(name), find_method(method)[:2]
    required = objective.encoder_passes(config(), local_batch, model)
    passes = [measure(name, part.kind, part.keep)._replace(share=part.rows / local_batch) for part in required]
    shapes = tuple((len(p) if p.ndim else 1, p.numel()) for p in model.parameters())
    return ModelCount(sum(count for _, count in shapes), model.embed_dim, tuple(passes), shapes)


@lru_cache(maxsize=8)
def build(name: str) -> Any:
    """Build a model by name on the meta device, without gradients."""
    try:
        config, _ = get_model_config(name)
    except (ValueError, FileNotFoundError) as error:
        raise FlagError(f"--model {name!r}: {error}") from error
    with torch.device("meta"):
        return ProLIP(config).requires_grad_(False)


@lru_cache(maxsize=32)
def measure(name: str, kind: str, keep: int | None) -> Pass:
    """Measure one pass over one sample: FLOPs, tokens of each block's output, widest input of its products."""
    model, seen = build(name), list[tuple[int, ...]]()
    tower = model.visual if kind == "image" else model.text

    def look(block: nn.Module, _: Any, output: Any) -> None:
        x = as_tokens(output[0] if isinstance(output, tuple) else output, tower)
        products = max(getattr(part, "in_features", getattr(part, "in_channels", 0)) for part in block.modules())
        seen.append((x.shape[1], x.shape[2], products))

    trunk = getattr(getattr(tower, "tower", None), "trunk", None)
    stem = getattr(getattr(trunk, "patch_embed", None), "backbone", None)  # ViTamin's stages before its blocks
    handles = [
        block.register_forward_hook(look)
        for stage in (*getattr(stem, "stages", ()), *tower.blocks)
        for block in getattr(stage, "blocks", stage if isinstance(stage, nn.Sequential) else (stage,))
    ]
    try:
        flops = forward_flops(model, kind, keep)
    except NotImplementedError as error:
        raise FlagError(f"--model {name!r}: {error}") from None
    finally:
        for handle in handles:
            handle.remove()
    pixels = 3 * math.prod(image_sides(model)) if kind == "image" else 0
    tokens = sum(block[0] for block in seen)
    width, hidden = (sum(block[0] * block[i] for block in seen) / tokens for i in (1, 2))
    kept = pixels if keep is None or tower.has_reader else pixels * keep // model.num_patches
    title = kind if keep is None else f"masked {kind}"
    return Pass(title, flops, tokens / len(seen), width, hidden, len(seen), kept)


def activations(part: Pass, rows: float, recompute: str, half: int, norm_input: int = FLOAT) -> float:
    """Return the bytes that a pass over `rows` rows saves: all blocks, the first layer, and one recomputed block.

    Under autocast (`half` = 2) inputs of products and attention are bf16. Layer norm saves its input (`norm_input`: a
    float32 copy on CUDA, the residual stream on the CPU) and two float32 statistics; flash attention q, k, v and its
    output; an MLP its input, and GELU's input and output.
    """
    tokens, width, hidden = rows * part.tokens, part.width, part.hidden
    block = 2 * (width * norm_input + 2 * FLOAT) + half * (5 * width + width + 2 * hidden)
    entry = width * (FLOAT if part.name == "text" else half)  # OpenCLIP's text towers stay float32
    per_block = {"none": block, "selective": entry + half * (6 * width + hidden), "full": entry}[recompute]
    again = 0.0 if recompute == "none" else block
    # The first layer saves its input, and so does the norm before the first block (images only).
    first = rows * part.inputs * half + (tokens * width * norm_input if part.inputs else 0)
    return tokens * (part.layers * per_block + again) + first


def loss_space(local: int, dim: int, ranks: int, exchange: Exchange = "ring") -> float:
    """Return the bytes of PPCL on one rank beyond its inputs. The ring holds three text blocks and five accumulators;
    gathering holds all texts, their accumulators and that of the rows; one process holds two accumulators. Pairs need
    one (block, columns) matrix, the scaled rows and three numbers per column.
    """
    gathered = exchange == "gather" and ranks > 1
    columns, packed = ranks * local if gathered else local, local * (dim + 1) * FLOAT
    rows = min(local, default_block(columns, CUDA))
    held = 2 * columns * row_width(dim) * FLOAT + packed if gathered else (2 if ranks == 1 else 3 + 5) * packed
    return held + FLOAT * (rows * columns + rows * dim + 3 * columns)


def memory(model: ModelCount, config: PlanConfig, cluster: Cluster) -> Rows:
    """Return the bytes on one GPU by kind, at the start of the backward pass: float32 parameters, gradients (DDP: views
    of its buckets), moments and average; FSDP2: in W shards. Without gathered blocks of FSDP2, and heads.
    """
    half, gpus = FLOAT if config.precision == "fp32" else HALF, cluster.gpus
    local = config.global_batch_size // gpus
    micro = local / config.accum_freq  # only one micro-batch has activations at a time
    weights = model.parameters * FLOAT / cluster.shards
    recompute = config.checkpoint_policy if config.grad_checkpointing else "none"
    # Gradients within one block: of the MLP's hidden layer before and after the GELU, of its input and of the stream.
    blocks = [(p.share * p.tokens, half * (2 * p.hidden + p.width) + FLOAT * p.width) for p in model.passes]
    space = max(micro * tokens * each for tokens, each in blocks)
    kinds = {
        "parameters": weights,
        "gradients" if config.fsdp else "gradients (DDP's buckets)": weights,
        "optimiser": ADAM_STATES * weights,
        **({"averaged weights": weights} if config.ema_decay is not None else {}),
        **({} if config.fsdp or half == FLOAT else {"bf16 copies, at most": model.parameters * HALF}),
        "activations": sum(activations(part, micro * part.share, recompute, half) for part in model.passes),
        "gradients of activations": space,
        "PPCL": loss_space(local, model.dim, gpus, choose_exchange(gpus, local, model.dim, CUDA)),
        "input batch": local * model.passes[0].inputs * (1 + FLOAT),
        "context, NCCL (assumed)": CONTEXT,
    }
    kinds["sum"] = used = sum(kinds.values())
    share = {"share of the GPU's": Value(used / (cluster.sheet.memory_gb * GB), "{:.0%}".format)}
    return {kind: Value(held, size) for kind, held in kinds.items()} | share
