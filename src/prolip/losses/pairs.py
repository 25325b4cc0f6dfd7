"""The sigmoid loss of all pairs of two sets and its gradients, by blocks of rows, for similarities that factor.

A similarity factors if it is u_i . v_j + a_i + b_j. KL and JS factor too, but subtract terms |mean|^2 / variance from
each other, which is too inexact in float32. `tiled.py` computes them, elk and similarities that do not factor.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from prolip.gaussian import Gaussian
from prolip.losses.autograd import Evaluation
from prolip.losses.positives import BlockGradient, Labels, Positives

Scalars = tuple[Tensor, Tensor]
# Pairs per block, to stay in a core's cache on CPU and to fill a device. MIN_ROWS keeps the matrix products
# of a block efficient when the columns are many.
PAIRS_CPU, PAIRS_DEVICE, MIN_ROWS = 1 << 18, 1 << 24, 256
FUSED_DEVICES = frozenset({"cuda"})  # devices whose float32 blocks are scored by one Triton kernel
# softplus(z) equals z beyond this even in float64, and exp(z) does not overflow float32 before it.
SOFTPLUS_LINEAR = 80.0


class Factors(NamedTuple):
    """One side of a similarity_ij = vector_i . vector_j + offset_i + offset_j: vector (B, P), offset (B,)."""

    vector: Tensor
    offset: Tensor

    def select(self, part: slice) -> Factors:
        return Factors(self.vector[part], self.offset[part])


def csd_factors(z: Gaussian) -> Factors:
    """Factor `measures.csd_similarity`, mean_i.mean_j - (trace_i + trace_j)/2, ProLIP (A.1): (B, D) -> P = D."""
    return Factors(z.mean, -0.5 * z.trace)


def mean_factors(z: Gaussian) -> Factors:
    """Factor `measures.mean_cosine`, without the variances: (B, D) -> P = D."""
    return Factors(F.normalize(z.mean, dim=-1), z.mean.new_zeros(len(z.mean)))


def wasserstein2_factors(z: Gaussian) -> Factors:
    """Factor -1/2 `measures.wasserstein2`, PCME++ 2.2, with the error of its pairwise form: (B, D) -> P = 2 D.

    mean_i.mean_j + sigma_i.sigma_j - (|mean_i|^2 + trace_i + |mean_j|^2 + trace_j)/2.
    """
    return Factors(torch.cat([z.mean, (0.5 * z.log_var).exp()], -1), -0.5 * (z.mean.square().sum(-1) + z.trace))


class Columns(NamedTuple):
    """Sums over pairs: d loss / d vector (m, P), d loss / d offset (m,); None: not needed."""

    vector: Tensor | None
    offset: Tensor | None


class Rows(NamedTuple):
    """Rows and their sums over pairs, updated in place, with g_ij = d loss / d logit_ij."""

    own: Factors
    weight: float  # of one pair in the loss, 1/B
    loss: Tensor  # (), without the weight
    weighted: Tensor  # sum_ij g_ij b_j (), b_j the offset of a column
    vector: Tensor | None  # sum_j g_ij v_j (n, P); None: not needed
    sums: Tensor | None  # sum_j g_ij (n,); None if no gradient is needed

    def select(self, part: slice) -> Rows:
        vector = None if self.vector is None else self.vector[part]
        sums = None if self.sums is None else self.sums[part]
        return self._replace(own=self.own.select(part), vector=vector, sums=sums)


class WantedGradients(NamedTuple):
    """Flags of the inputs that need a gradient."""

    image_vector: bool = False
    image_offset: bool = False
    text_vector: bool = False
    text_offset: bool = False
    scale: bool = False
    bias: bool = False


def default_block(columns: int, device: torch.device) -> int:
    """Return the rows per block: PAIRS_CPU or PAIRS_DEVICE pairs in all, at least MIN_ROWS rows."""
    pairs = PAIRS_CPU if device.type == "cpu" else PAIRS_DEVICE
    return max(MIN_ROWS, pairs // max(columns, 1))


def zero_rows(own: Factors, needs: WantedGradients) -> Rows:
    """Return zeros for the sums that the gradients named by `needs` require; d scale uses the sum of the vectors."""
    vector, offset = own
    return Rows(
        own,
        weight=1 / len(offset),
        loss=offset.new_zeros(()),
        weighted=offset.new_zeros(()),
        vector=vector.new_zeros(vector.shape) if needs.image_vector or needs.scale else None,
        sums=offset.new_zeros(offset.shape) if any(needs) else None,
    )


def zero_columns(columns: Factors, needs: WantedGradients) -> Columns:
    """Return zeros for the gradients of the columns that `needs` names."""
    wanted = needs.text_vector, needs.text_offset
    return Columns(*(x.new_zeros(x.shape) if want else None for x, want in zip(columns, wanted)))


def sum_block(
    rows: Tensor, vectors: Tensor, row_bias: Tensor, column_bias: Tensor, positive: Positives, weight: float, grad: bool
) -> tuple[Tensor, BlockGradient | None]:
    """Return the loss of a block of pairs: logits = rows (n, P) @ vectors.T (P, m) + row_bias (n, 1) + column_bias (m,)

    With z = -y logit: loss = sum softplus(z), gradient g = -y weight sigmoid(z), None unless `grad`.
    Workspace: two (n, m) matrices, two more with ids. `fused.sum_block` does the same on a device.
    """
    z = row_bias.unsqueeze(1) + column_bias
    z.addmm_(rows, vectors.T)
    flip = positive.flip(z)
    flip(z)
    loss = F.softplus(z, threshold=SOFTPLUS_LINEAR).sum()
    if not grad:
        return loss, None
    flip(z.sigmoid_())
    return loss, BlockGradient(z.mul_(weight), z.sum(1), z.sum(0))


def choose_sum_block(own: Factors) -> Callable[..., tuple[Tensor, BlockGradient | None]]:
    """Return the Triton kernel for float32 on FUSED_DEVICES if Triton is installed, else plain operations."""
    if own.vector.device.type in FUSED_DEVICES and own.vector.dtype == torch.float32 and find_spec("triton"):
        from prolip.losses import fused

        return fused.sum_block
    return sum_block


def add_pairs(
    rows: Rows, columns: Factors, out: Columns, scale: Tensor, bias: Tensor, positives: Positives, block: int
) -> None:
    """Add all pairs of rows (n) and columns (m) to the sums in `rows` and `out`, in place, `block` rows at a time."""
    column_bias = scale * columns.offset
    score_block = choose_sum_block(rows.own)
    for start in range(0, len(rows.own.offset), block):
        part = slice(start, start + block)
        here, some = rows.select(part), positives.select(part)
        scaled = here.own.vector * scale
        row_bias, wanted = bias + scale * here.own.offset, here.sums is not None
        loss, gradient = score_block(scaled, columns.vector, row_bias, column_bias, some, rows.weight, wanted)
        rows.loss.add_(loss)
        if gradient is None or here.sums is None:
            continue
        rows.weighted.add_(gradient.columns.dot(columns.offset))
        here.sums.add_(gradient.rows)
        if here.vector is not None:
            here.vector.addmm_(gradient.pairs, columns.vector)
        if out.vector is not None:
            out.vector.addmm_(gradient.pairs.T, scaled)
        if out.offset is not None:
            out.offset.add_(gradient.columns * scale)
        del gradient  # frees its matrix before the next block is written


def finish(rows: Rows, out: Columns, scale: Tensor) -> Evaluation:
    """Return the loss and its gradients, ordered as `WantedGradients`, from the sums of all pairs; changes `rows`."""
    loss = rows.loss * rows.weight
    if rows.sums is None:
        return loss, (None,) * len(WantedGradients._fields)
    d_bias, d_offset = rows.sums.sum(), rows.sums * scale
    if rows.vector is None:
        return loss, (None, d_offset, *out, None, d_bias)
    dots = rows.vector.flatten().dot(rows.own.vector.flatten())
    d_scale = dots + (rows.sums.dot(rows.own.offset) + rows.weighted)
    return loss, (rows.vector.mul_(scale), d_offset, *out, d_scale, d_bias)


def score_alone(
    image: Factors, text: Factors, scale_bias: Scalars, labels: Labels, block: int | None, needs: WantedGradients
) -> Evaluation:
    """Compute the loss and gradients of `contrastive.sigmoid_loss` on one batch, without a graph."""
    rows, out = zero_rows(image, needs), zero_columns(text, needs)
    block = block or default_block(len(text.offset), text.offset.device)
    add_pairs(rows, text, out, *scale_bias, Positives(0, *(labels or ())), block)
    return finish(rows, out, scale_bias[0])
