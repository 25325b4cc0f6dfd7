"""Memory of one GPU at the peak of a step, in bytes: the start of the backward pass."""
from __future__ import annotations

import math

import torch

from planner.config import FLOAT, HALF, PlanConfig
from planner.hardware import Cluster
from planner.models import Model, Pass
from prolip.losses.contrastive import Exchange, choose_exchange
from prolip.losses.exchanges import row_width
from prolip.losses.pairs import default_block

# CUDA context, NCCL's buffers, kernels' workspaces and what the allocator cannot hand out: assumed.
CONTEXT = 3e9
ADAM_STATES = 2
# Rows and columns whose pairs one program of the kernel in losses.fused scores; it leaves one sum for each of them.
TILE_ROWS, TILE_COLUMNS = 32, 128


def block_bytes(part: Pass, half: int, norm_input: int = FLOAT) -> float:
    """Bytes that one block keeps per token for its backward pass.

    Under autocast (`half` = 2) the inputs of products and of attention are bf16. Layer norm keeps its input and two
    float32 statistics. On CUDA it runs in float32 and keeps a float32 copy of the input (`norm_input` = 4); on the CPU
    it keeps the residual stream. Flash attention keeps q, k, v, its output and a float32 number per head.
    """
    norms = 2 * (part.width * norm_input + 2 * FLOAT)
    attention = half * (part.width + 3 * part.width + part.width) + FLOAT * part.heads
    mlp = half * (part.width + part.hidden + part.hidden)  # its input, the input of GELU, and the output of that
    return norms + attention + mlp


def activations(part: Pass, rows: float, recompute: str, half: int, norm_input: int = FLOAT) -> float:
    """Bytes that a pass over `rows` rows keeps: of all its blocks, of the first layer, and of one recomputed block."""
    tokens = rows * part.tokens
    block = block_bytes(part, half, norm_input)
    entry = part.width * (FLOAT if part.name == "text" else half)  # OpenCLIP's text towers stay float32
    products = half * (3 * part.width + 3 * part.width + part.hidden) + FLOAT * part.heads
    per_block = {"none": block, "selective": entry + products, "full": entry}[recompute]
    again = 0.0 if recompute == "none" else block
    # The first layer keeps its input, the norm before the first block (images only) its own.
    first = rows * part.inputs * half + (tokens * part.width * norm_input if part.inputs else 0)
    return tokens * (part.layers * per_block + again) + first


def exchange_of(config: PlanConfig, gpus: int, dim: int) -> Exchange:
    """Return how the texts come to all GPUs: as asked for, or as the training chooses it on GPUs."""
    if config.exchange != "auto":
        return config.exchange
    return choose_exchange(gpus, config.global_batch_size // gpus, dim, torch.device("cuda"))


def gathered_bytes(local: int, dim: int, ranks: int) -> int:
    """Bytes of all texts and of the sums of their gradients, which a rank that gathers holds."""
    return 2 * ranks * local * row_width(dim) * FLOAT


def rows_of_block(local: int, columns: int) -> int:
    """Rows of PPCL that a GPU scores at a time."""
    return min(local, default_block(columns, torch.device("cuda")))


def kernel_sums(rows: int, columns: int) -> int:
    """Numbers that the kernel of losses.fused leaves for a block: one per tile, per row of it and per column of it."""
    down, across = math.ceil(rows / TILE_ROWS), math.ceil(columns / TILE_COLUMNS)
    return down * across + rows * across + down * columns


def loss_space(local: int, dim: int, ranks: int, exchange: Exchange = "ring") -> float:
    """Bytes of PPCL on one rank beyond its inputs: texts, accumulators, pair matrices.

    The ring holds three text blocks (own, scored, under way) and five accumulators (own, being filled, sent,
    received, that of the rows); gathering all texts, all their accumulators and that of the rows; one process two
    accumulators. add_pairs on CUDA holds one (block, columns) matrix, the kernel's sums, the scaled rows and three
    numbers per column. (On the CPU it is two matrices.)
    """
    gathered = exchange == "gather" and ranks > 1
    columns = ranks * local if gathered else local
    rows = rows_of_block(local, columns)
    packed = local * (dim + 1) * FLOAT
    held = gathered_bytes(local, dim, ranks) + packed if gathered else (2 if ranks == 1 else 3 + 5) * packed
    return held + FLOAT * (rows * columns + kernel_sums(rows, columns) + rows * dim + 3 * columns)


def memory(model: Model, config: PlanConfig, cluster: Cluster) -> dict[str, float]:
    """Bytes on one GPU by kind. Parameters, gradients and AdamW's moments are float32, as is the average.

    DDP: gradients are views of its buckets, so the buckets cost nothing more. FSDP2: all of these in W shards; two
    blocks are whole at a time, in bf16, with the float32 gradient of one. Heads and per-sample losses are left out:
    they keep some dozens of numbers per dimension and row. Only one micro-batch has its activations at a time.
    """
    half, gpus = config.half, cluster.gpus
    local = config.global_batch_size // gpus
    micro = local / config.accum_freq
    weights = model.parameters * FLOAT / cluster.shards
    # Within one block: those of the MLP's hidden layer, before and after the GELU, of its input and of the stream.
    space = max(micro * part.share * part.tokens * (half * (2 * part.hidden + part.width) + FLOAT * part.width)
                for part in model.passes)
    return {
        "parameters": weights,
        "gradients" if config.fsdp else "gradients (DDP's buckets)": weights,
        "optimiser": ADAM_STATES * weights,
        **({"averaged weights": weights} if config.ema_decay is not None else {}),
        **({"whole blocks": model.largest * (2 * half + FLOAT)} if config.fsdp else
           {"bf16 copies of weights": model.cast * HALF} if half == HALF else {}),
        "activations": sum(activations(part, micro * part.share, config.recompute, half) for part in model.passes),
        "gradients of activations": space,
        "PPCL": loss_space(local, model.dim, gpus, exchange_of(config, gpus, model.dim)),
        "input batch": local * model.passes[0].inputs * (1 + FLOAT),
        "context, NCCL (assumed)": CONTEXT,
    }
