"""Losses of a whole matrix of logits and labels (cross-entropies, pseudo-positives, triplets), and of single inputs."""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from prolip.gaussian import Gaussian, check_gaussian, check_pair, without_autocast
from prolip.measures import inclusion_test_per_dim

Negatives = Literal["hardest", "all"]
PseudoPositives = Literal["first", "all"]


def matching_loss(logit: Tensor, label: Tensor) -> Tensor:
    """Return the mean binary cross-entropy of all pairs, PCME++ (2): -y log sigmoid(x) - (1 - y) log sigmoid(-x).

    logit: (n, m); label: (n, m) in [0, 1], the probability of a match -> ().
    """
    return F.binary_cross_entropy_with_logits(logit, label.to(logit.dtype))


def softmax_loss(logit: Tensor, positive: Tensor) -> Tensor:
    """Return the softmax cross-entropy of every row against its equally weighted positives, one way -> ().

    -1/n sum_i 1/|P_i| sum_{j in P_i} log softmax(x_i)_j: InfoNCE (van den Oord et al. 2018, equation 4) for one
    positive a row, L_sup,out of SupCon (Khosla et al. 2020, equation 2) for several.
    logit: (n, m); positive: (n, m) booleans, at least one in every row.
    """
    share = positive.to(logit.dtype)
    return F.cross_entropy(logit, share / share.sum(1, keepdim=True))


def pseudo_labels(logit: Tensor, label: Tensor, matches: PseudoPositives = "all") -> Tensor:
    """Return labels in which a pair as near as a match of its row gets that match's label, PCME++ 2.3 and A.4.

    all: y'_ij = max over k with x_ik <= x_ij of y_ik. first: k is only the first of the row's largest labels, as in the
    pseudo-code of A.4; equal for one match a row. logit, label: (n, m); returns (n, m) without a graph.
    """
    with torch.no_grad():
        if matches == "first":
            best = label.argmax(1, keepdim=True)
            return torch.where(logit >= logit.gather(1, best), label.gather(1, best), label)
        far_to_near, order = logit.sort(dim=1)
        most = label.gather(1, order).cummax(1).values
        # the last of equal logits
        last = torch.searchsorted(far_to_near.contiguous(), logit.contiguous(), right=True) - 1
        return most.gather(1, last)


def triplet_loss(
    similarity: Tensor, positive: Tensor, own: Tensor, margin=0.2, negatives: Negatives = "hardest", weight=None
) -> Tensor:
    """Return the hinge of every query's match against its negatives, VSE++ (Faghri et al. 2018), (5) and (6), -> ().

    sum_i [margin + w_i (max_j s_ij - s_i)]_+ / n with the hardest negative, sum_ij [margin + w_i (s_ij - s_i)]_+ / n
    with all; w_i is 1 without weights, and inside the hinge as in (3) of Tian et al. 2024 (source-free matching).
    similarity: (n, m), one way; own: (n,), s_i, of each query with its own match; positive: (n, m) booleans, the own
    match and all other pairs that are not negatives; weight: (n,), above 0.
    """
    if negatives not in get_args(Negatives):
        raise ValueError(f"negatives {negatives!r} are unknown: use one of {', '.join(get_args(Negatives))}")
    further = similarity - own.unsqueeze(1)
    further = further if weight is None else weight.unsqueeze(1) * further
    hinge = (margin + further).clamp(min=0).masked_fill(positive, 0.0)
    return (hinge.amax(1) if negatives == "hardest" else hinge.sum(1)).mean()


def inclusion_loss(
    inner: Gaussian, outer: Gaussian, scale: float = 10.0, eps: float = -10.0, form="exact", reduction="dim"
) -> Tensor:
    """Return -log sigmoid(scale H(inner in outer)) averaged over matched pairs, ProLIP eq. 5 and section 3.3 -> ().

    inner, outer: (..., D), pair by pair; eps: 1/sigma^2 is multiplied by exp(eps); form: see `measures.inclusion_test`.
    reduction "dim": H per dimension, averaged over dimensions too (the paper's runs); "pair": H summed over D (eq. 4).
    Zero pairs give 0 with a graph, as a rank may hold no masked rows.
    """
    if reduction not in ("dim", "pair"):
        raise ValueError(f"reduction {reduction!r} is unknown: use 'dim' or 'pair'")
    check_pair(inner, outer, ("inner", "outer"))
    with without_autocast(inner.mean.device):
        h = inclusion_test_per_dim(inner, outer, eps=eps, form=form)
        if reduction == "pair":
            h = h.sum(-1)
        return -F.logsigmoid(scale * h).sum() / max(h.numel(), 1)


def vib(z: Gaussian) -> Tensor:
    """Return KL(Z || N(0, I)) per dimension, the mean of 1/2 (mean^2 + v - log v - 1), ProLIP eq. 6 -> ().

    z: (..., D). v - 1 is expm1(log_var), exact to first order near v = 1. An empty batch gives 0 with a graph.
    """
    check_gaussian(z)
    with without_autocast(z.mean.device):
        z = z.float()
        return 0.5 * ((z.mean.square() + (z.log_var.expm1() - z.log_var)).sum() / max(z.mean.numel(), 1))
