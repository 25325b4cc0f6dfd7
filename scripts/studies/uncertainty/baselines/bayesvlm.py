"""Variance of embeddings under a Laplace approximation of the last projection."""

from __future__ import annotations

import torch
from torch import Tensor

from prolip.embeddings import Pairs
from prolip.gaussian import upcast
from studies.uncertainty.baselines.base import Baseline, Scorer, text_features
from studies.uncertainty.baselines.heads import bank_of

PRIOR = 1e-2  # sqrt(lambda), in mean eigenvalues of each factor
SAMPLES = 1 << 12  # of which the curvature B is the mean


class BayesVLM(Baseline):
    """h' A^-1 h tr B^-1 / D: mean variance of the embedding P h when P has the covariance A^-1 x B^-1 (Kronecker).

    A = sqrt(lambda) I + sum h h' / sqrt(n), B = sqrt(lambda) I + sum H / sqrt(n), H the Hessian of InfoNCE by P h.
    It is large for inputs unlike the pairs, which do not determine P there, but blind to ambiguity. Without hidden
    features h is the mean. Differences to the paper: |P h| is unknown and taken as 1; P is unknown too, and lambda is a
    share of the curvature instead of the optimum of the marginal likelihood.
    """

    name = "BayesVLM"
    source = "Baumann et al., ICLR 2026 (arXiv 2412.06014)"

    @classmethod
    def fit_text(cls, pairs: Pairs) -> Scorer:
        features, hidden = text_features(pairs)
        counts = pairs.text_of.bincount(minlength=len(features)).to(features)
        activations = (counts.unsqueeze(1) * features).T @ features / len(pairs) ** 0.5
        some = pairs.text_of[torch.randperm(len(pairs))[:SAMPLES].to(pairs.text_of.device)]
        bank = bank_of(pairs.image, pairs.image_of)
        curvature = infonce_curvature(upcast(pairs.text[some]), bank, pairs.scale)
        return _Predictive(features, hidden, activations, curvature * (len(pairs) ** 0.5 / len(some)))


class _Predictive(Scorer):
    whiten: Tensor

    def __init__(self, features: Tensor, takes_hidden: bool, activations: Tensor, curvature: Tensor) -> None:
        super().__init__(features, takes_hidden)
        factor = torch.linalg.cholesky(with_prior(activations))
        inverse = torch.linalg.solve_triangular(factor, torch.eye(len(factor)).to(factor), upper=False)
        per_activation = torch.linalg.inv(with_prior(curvature)).diagonal().mean()
        self.register_buffer("whiten", (per_activation.sqrt() * inverse).to(features))

    def forward(self, features: Tensor) -> Tensor:
        return (features @ self.whiten.T).square().sum(1)


def with_prior(factor: Tensor) -> Tensor:
    """Add the prior to a factor of the precision, in float64: the smallest eigenvalues decide its inverse."""
    factor = factor.double()
    return factor + PRIOR * factor.diagonal().mean() * torch.eye(len(factor)).to(factor)


def infonce_curvature(means: Tensor, bank: Tensor, scale: float) -> Tensor:
    """Sum over means the Hessian of logsumexp_k(a m.y_k / |m|) by m across m, (N, D), (K, D) unit -> (D, D).

    J (a^2 Cov_p[y]) J, J = I - m m', p = softmax(a m.y), without a tensor of N D^2 and without the term of J's
    derivative (a generalised Gauss-Newton matrix).
    """
    cosines = means @ bank.T
    share = (scale * cosines).softmax(1)
    expected = share @ bank
    # Cov_p[y] m and m' Cov_p[y] m of each mean
    along = (share * cosines) @ bank - expected * (share * cosines).sum(1, keepdim=True)
    twice = (along * means).sum(1, keepdim=True)
    covariance = (share.sum(0).unsqueeze(1) * bank).T @ bank - expected.T @ expected
    crossed = means.T @ along
    return scale**2 * (covariance - crossed - crossed.T + (twice * means).T @ means)
