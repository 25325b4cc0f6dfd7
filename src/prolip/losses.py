"""The terms of ProLIP's loss as pure functions: PPCL, inclusion and VIB (spec section 3).

PPCL is linear in memory: its gradients are taken in the forward pass, one block of rows at a time, so no B x B matrix
is ever kept. `ring.py` runs the same block kernel (`add_pairs`) over the texts of all ranks.
"""
from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from prolip.gaussian import Gaussian, as_scalar, check_gaussian, check_pair
from prolip.measures import inclusion_test_per_dim

# Pairs per block: what stays in a core's cache on CPU, what fills a device on one. MIN_ROWS keeps the matrix products
# of a block efficient when the columns are many.
PAIRS_CPU, PAIRS_DEVICE, MIN_ROWS = 1 << 18, 1 << 24, 256
# Devices whose float32 blocks are scored by one Triton kernel.
FUSED_DEVICES = frozenset({"cuda"})
# softplus(z) equals z beyond this even in float64, and exp(z) does not overflow float32 before it.
SOFTPLUS_LINEAR = 80.0
NO_MATCH = -1


class Matches(NamedTuple):
    """Which texts of a batch are known to describe which images.

    image: (B, K) int64, the ids of all texts that are true for an image, padded with -1; text: (B,) int64, the id of
    the text at hand (-1: unknown, matches its own image only).
    Pair (i, j) is positive iff text[j] is in image[i] or i == j.
    """

    image: Tensor
    text: Tensor


class Packed(NamedTuple):
    """What csd similarity needs of a batch of Gaussians: mean (B, D) and trace (B,)."""

    mean: Tensor
    trace: Tensor


class Positives(NamedTuple):
    """The positive pairs among rows (n) and columns (m).

    diagonal: row i matches column i + diagonal, None: no such match; rows (n, K), columns (m,): ids as in `Matches`.
    """

    diagonal: int | None = None
    rows: Tensor | None = None
    columns: Tensor | None = None

    def select(self, part: slice) -> Positives:
        """The same for some of the rows."""
        diagonal = None if self.diagonal is None else self.diagonal + part.start
        return Positives(diagonal, None if self.rows is None else self.rows[part], self.columns)

    def flip(self, z: Tensor) -> Callable[[Tensor], Tensor]:
        """A function that negates, in place, the positive pairs of a matrix of the shape and dtype of z (n, m).

        One id of every row is compared at a time: (n, K, m) is never built.
        """
        if self.rows is None or self.columns is None:
            if self.diagonal is None:
                return lambda x: x
            offset = self.diagonal
            return lambda x: negate(x, x.diagonal(offset))
        mask = torch.zeros_like(z, dtype=torch.bool)
        for ids in self.rows.unbind(1):
            mask |= ids.unsqueeze(1) == self.columns
        mask &= self.columns != NO_MATCH
        if self.diagonal is not None:
            mask.diagonal(self.diagonal).fill_(True)
        signs = torch.ones_like(z).masked_fill_(mask, -1)
        return lambda x: x.mul_(signs)


def negate(x: Tensor, view: Tensor) -> Tensor:
    """x after negating a view of it in place."""
    view.neg_()
    return x


class BlockGradient(NamedTuple):
    """The loss's gradient by the logits of one block of pairs (n, m), and its sums per row (n,) and per column (m,)."""

    pairs: Tensor
    rows: Tensor
    columns: Tensor


class Columns(NamedTuple):
    """Sums over pairs that belong to the columns: d loss / d mean (m, D), d loss / d trace (m,); None: not wanted."""

    mean: Tensor | None
    trace: Tensor | None


class Rows(NamedTuple):
    """Rows and the sums over pairs that belong to them, added to in place, with g_ij = d loss / d logit_ij.

    points (n, D); weight: of one pair in the loss, 1/B; loss (): without the weight; weighted (): sum_ij g_ij trace_j;
    mean (n, D): sum_j g_ij mean_j, None: not wanted; sums (n,): sum_j g_ij, None when no gradient at all is wanted.
    """

    points: Packed
    weight: float
    loss: Tensor
    weighted: Tensor
    mean: Tensor | None
    sums: Tensor | None

    def select(self, part: slice) -> Rows:
        """Some of the rows; what is added to the result is added to the whole."""
        mean = None if self.mean is None else self.mean[part]
        sums = None if self.sums is None else self.sums[part]
        points = Packed(self.points.mean[part], self.points.trace[part])
        return self._replace(points=points, mean=mean, sums=sums)


class Needs(NamedTuple):
    """Which inputs want a gradient, in the order of `pack_inputs`."""

    image_mean: bool = False
    image_trace: bool = False
    text_mean: bool = False
    text_trace: bool = False
    scale: bool = False
    bias: bool = False


Evaluation = tuple[Tensor, tuple[Tensor | None, ...]]
Evaluate = Callable[[tuple[Tensor, ...], Needs], Evaluation]


def default_block(columns: int, device: torch.device) -> int:
    """Rows per block: PAIRS_CPU or PAIRS_DEVICE pairs in all, at least MIN_ROWS rows."""
    pairs = PAIRS_CPU if device.type == "cpu" else PAIRS_DEVICE
    return max(MIN_ROWS, pairs // max(columns, 1))


def zero_rows(points: Packed, needs: Needs) -> Rows:
    """Zeros for the sums that the gradients named by `needs` are read off; d scale needs the one for the means."""
    mean, trace = points
    return Rows(
        points,
        weight=1 / len(trace),
        loss=trace.new_zeros(()),
        weighted=trace.new_zeros(()),
        mean=mean.new_zeros(mean.shape) if needs.image_mean or needs.scale else None,
        sums=trace.new_zeros(trace.shape) if any(needs) else None,
    )


def zero_columns(columns: Packed, needs: Needs) -> Columns:
    """Zeros for the gradients of the columns that `needs` names."""
    return Columns(
        columns.mean.new_zeros(columns.mean.shape) if needs.text_mean else None,
        columns.trace.new_zeros(columns.trace.shape) if needs.text_trace else None,
    )


def sum_block(
    scaled: Tensor,
    means: Tensor,
    row_bias: Tensor,
    column_bias: Tensor,
    positives: Positives,
    weight: float,
    wanted: bool,
) -> tuple[Tensor, BlockGradient | None]:
    """The loss of one block of pairs, logits = scaled (n, D) @ means.T (D, m) + row_bias (n, 1) + column_bias (m,).

    With z = -y logit: loss = sum softplus(z), gradient g = -y weight sigmoid(z), None unless `wanted`.
    Workspace: two (n, m) matrices, with ids two more. `fused.sum_block` does the same on a device.
    """
    z = row_bias.unsqueeze(1) + column_bias
    z.addmm_(scaled, means.T)
    flip = positives.flip(z)
    flip(z)
    loss = F.softplus(z, threshold=SOFTPLUS_LINEAR).sum()
    if not wanted:
        return loss, None
    gradient = flip(z.sigmoid_()).mul_(weight)
    return loss, BlockGradient(gradient, gradient.sum(1), gradient.sum(0))


def choose_sum_block(points: Packed) -> Callable[..., tuple[Tensor, BlockGradient | None]]:
    """The Triton kernel for float32 on FUSED_DEVICES where Triton is installed, plain operations elsewhere."""
    if points.mean.device.type in FUSED_DEVICES and points.mean.dtype == torch.float32 and find_spec("triton"):
        from prolip import fused

        return fused.sum_block
    return sum_block


def add_pairs(
    rows: Rows, columns: Packed, out: Columns, scale: Tensor, bias: Tensor, positives: Positives, block: int
) -> None:
    """Add all pairs of rows (n) and columns (m) to the sums in `rows` and `out`, in place, `block` rows at a time.

    logit_ij = scale (mean_i.mean_j - (trace_i + trace_j)/2) + bias, y_ij = +1 for positives, else -1;
    loss = weight * sum -log sigmoid(y logit); g = d loss / d logit.
    """
    column_bias = -0.5 * scale * columns.trace
    score_block = choose_sum_block(rows.points)
    for start in range(0, len(rows.points.trace), block):
        part = slice(start, start + block)
        here = rows.select(part)
        scaled = here.points.mean * scale
        row_bias = bias - 0.5 * scale * here.points.trace
        loss, gradient = score_block(
            scaled, columns.mean, row_bias, column_bias, positives.select(part), rows.weight, here.sums is not None
        )
        rows.loss.add_(loss)
        if gradient is None or here.sums is None:
            continue
        rows.weighted.add_(gradient.columns.dot(columns.trace))
        here.sums.add_(gradient.rows)
        if here.mean is not None:
            here.mean.addmm_(gradient.pairs, columns.mean)
        if out.mean is not None:
            out.mean.addmm_(gradient.pairs.T, scaled)
        if out.trace is not None:
            out.trace.add_(gradient.columns * scale, alpha=-0.5)
        del gradient  # or its matrix would still be there while the next block's is written


def finish(rows: Rows, out: Columns, scale: Tensor) -> Evaluation:
    """The loss and its gradients, in the order of `Needs`, from the sums over all pairs; those of the rows change."""
    loss = rows.loss * rows.weight
    if rows.sums is None:
        return loss, (None,) * len(Needs._fields)
    d_bias, d_trace = rows.sums.sum(), rows.sums * (-0.5 * scale)
    if rows.mean is None:
        return loss, (None, d_trace, *out, None, d_bias)
    dots = rows.mean.flatten().dot(rows.points.mean.flatten())
    d_scale = dots - 0.5 * (rows.sums.dot(rows.points.trace) + rows.weighted)
    return loss, (rows.mean.mul_(scale), d_trace, *out, d_scale, d_bias)


def score(
    image: Packed, text: Packed, scale: Tensor, bias: Tensor, labels: Matches | None, block: int | None, needs: Needs
) -> Evaluation:
    """PPCL of one process and those of its gradients that `needs` names, without a graph."""
    rows, out = zero_rows(image, needs), zero_columns(text, needs)
    positives = Positives(0) if labels is None else Positives(0, labels.image, labels.text)
    add_pairs(rows, text, out, scale, bias, positives, block or default_block(len(text.trace), text.trace.device))
    return finish(rows, out, scale)


class GradientsInForward(torch.autograd.Function):
    """A scalar whose gradients are computed with its value; the backward pass only multiplies them by grad_output.

    `evaluate(tensors, needs)` returns the value and one gradient (or None) per tensor; tensors are those of `Needs`.
    """

    @staticmethod
    def forward(ctx: Any, evaluate: Evaluate, *tensors: Tensor) -> Tensor:
        """The value; gradients of the inputs that need one are kept."""
        loss, gradients = evaluate(tensors, Needs(*ctx.needs_input_grad[1:]))
        ctx.save_for_backward(*(g if need else None for g, need in zip(gradients, ctx.needs_input_grad[1:])))
        return loss

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """grad_output times the kept gradients; RuntimeError where these are to be differentiated again."""
        # `once_differentiable` lets a constant grad_output pass, and second derivatives are left out without a word.
        if torch.is_grad_enabled():
            raise RuntimeError("ppcl is differentiable once, its gradients are made in the forward pass and have no"
                               " graph: leave out create_graph=True")
        return (None, *(None if g is None else g * grad_output for g in ctx.saved_tensors))


def pack_inputs(image: Gaussian, text: Gaussian, scale: Tensor | float, bias: Tensor | float) -> tuple[Tensor, ...]:
    """(image mean, image trace, text mean, text trace, scale, bias) in one dtype, float32 or float64, with their graph.

    Raises TypeError and ValueError unless both are Gaussians of shape (B, D) with the same B > 0 and D.
    """
    image, text = check_pair(image, text, ("image", "text"))
    if image.mean.shape != text.mean.shape or image.mean.ndim != 2 or not len(image.mean):
        raise ValueError(
            f"ppcl got image {tuple(image.mean.shape)} and text {tuple(text.mean.shape)}: give (B, D) for both, B > 0,"
            " row i of the image beside row i of its text"
        )
    a, b = as_scalar(scale, image.mean, "scale"), as_scalar(bias, image.mean, "bias")
    return image.mean, image.trace, text.mean, text.trace, a, b


def check_block(block: int | None) -> None:
    """Raise ValueError unless it is a number of rows, or None."""
    if block is not None and block < 1:
        raise ValueError(f"block={block} rows score no pair: give 1 or more, or None")


def check_matches(labels: Matches | None, rows: int) -> None:
    """Raise ValueError unless the ids fit a batch of `rows`."""
    if labels is None:
        return
    if labels.image.ndim != 2 or len(labels.image) != rows or labels.text.shape != (rows,):
        raise ValueError(
            f"labels got image ids {tuple(labels.image.shape)} and text ids {tuple(labels.text.shape)} for {rows} pairs"
            f": give ({rows}, K) padded with -1 and ({rows},)"
        )


def differentiate(evaluate: Evaluate, tensors: tuple[Tensor, ...]) -> Tensor:
    """`evaluate` with its gradients in the graph, or without computing any when grad mode is off."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return GradientsInForward.apply(evaluate, *tensors)
    return evaluate(tuple(x.detach() for x in tensors), Needs())[0]


def ppcl(
    image: Gaussian,
    text: Gaussian,
    scale: Tensor | float,
    bias: Tensor | float,
    labels: Matches | None = None,
    block: int | None = None,
) -> Tensor:
    """Probabilistic pairwise contrastive loss, ProLIP eq. 2: sum_ij -log sigmoid(y_ij logit_ij) / B -> ().

    logit_ij = scale (mean_i.mean_j - (trace_i + trace_j)/2) + bias; y_ij = +1 on the diagonal and for known matches,
    else -1.
    image, text: (B, D); scale, bias: as they enter the logit (scale = exp of the learnable), one element or a number;
    labels: known matches as further positives; block: rows scored at a time, chosen by `default_block` without.
    Runs in float32 (float64 stays) whatever the autocast dtype; memory O(B D + block B); differentiable once.
    Raises TypeError for what is no Gaussian, ValueError for shapes that do not fit, RuntimeError for a second
    derivative.
    """
    check_block(block)
    tensors = pack_inputs(image, text, scale, bias)  # first: autocast asks for the device of a Gaussian
    with torch.autocast(image.mean.device.type, enabled=False):
        check_matches(labels, len(image.mean))

        def evaluate(inputs: tuple[Tensor, ...], needs: Needs) -> Evaluation:
            image_mean, image_trace, text_mean, text_trace, a, b = inputs
            return score(Packed(image_mean, image_trace), Packed(text_mean, text_trace), a, b, labels, block, needs)

        return differentiate(evaluate, tensors)


def inclusion_loss(
    inner: Gaussian,
    outer: Gaussian,
    scale: float = 10.0,
    eps: float = -10.0,
    form: str = "exact",
    reduction: str = "dim",
) -> Tensor:
    """-log sigmoid(scale H(inner in outer)) averaged over matched pairs, ProLIP eq. 5 and section 3.3 -> ().

    inner, outer: (..., D), pair by pair; eps: 1/sigma^2 is multiplied by exp(eps); form: see `measures.inclusion_test`.
    reduction "dim": H per dimension, averaged over dimensions too (the paper's runs); "pair": H summed over D (eq. 4).
    Zero pairs give 0 with a graph, as a rank may hold no masked rows. Raises ValueError for an unknown reduction and
    for shapes that are no pairs, TypeError for what is no Gaussian.
    """
    if reduction not in ("dim", "pair"):
        raise ValueError(f"reduction {reduction!r} is unknown: use 'dim' or 'pair'")
    check_pair(inner, outer, ("inner", "outer"))
    with torch.autocast(inner.mean.device.type, enabled=False):
        h = inclusion_test_per_dim(inner, outer, eps=eps, form=form)
        if reduction == "pair":
            h = h.sum(-1)
        return mean_or_zero(-F.logsigmoid(scale * h))


def vib(z: Gaussian) -> Tensor:
    """KL(Z || N(0, I)) per dimension, mean over batch and D of 1/2 (mean^2 + v - log v - 1), ProLIP eq. 6 -> ().

    z: (..., D). v - 1 is expm1(log_var), exact to first order near v = 1. An empty batch gives 0 with a graph.
    Raises TypeError for what is no Gaussian, ValueError where mean and log_var differ in shape.
    """
    check_gaussian(z)
    with torch.autocast(z.mean.device.type, enabled=False):
        z = z.float()
        return 0.5 * mean_or_zero(z.mean.square() + (z.log_var.expm1() - z.log_var))


def mean_or_zero(x: Tensor) -> Tensor:
    """The mean of all elements, 0 for none, with a graph either way."""
    return x.sum() / max(x.numel(), 1)
