"""How much an input changes the distribution of the other side, from means and covariances alone."""

from __future__ import annotations

from torch import Tensor

from prolip.embeddings import Pairs
from prolip.gaussian import upcast
from studies.uncertainty.baselines.base import Baseline, Scorer


class InformationGain(Baseline):
    """-a^2/2 (m - c)' G (m - c), nats: the gain KL(p(other | m) || p(other)) to second order, with its sign turned.

    p(other | m) is p(other) exp(a m.m_k) normalised, c the mean of the own side, G the covariance of the other, both
    over the pairs. The authors leave out the 1/2 (and their code the mean over samples), which ranks the same.
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
    """Mean (D,) and covariance (D, D) of the inputs of the pairs, each as often as it occurs in them."""
    means = upcast(means)
    weights = rows.bincount(minlength=len(means)).to(means) / len(rows)
    centre = weights @ means
    centred = means - centre
    return centre, (weights.unsqueeze(1) * centred).T @ centred
