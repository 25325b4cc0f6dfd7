"""Similarities of all pairs of a tile: dot products; the expected likelihood kernel, without a temporary of pairs times
width; the match probability of points. And the uniformity of points.
"""
from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from prolip.gaussian import Gaussian, without_autocast
from prolip.losses.collectives import gather, world_size
from prolip.losses.in_forward import refuse_second_derivative
from prolip.losses.tiled import tiled_loss_over_ranks
from prolip.measures.pairwise import check_pairwise

# Numbers in a temporary (dimensions, n, m): what stays in a core's cache on CPU, what fills a device on one.
SLICE_CPU, SLICE_DEVICE = 1 << 16, 1 << 22


def dot_products(images: Sequence[Tensor], texts: Sequence[Tensor]) -> Tensor:
    """Of one tensor on either side, the cosine of unit vectors: ((n, D),), ((m, D),) -> (n, m)."""
    return images[0] @ texts[0].mT


def elk_similarity(p: Gaussian, q: Gaussian) -> Tensor:
    """-`measures.elk` of all pairs, log int p q + D/2 log(2 pi), PCME (B.4): (n, D), (m, D) -> (n, m).

    -sum_d 1/2 [(m1 - m2)^2 / (v1 + v2) + log(v1 + v2)], added up over slices of the dimensions in a few temporaries of
    (n, m), or SLICE_DEVICE numbers on a device; the gradients too, once. For log_var in [-40, 10]; `pairwise_elk` holds
    on beyond, in more memory and five times the time.
    """
    p, q = check_pairwise(p, q)
    return _ElkSimilarity.apply(*p, *q)


class _ElkSimilarity(torch.autograd.Function):
    """With c = (m1 - m2) / w, w = v1 + v2: d/dm1 = -c = -d/dm2, d/dv1 = d/dv2 = (c^2 - 1/w) / 2, d/dlog v = v d/dv."""

    @staticmethod
    def forward(ctx: Any, m1: Tensor, l1: Tensor, m2: Tensor, l2: Tensor) -> Tensor:
        v1, v2 = l1.exp(), l2.exp()
        ctx.save_for_backward(m1, v1, m2, v2)
        out = m1.new_zeros(len(m1), len(m2))
        for _, difference, width in _slices(m1, v1, m2, v2):
            terms = difference.square_().div_(width).add_(width.log_())
            out -= terms.sum(0) if len(terms) > 1 else terms[0]
        return out.mul_(0.5)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, ...]:
        refuse_second_derivative("elk_similarity")
        m1, v1, m2, v2 = ctx.saved_tensors
        d_m1, d_v1, d_m2, d_v2 = (torch.empty_like(x) for x in (m1, v1, m2, v2))
        for part, c, width in _slices(m1, v1, m2, v2):
            precision = width.reciprocal_()
            c *= precision
            by_variance = torch.addcmul(precision.neg_(), c, c).mul_(grad_output)
            c *= grad_output
            d_m1[:, part], d_m2[:, part] = -c.sum(2).T, c.sum(1).T
            d_v1[:, part], d_v2[:, part] = by_variance.sum(2).T, by_variance.sum(1).T
        return d_m1, d_v1.mul_(v1).mul_(0.5), d_m2, d_v2.mul_(v2).mul_(0.5)


def _slices(m1: Tensor, v1: Tensor, m2: Tensor, v2: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """(which dimensions, m1 - m2, v1 + v2), of all pairs and some dimensions, new tensors (dimensions, n, m)."""
    most = SLICE_CPU if m1.device.type == "cpu" else SLICE_DEVICE
    step = max(1, most // max(1, len(m1) * len(m2)))
    rows, columns = [x.T.unsqueeze(2) for x in (m1, v1)], [x.T.contiguous().unsqueeze(1) for x in (m2, v2)]
    for start in range(0, m1.shape[1], step):
        part = slice(start, start + step)
        yield part, rows[0][part] - columns[0][part], rows[1][part] + columns[1][part]


def log_match_odds(x: Tensor, y: Tensor, scale: Tensor | float, bias: Tensor | float) -> Tensor:
    """log p / (1 - p) of PCME's match probability p, (2) and (3), of points: (n, J, D), (m, J', D) -> (n, m).

    p = mean over j, j' of sigmoid(l), l = b - a |x_j - y_j'|_2. As sigmoid(l) + sigmoid(-l) = 1, both p and 1 - p are
    means of sigmoids: the odds are a difference of two logsumexp, finite where p is 0 or 1 to the last bit, and a
    cross-entropy with logits on them is -log p of a match and -log(1 - p) of none. Memory n m J J'.
    """
    with without_autocast(x.device):
        distance = torch.cdist(x.flatten(0, 1), y.flatten(0, 1))
        logit = (bias - scale * distance).view(len(x), x.shape[1], len(y), y.shape[1])
    return F.logsigmoid(logit).logsumexp((1, 3)) - F.logsigmoid(-logit).logsumexp((1, 3))


def uniformity_over_ranks(points: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """log of the mean of exp(-2 |z - z'|^2) over all pairs of different points of all ranks, (n, D) -> ().

    Wang & Isola 2020; PCME (A.1) prints a plain sum, released code takes this. The same value on all ranks; its
    gradients are those of one process once DDP has averaged them. All ranks must give equally many points.
    """
    size, count = world_size(group), len(points)
    if size * count < 2:
        raise ValueError(f"{size * count} points have no pairs: give 2 or more")

    def total(exponent: Tensor, itself: Tensor) -> Tensor:
        own = exponent.masked_fill(itself, -torch.inf).flatten().logsumexp(0)
        whole = gather(own.detach().reshape(1), group).logsumexp(0)
        share = size * (own.detach() - whole).exp()  # the mean over ranks of share * own has the gradient of the whole
        return whole + share * (own - own.detach())

    log_sum = tiled_loss_over_ranks(exponents, (points,), (points,), total, group=group)
    return log_sum - math.log(size * count * (size * count - 1))


def exponents(x: Sequence[Tensor], y: Sequence[Tensor]) -> Tensor:
    """-2 |z - z'|^2 of points (n, D), (m, D) -> (n, m)."""
    (p,), (q,) = x, y
    with without_autocast(p.device):
        return -2 * (p.square().sum(1, keepdim=True) + q.square().sum(1) - 2 * p @ q.mT)
