"""Texts as von Mises-Fisher distributions over images, whose log density is the logit."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prolip.embeddings import Pairs
from prolip.gaussian import upcast
from studies.uncertainty.baselines.base import Baseline, Scorer
from studies.uncertainty.baselines.heads import Head, minimise
from studies.uncertainty.baselines.sphere import vmf_log_normaliser


class AsymVLM(Baseline):
    """1 / kappa of p(image | text) = C_D(kappa) exp(kappa mu.m_i), kappa mu = f(m_j): t log p is the logit of InfoNCE.

    This is the von Mises-Fisher variant, not the power spherical one. It has the largest entropy for a mean of given
    direction and length, and for equal kappa its logit is that of the trained means. Differences to the paper: f starts
    from the frozen mean and one kappa for all, and the normaliser is exact, not the mean of two bounds.
    """

    name = "AsymVLM"
    source = "Ju et al., NeurIPS 2025 (arXiv 2505.11029), the von Mises-Fisher variant"
    sides = ("text",)

    @classmethod
    def fit_text(cls, pairs: Pairs) -> Scorer:
        image, text = upcast(pairs.image), upcast(pairs.text)
        some = torch.randperm(len(pairs))[: 1 << 13].to(pairs.text_of.device)
        cosine = (image[pairs.image_of[some]] * text[pairs.text_of[some]]).sum(1).mean()
        scorer = _Concentration(text, cosine)
        log_temperature = nn.Parameter((pairs.scale / scorer.kappa).log())  # so that logits start as the model's

        def loss(some: Tensor) -> Tensor:
            eta = scorer.eta(text[pairs.text_of[some]])
            logits = log_temperature.exp() * log_density(image[pairs.image_of[some]], eta)
            target = torch.arange(len(some), device=logits.device)
            return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2

        minimise(loss, [*scorer.parameters(), log_temperature], len(pairs))
        return scorer


class _Concentration(Scorer):
    kappa: Tensor

    def __init__(self, text: Tensor, cosine: Tensor) -> None:
        super().__init__(text)
        self.head = Head(text, text.shape[1])
        # kappa of the distribution with this mean cosine, Banerjee et al., JMLR 2005, (4.4)
        cosine = cosine.clamp(0.01, 0.99)
        self.register_buffer("kappa", cosine * (text.shape[1] - cosine**2) / (1 - cosine**2))

    def eta(self, text: Tensor) -> Tensor:
        return self.kappa * (text + self.head(text))

    def forward(self, features: Tensor) -> Tensor:
        return 1 / self.eta(features).norm(dim=1)


def log_density(image: Tensor, eta: Tensor) -> Tensor:
    """Compute log C_D(|eta_j|) + eta_j.m_i of all pairs, (N, D) unit, (M, D) -> (N, M)."""
    return image @ eta.T + vmf_log_normaliser(eta.norm(dim=1), eta.shape[1])
