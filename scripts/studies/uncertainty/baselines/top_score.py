"""How well the best of the other side fits: what a user of retrieval sees without any further model."""

from __future__ import annotations

import torch
from torch import Tensor

from prolip.embeddings import Pairs
from prolip.gaussian import upcast
from studies.uncertainty.baselines.base import Baseline, Scorer

TILE = 1 << 23  # cosines held at a time


class TopScore(Baseline):
    """-max_k m.m_k over the gallery of the other side, kept from the pairs.

    A match probability sigmoid(a cosine + b) or its logit would rank the same.
    """

    name = "top score"
    source = "Hendrycks and Gimpel, ICLR 2017 (their largest probability; here the largest score)"

    @classmethod
    def fit_text(cls, pairs: Pairs) -> Scorer:
        return _Gallery(pairs)


class _Gallery(Scorer):
    gallery: Tensor

    def __init__(self, pairs: Pairs) -> None:
        super().__init__(pairs.text)
        self.register_buffer("gallery", upcast(pairs.image[pairs.image_of.unique()]))

    def forward(self, features: Tensor) -> Tensor:
        step = max(1, TILE // len(self.gallery))
        return torch.cat([-(rows @ self.gallery.T).amax(1) for rows in features.split(step)])
