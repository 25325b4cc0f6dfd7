"""PPCL and the sigmoid loss of all pairs, for similarities that factor, on one batch or over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, Literal

import torch
from torch import Tensor

from prolip.gaussian import Gaussian, as_scalar, check_pair, without_autocast
from prolip.losses.autograd import Evaluation, Group, differentiate, world_size
from prolip.losses.exchanges import row_width, score_gathered, score_ring
from prolip.losses.pairs import Factors, WantedGradients, csd_factors, score_alone
from prolip.losses.positives import Labels, check_matches

Exchange = Literal["ring", "gather"]
Number = Tensor | float
# Most bytes of other ranks' texts and gradients on a device; 262,144 pairs of width 768 take 1.5 GiB. That is little
# of 80 GB, and over 1,024 ranks the ring would take a tenth of a second longer at every step.
GATHERED_BYTES = 2 * 2**30


def sigmoid_loss(
    image: Factors, text: Factors, scale: Number, bias: Number, labels: Labels = None, block: int | None = None
) -> Tensor:
    """Compute the sigmoid loss of all pairs, SigLIP (Zhai et al. 2023), for any similarity that factors -> ().

    sum_ij -log sigmoid(y_ij logit_ij) / B, logit_ij = scale (u_i.v_j + a_i + b_j) + bias; y_ij = +1 on the diagonal and
    for known matches, else -1.
    image, text: vectors (B, P) and offsets (B,); scale, bias: as they enter the logit (scale = exp of the learnable);
    labels: known matches as additional positives; block: rows scored at a time, by default `default_block`.
    Computes in float32 (float64 stays) without autocast; memory O(B P + block B); differentiable once.
    """
    return differentiate_score(score_alone, image, text, scale, bias, labels, block)


def sigmoid_loss_over_ranks(
    image: Factors,
    text: Factors,
    scale: Number,
    bias: Number,
    labels: Labels = None,
    group: Group = None,
    block: int | None = None,
    exchange: Exchange | None = None,
) -> Tensor:
    """Compute this rank's share of the global `sigmoid_loss`: sum over its images i and all ranks' texts j / B -> ().

    With L_r the value on rank r, mean_r L_r is `sigmoid_loss` of the batches of all W ranks together. Gradients: this
    rank's images, scale and bias get d L_r; its texts get sum_r' d L_r' / d text over all ranks. After DDP averages
    the parameter gradients over ranks, they equal those of one process on the whole batch. The forward pass computes
    the text gradients: grad_output must be the same on all ranks.

    exchange: "ring" (memory O(B P + block B) for any world size) or "gather" (two collectives for any world size,
    memory O(W B P)); by default `choose_exchange`.

    All ranks of the group must call it, with equal B, P and dtype, labels on all or on none, and gradients required for
    the same text tensors (or all under no_grad).
    """
    size = world_size(group)
    if size == 1:
        return sigmoid_loss(image, text, scale, bias, labels, block)

    def score(own: Factors, *further: Any) -> Evaluation:
        count, dim = own.vector.shape
        chosen = exchange or choose_exchange(size, count, dim, own.vector.device)
        score_all: Callable[..., Evaluation] = score_gathered if chosen == "gather" else score_ring
        return score_all(own, *further, group)

    return differentiate_score(score, image, text, scale, bias, labels, block)


def ppcl(image: Gaussian, text: Gaussian, scale: Number, bias: Number, *args: Any, **options: Any) -> Tensor:
    """Compute the probabilistic pairwise contrastive loss, ProLIP eq. 2: `sigmoid_loss` of CSD similarity -> ().

    logit_ij = scale (mean_i.mean_j - (trace_i + trace_j)/2) + bias. image, text: (B, D); others as `sigmoid_loss`.
    """
    return sigmoid_loss(*factor_batch(image, text), scale, bias, *args, **options)


def ppcl_over_ranks(image: Gaussian, text: Gaussian, scale: Number, bias: Number, *args: Any, **options: Any) -> Tensor:
    """Compute this rank's share of the global `ppcl` -> (): `sigmoid_loss_over_ranks` of CSD similarity."""
    return sigmoid_loss_over_ranks(*factor_batch(image, text), scale, bias, *args, **options)


def choose_exchange(ranks: int, rows: int, dim: int, device: torch.device) -> Exchange:
    """Return "gather" for many ranks on a device if all texts and gradients fit into GATHERED_BYTES, else "ring"."""
    held = 2 * 4 * ranks * rows * row_width(dim)
    return "gather" if device.type != "cpu" and ranks > 2 and held <= GATHERED_BYTES else "ring"


def factor_batch(image: Gaussian, text: Gaussian) -> tuple[Factors, Factors]:
    """Return the factors of CSD similarity. Raises TypeError and ValueError unless both are Gaussians (B, D), B > 0."""
    image, text = check_pair(image, text, ("image", "text"))
    if image.mean.shape != text.mean.shape or image.mean.ndim != 2 or not len(image.mean):
        shapes = f"image {tuple(image.mean.shape)} and text {tuple(text.mean.shape)}"
        raise ValueError(f"ppcl got {shapes}: give (B, D) for both, B > 0, row i of each for pair i")
    return csd_factors(image), csd_factors(text)


def differentiate_score(
    score: Callable[..., Evaluation], image: Factors, text: Factors, scale: Number, bias: Number, labels: Labels, block
) -> Tensor:
    """Compute the loss of `score`, such as `score_ring`, on checked inputs, with its gradients in the graph."""
    if block is not None and block < 1:
        raise ValueError(f"block is {block}: give 1 or more rows, or None")
    shapes = [tuple(x.shape) for x in (*image, *text)]
    if shapes[:2] != shapes[2:] or len(shapes[0]) != 2 or shapes[1] != shapes[0][:1] or not shapes[0][0]:
        got = f"factors of images {shapes[:2]} and of texts {shapes[2:]} do not form a batch"
        raise ValueError(f"{got}: give vectors (B, P) and offsets (B,) for both, B > 0, row i of each for pair i")
    dtype = reduce(torch.promote_types, (x.dtype for x in (*image, *text)), torch.float32)
    factors = [x.to(dtype) for x in (*image, *text)]
    tensors = *factors, as_scalar(scale, factors[0], "scale"), as_scalar(bias, factors[0], "bias")
    check_matches(labels, len(tensors[0]))

    def evaluate(inputs: Sequence[Tensor], wanted: Sequence[bool]) -> Evaluation:
        sides = Factors(*inputs[:2]), Factors(*inputs[2:4])
        return score(*sides, inputs[4:], labels, block, WantedGradients(*wanted))

    with without_autocast(tensors[0].device):
        return differentiate(evaluate, tensors)
