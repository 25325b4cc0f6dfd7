"""Distance to the nearest of the same side: how unlike the inputs of the pairs an input is."""

from __future__ import annotations

import torch
from torch import Tensor

from prolip.embeddings import Pairs
from prolip.gaussian import upcast
from studies.uncertainty.baselines.base import Baseline, Scorer
from studies.uncertainty.baselines.top_score import TILE

NEIGHBOUR = 5


class NearestNeighbours(Baseline):
    """-m.m_(5), the cosine of the fifth nearest of the same side in the pairs, of the farthest where they are fewer.

    Novelty, not ambiguity; an input of the pairs is its own first neighbour.
    """

    name = "nearest neighbours"
    source = "Sun et al., ICML 2022 (arXiv 2204.06507): deep nearest neighbours, the k-th distance"

    @classmethod
    def fit_text(cls, pairs: Pairs) -> Scorer:
        return _Neighbours(pairs)


class _Neighbours(Scorer):
    own: Tensor

    def __init__(self, pairs: Pairs) -> None:
        super().__init__(pairs.text)
        self.register_buffer("own", upcast(pairs.text[pairs.text_of.unique()]))

    def forward(self, features: Tensor) -> Tensor:
        step, k = max(1, TILE // len(self.own)), min(NEIGHBOUR, len(self.own))
        return torch.cat([-(rows @ self.own.T).topk(k, dim=1).values[:, -1] for rows in features.split(step)])
