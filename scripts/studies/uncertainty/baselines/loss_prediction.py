"""A head that predicts which of two inputs has the larger loss."""

from __future__ import annotations

import torch
from torch import Tensor

from prolip.embeddings import Pairs
from prolip.gaussian import upcast
from studies.uncertainty.baselines.base import Baseline, Scorer, text_features
from studies.uncertainty.baselines.heads import Head, bank_of, minimise

MARGIN = 0.1


class LossPrediction(Baseline):
    """u(features), trained so that the input with the larger contrastive loss of two has the larger u.

    Features are hidden ones if the pairs have them, else the means. Only the order is learned, so u has no unit. All
    pairs of a batch are compared; the authors compare disjoint ones.
    """

    name = "loss prediction"
    source = "Kirchhof et al., Pretrained Visual Uncertainties, arXiv 2402.16569, 2024; Yoo and Kweon, CVPR 2019, (2)"

    @classmethod
    def fit_text(cls, pairs: Pairs) -> Scorer:
        losses, rows = contrastive_losses(pairs)
        features, hidden = text_features(pairs)
        features = features[rows]
        scorer = _Predictor(features, hidden)
        minimise(lambda some: ranking_loss(scorer(features[some]), losses[some]), scorer.parameters(), len(rows))
        return scorer


class _Predictor(Scorer):
    def __init__(self, features: Tensor, takes_hidden: bool) -> None:
        super().__init__(features, takes_hidden)
        self.head = Head(features)

    def forward(self, features: Tensor) -> Tensor:
        return self.head(features).squeeze(1)


def contrastive_losses(pairs: Pairs) -> tuple[Tensor, Tensor]:
    """Compute InfoNCE of texts: -log of the share of the matched image among it and a bank, mean over a text's pairs.

    Returns the losses (R,) and the rows (R,) of the texts with any pair.
    """
    bank = bank_of(pairs.image, pairs.image_of)
    text, image = upcast(pairs.text), pairs.image
    others = torch.cat([(pairs.scale * rows @ bank.T).logsumexp(1) for rows in text.split(1 << 12)])
    total, count = text.new_zeros(len(text)), text.new_zeros(len(text))
    for i, j in zip(pairs.image_of.split(1 << 13), pairs.text_of.split(1 << 13)):
        matched = pairs.scale * (upcast(image[i]) * text[j]).sum(1)
        total.index_add_(0, j, torch.logaddexp(others[j], matched) - matched)
        count.index_add_(0, j, torch.ones_like(matched))
    rows = count.nonzero().squeeze(1)
    return total[rows] / count[rows], rows


def ranking_loss(predicted: Tensor, losses: Tensor) -> Tensor:
    """Compute the mean of max(0, MARGIN - (u_i - u_j)) over i, j with losses_i > losses_j; (B,), (B,) -> ()."""
    larger = losses.unsqueeze(1) > losses
    missed = (MARGIN - (predicted.unsqueeze(1) - predicted)).relu()
    return (missed * larger).sum() / larger.sum().clamp_min(1)
