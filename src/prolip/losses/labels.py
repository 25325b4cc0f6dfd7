"""Losses of a whole matrix of logits and labels: cross-entropies of pairs and of rows, pseudo-positives, triplets."""
from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

Negatives = Literal["hardest", "all"]
PseudoPositives = Literal["first", "all"]


def matching_loss(logit: Tensor, label: Tensor) -> Tensor:
    """Mean binary cross-entropy of all pairs, PCME++ (2): -y log sigmoid(x) - (1 - y) log sigmoid(-x).

    logit: (n, m); label: (n, m) in [0, 1], the share of a match -> ().
    """
    return F.binary_cross_entropy_with_logits(logit, label.to(logit.dtype))


def softmax_loss(logit: Tensor, positive: Tensor) -> Tensor:
    """Softmax cross-entropy of every row against its positives, each of which is as likely a target, one way -> ().

    -1/n sum_i 1/|P_i| sum_{j in P_i} log softmax(x_i)_j: InfoNCE (van den Oord et al. 2018, equation 4) where every row
    has one positive, of several L_sup,out of SupCon (Khosla et al. 2020, equation 2), their own terms in the sum.
    logit: (n, m); positive: (n, m) booleans, at least one in every row.
    """
    share = positive.to(logit.dtype)
    return F.cross_entropy(logit, share / share.sum(1, keepdim=True))


def pseudo_labels(logit: Tensor, label: Tensor, matches: PseudoPositives = "all") -> Tensor:
    """Labels where what is as near as a match of the row counts as this match, PCME++ section 2.3 and A.4.

    all: y'_ij = max over k with x_ik <= x_ij of y_ik: pair (i, j) gets the label of every match (i, k) that is no
    nearer. first: of the first of the row's largest labels alone, the pseudo-code of A.4. The two are the same where a
    row has one match. logit, label: (n, m); gives (n, m) without a graph.
    """
    with torch.no_grad():
        if matches == "first":
            best = label.argmax(1, keepdim=True)
            return torch.where(logit >= logit.gather(1, best), label.gather(1, best), label)
        far_to_near, order = logit.sort(dim=1)
        most = label.gather(1, order).cummax(1).values
        # of logits that are equal the last
        last = torch.searchsorted(far_to_near.contiguous(), logit.contiguous(), right=True) - 1
        return most.gather(1, last)


def triplet_loss(
    similarity: Tensor, positive: Tensor, own: Tensor, margin: float = 0.2, negatives: Negatives = "hardest",
    weight: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Hinge of every query's match against its negatives, VSE++ (Faghri et al. 2018), equations 5 and 6, one way -> ().

    sum_i [margin + w_i (max_j s_ij - s_i)]_+ / n with the hardest negative, sum_ij [margin + w_i (s_ij - s_i)]_+ / n
    with all; w_i is 1 without weights, and inside the hinge as in (3) of Tian et al. 2024 (source-free matching).
    similarity: (n, m); own: (n,), s_i, of each query with its own match; positive: (n, m) booleans, the own match and
    all others that are no negatives; weight: (n,), above 0.
    """
    if negatives not in get_args(Negatives):
        raise ValueError(f"negatives {negatives!r} are unknown: use one of {', '.join(get_args(Negatives))}")
    further = similarity - own.unsqueeze(1)
    further = further if weight is None else weight.unsqueeze(1) * further
    hinge = (margin + further).clamp(min=0).masked_fill(positive, 0.0)
    return (hinge.amax(1) if negatives == "hardest" else hinge.sum(1)).mean()
