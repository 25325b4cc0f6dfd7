"""Embeddings as generalised Gaussians, predicted by an adapter for themselves and for their partners."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from prolip.embeddings import Pairs
from prolip.gaussian import upcast
from studies.uncertainty.baselines.base import Baseline, Scorer
from studies.uncertainty.baselines.heads import Head, minimise

LEAST_BETA, MOST_BETA = 0.5, 5.0


class ProbVLM(Baseline):
    """Mean over dimensions of alpha^2 Gamma(3/beta) / Gamma(1/beta), the variance of a generalised Gaussian.

    An adapter maps the frozen mean of an input to (mu, alpha, beta) of each dimension, by the likelihood of that mean
    (intra-modal) and, times `cross`, of its partner's mean (cross-modal). No term needs both adapters. Differences to
    the released code: |r/alpha|^beta as printed, not beta |r/alpha|; beta within bounds; and cross = 1, not 1e-4, at
    which alpha measures the adapter's copying error instead of ambiguity.
    """

    name = "ProbVLM"
    source = "Upadhyay, Karthik, Mancini and Akata, ICCV 2023 (arXiv 2307.00398)"
    cross: ClassVar[float] = 1.0

    @classmethod
    def fit_text(cls, pairs: Pairs) -> Scorer:
        image, text = upcast(pairs.image), upcast(pairs.text)
        scorer = _Adapter(text)

        def loss(some: Tensor) -> Tensor:
            own, partner = text[pairs.text_of[some]], image[pairs.image_of[some]]
            intra, cross = gennorm_nll(torch.stack([own, partner]), *scorer.parameters_of(own)).mean((1, 2))
            return intra + cls.cross * cross

        minimise(loss, scorer.parameters(), len(pairs))
        return scorer


class _Adapter(Scorer):
    def __init__(self, own: Tensor) -> None:
        super().__init__(own)
        self.head = Head(own, 3 * own.shape[1])

    def parameters_of(self, own: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mu, log_alpha, bounded = self.head(own).chunk(3, dim=1)
        # alpha starts at the size of an entry, and beta in the middle of its bounds.
        beta = LEAST_BETA + (MOST_BETA - LEAST_BETA) * bounded.sigmoid()
        return mu, log_alpha - 0.5 * math.log(own.shape[1]), beta

    def forward(self, features: Tensor) -> Tensor:
        _, log_alpha, beta = self.parameters_of(features)
        return gennorm_variance(log_alpha, beta).mean(1)


def gennorm_nll(x: Tensor, mu: Tensor, log_alpha: Tensor, beta: Tensor) -> Tensor:
    """Return -log of generalised Gaussians, |x - mu|^beta / alpha^beta - log(beta / (2 alpha Gamma(1/beta)))."""
    # A square under the logarithm keeps the gradients of the logarithm and the power finite at x = mu.
    distance = 0.5 * ((x - mu).square() + 1e-12).log()
    return (beta * (distance - log_alpha)).exp() + (log_alpha - (beta / 2).log() + torch.lgamma(1 / beta))


def gennorm_variance(log_alpha: Tensor, beta: Tensor) -> Tensor:
    """Compute alpha^2 Gamma(3/beta) / Gamma(1/beta), elementwise."""
    return (2 * log_alpha + torch.lgamma(3 / beta) - torch.lgamma(1 / beta)).exp()
