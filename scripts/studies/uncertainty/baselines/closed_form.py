"""Uncertainties that need no training: best score, nearest neighbours, the empty text, information gain."""

from __future__ import annotations

import torch
from torch import Tensor

from prolip.embeddings import Pairs
from prolip.gaussian import upcast
from studies.uncertainty.baselines.base import Baseline, Scorer

TILE = 1 << 23  # cosines held at a time


class TopScore(Baseline):
    """-max_k m.m_k over the gallery of the other side, stored from the pairs.

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


NEIGHBOUR = 5


class NearestNeighbours(Baseline):
    """-m.m_(5), the cosine of the fifth nearest of the same side in the pairs, or of the farthest if there are fewer.

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


class EmptyText(Baseline):
    """-|m - r|, r the mean of the text "": nearer means more general. ValueError for pairs without `empty`."""

    name = "empty text"
    source = 'Alper and Averbuch-Elor, ECCV 2024 (HierarCaps): the embedding of "" is the root of the hierarchy'

    @classmethod
    def fit_sides(cls, pairs: Pairs, seed: int) -> dict[str, Scorer]:
        if pairs.empty is None:
            raise ValueError('the pairs have no embedding of the empty text. Give Pairs empty=, the mean of "", (D,)')
        if pairs.empty.shape != pairs.text.shape[1:]:
            raise ValueError(f'empty is {tuple(pairs.empty.shape)}, expected the mean of "", ({pairs.text.shape[1]},)')
        return {side: _Root(pairs.text, pairs.empty) for side in cls.sides}


class _Root(Scorer):
    root: Tensor

    def __init__(self, means: Tensor, empty: Tensor) -> None:
        super().__init__(means)
        self.register_buffer("root", upcast(empty))

    def forward(self, features: Tensor) -> Tensor:
        return -(features - self.root).norm(dim=1)


class InformationGain(Baseline):
    """-a^2/2 (m - c)' G (m - c), nats: minus the gain KL(p(other | m) || p(other)) to second order.

    p(other | m) is p(other) exp(a m.m_k) normalised, c the mean of the own side, G the covariance of the other, both
    over the pairs. The authors omit the 1/2 (and their code the mean over samples), which ranks the same.
    """

    name = "information gain"
    source = "Uchiyama et al., CVPR 2026 (arXiv 2506.22881), D_W; after Oyama, Yokoi and Shimodaira, EMNLP 2023"

    @classmethod
    def fit_text(cls, pairs: Pairs) -> Scorer:
        return _CovarianceNorm(pairs)


class _CovarianceNorm(Scorer):
    centre: Tensor
    metric: Tensor

    def __init__(self, pairs: Pairs) -> None:
        super().__init__(pairs.text)
        self.register_buffer("centre", _moments(pairs.text, pairs.text_of)[0])
        self.register_buffer("metric", 0.5 * pairs.scale**2 * _moments(pairs.image, pairs.image_of)[1])

    def forward(self, features: Tensor) -> Tensor:
        centred = features - self.centre
        return -((centred @ self.metric) * centred).sum(1)


def _moments(means: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean (D,) and covariance (D, D) of the inputs of the pairs, each weighted by its number of pairs."""
    means = upcast(means)
    weights = rows.bincount(minlength=len(means)).to(means) / len(rows)
    centre = weights @ means
    centred = means - centre
    return centre, (weights.unsqueeze(1) * centred).T @ centred
