"""Memory of one GPU at the peak of a step, in bytes: the start of the backward pass."""
from __future__ import annotations

import math

import torch

from planner.models import Model, Pass
from planner.question import Training
from prolip.losses.contrastive import Exchange, choose_exchange
from prolip.losses.gathered import row_width
from prolip.losses.pairs import default_block

FLOAT, HALF = 4, 2
# CUDA context, NCCL's buffers, kernels' workspaces and what the allocator cannot hand out: assumed.
CONTEXT = 3e9
ADAM_STATES = 2
MIB = 2**20
# Rows and columns whose pairs one program of the kernel in losses.fused scores; it leaves one sum for each of them.
TILE_ROWS, TILE_COLUMNS = 32, 128


def kept_per_token(part: Pass, half: int, norm_input: int | None = None) -> dict[str, float]:
    """Bytes that one block keeps per token for its backward pass, by what they are.

    Under autocast (`half` = 2) the inputs of products and of attention are bf16; on CUDA layer norm runs in float32 and
    keeps a float32 copy of its input, whatever the residual stream (`norm_input` = 4); on the CPU it keeps the stream.
    Flash attention keeps q, k, v, its output (in the layout that the projection wants) and a float32 number per head.
    """
    width, hidden = part.width, part.hidden
    norm_input = FLOAT if norm_input is None else norm_input
    return {
        "norms": 2 * (width * norm_input + 2 * FLOAT),
        "attention in": half * width,
        "queries, keys, values": 3 * half * width,
        "attention": half * width + FLOAT * part.heads,
        "mlp in": half * width,
        "gelu in": half * hidden,
        "mlp hidden": half * hidden,
    }


def stream_bytes(part: Pass, half: int) -> int:
    """Bytes per element of the residual stream: OpenCLIP's text towers add bf16 to float32 and stay float32."""
    return FLOAT if part.float_stream else half


def activations(part: Pass, rows: float, recompute: str, half: int, norm_input: int | None = None) -> float:
    """Bytes that a pass over `rows` rows keeps: of all its blocks, of the first layer, and of one block made again."""
    tokens = rows * part.tokens
    block = sum(kept_per_token(part, half, norm_input).values())
    entry = part.width * stream_bytes(part, half)
    products = half * (3 * part.width + 3 * part.width + part.hidden) + FLOAT * part.heads
    per_block = {"none": block, "selective": entry + products, "full": entry}[recompute]
    again = 0.0 if recompute == "none" else block
    # The first layer keeps its input, the norm before the first block (images only) its own.
    first = rows * part.inputs * half + (tokens * part.width * (norm_input or FLOAT) if part.inputs else 0)
    return tokens * (part.layers * per_block + again) + first


def exchange_of(training: Training, gpus: int, dim: int) -> Exchange:
    """How the texts come to all GPUs: as asked for, or as the training chooses it on GPUs."""
    if training.exchange != "auto":
        return training.exchange
    if training.method == "siglip":  # its texts go both ways round a ring, one block at a time
        return "ring"
    return choose_exchange(gpus, training.global_batch_size // gpus, dim, torch.device("cuda"))


def gathered_bytes(local: int, dim: int, ranks: int) -> int:
    """Bytes of all texts and of the sums of their gradients, which a rank of losses.gathered holds."""
    return 2 * ranks * local * row_width(dim) * FLOAT


def loss_space(local: int, dim: int, ranks: int, block: int | None, exchange: Exchange = "ring") -> float:
    """Bytes of PPCL on one rank beyond its inputs: texts, accumulators, pair matrices.

    losses.ring holds three text blocks (own, scored, under way) and five accumulators (own, being filled, sent,
    received, that of the rows); losses.gathered all texts, all their accumulators and that of the rows; one process two
    accumulators. add_pairs on CUDA holds one (block, columns) matrix, the kernel's sums, the scaled rows and three
    numbers per column. (On the CPU it is two matrices.)
    """
    gathered = exchange == "gather" and ranks > 1
    columns = ranks * local if gathered else local
    rows = min(local, block or default_block(columns, torch.device("cuda")))
    packed = local * (dim + 1) * FLOAT
    held = gathered_bytes(local, dim, ranks) + packed if gathered else (2 if ranks == 1 else 3 + 5) * packed
    numbers = rows * columns + kernel_sums(rows, columns) + rows * dim + 3 * columns
    return held + numbers * FLOAT


def kernel_sums(rows: int, columns: int) -> int:
    """Numbers that the kernel of losses.fused leaves for a block: one per tile, per row of it and per column of it."""
    down, across = math.ceil(rows / TILE_ROWS), math.ceil(columns / TILE_COLUMNS)
    return down * across + rows * across + down * columns


def memory(model: Model, training: Training, gpus: int) -> dict[str, float]:
    """Bytes on one GPU by kind. Parameters, gradients and AdamW's moments are float32, as is the average.

    DDP: gradients are views of its buckets, so the buckets cost nothing more. FSDP2: all of these in W shards; two
    blocks are whole at a time, in bf16, with the float32 gradient of one. Heads and per-sample losses are left out:
    they keep some dozens of numbers per dimension and row. Only one micro-batch has its activations at a time.
    """
    half = HALF if training.precision == "amp_bf16" else FLOAT
    local = training.global_batch_size // gpus
    micro = local / training.accum_freq
    shards = gpus if training.fsdp else 1
    weights = model.parameters * FLOAT / shards
    kept = sum(activations(part, micro * part.share, training.recompute, half) for part in model.passes)
    # Within one block: those of the MLP's hidden layer, before and after the GELU, of its input and of the stream.
    space = max(micro * part.share * part.tokens * (2 * half * part.hidden + half * part.width + FLOAT * part.width)
                for part in model.passes)  # fmt: skip
    pairs = loss_space(local, model.dim, gpus, training.block, exchange=exchange_of(training, gpus, model.dim))
    whole = model.largest * (2 * half + FLOAT) if shards > 1 else 0.0
    copies = model.cast * HALF if half == HALF and shards == 1 else 0.0
    return {
        "parameters": weights,
        "gradients (DDP's buckets)" if shards == 1 else "gradients": weights,
        "optimiser": ADAM_STATES * weights,
        "averaged weights": weights if training.ema_decay is not None else 0.0,
        "bf16 copies of weights" if shards == 1 else "whole blocks": copies + whole,
        "activations": kept,
        "gradients of activations": space,
        "PPCL": pairs,
        "input batch": local * model.pixels * (1 + FLOAT),
        "context, NCCL (assumed)": CONTEXT,
    }
