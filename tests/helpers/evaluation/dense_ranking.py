"""Retrieval metrics by sorting the whole score matrix: what the metrics of `metrics.streaming` are held against."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from prolip.evaluation.metrics.ranking import KS, Ranking, both_directions, refuse_nan


def rank(scores: Tensor, relevant: Tensor) -> Ranking:
    """Rank a gallery for every query: scores (Q, G), relevant (Q, G) bool.

    AP@R = 1/R sum_{i <= R} precision(i) relevant(i), and R-Precision = precision(R), with R the query's matches (the
    metrics of ECCV Caption, PCME++ 4.1). Raises ValueError on NaN scores.
    """
    if scores.shape != relevant.shape:
        raise ValueError(f"scores and relevant must be one (queries, gallery) shape: {scores.shape}, {relevant.shape}")
    refuse_nan(scores)
    order = scores.argsort(dim=1, descending=True, stable=True)
    hits = relevant.bool().gather(1, order)
    matches = hits.sum(1)
    found = matches > 0
    first = torch.where(found, hits.int().argmax(1) + 1 if hits.shape[1] else matches, 0)
    position = torch.arange(1, hits.shape[1] + 1, device=hits.device)
    counted = (hits & (position <= matches.unsqueeze(1))).double()
    share = matches.double().where(found, torch.nan)
    precision = hits.cumsum(1).double() / position
    return Ranking(first, matches, (precision * counted).sum(1) / share, counted.sum(1) / share)


def retrieval(scores: Tensor, relevant: Tensor, ks: Sequence[int] = KS) -> dict[str, float]:
    """Both directions of one matrix, images in rows: `i2t/...`, `t2i/...` and `rsum`. scores, relevant: (N, M)."""
    return both_directions(rank(scores, relevant), rank(scores.mT, relevant.mT), ks)
