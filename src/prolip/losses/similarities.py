"""Similarities of all pairs of a tile: dot products; the match probability of points. And the uniformity of points."""
from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from prolip.gaussian import without_autocast
from prolip.losses.collectives import gather, world_size
from prolip.losses.tiled import tiled_loss_over_ranks


def dot_products(images: Sequence[Tensor], texts: Sequence[Tensor]) -> Tensor:
    """Of one tensor on either side, the cosine of unit vectors: ((n, D),), ((m, D),) -> (n, m)."""
    return images[0] @ texts[0].mT


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
