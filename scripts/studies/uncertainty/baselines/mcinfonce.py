"""Concentrations of both sides, by InfoNCE of points drawn around the frozen means."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from prolip.embeddings import Pairs
from prolip.gaussian import upcast
from studies.uncertainty.baselines.base import Baseline, Scorer, seeded
from studies.uncertainty.baselines.heads import Head, minimise
from studies.uncertainty.baselines.sphere import power_spherical_sample

SAMPLES = 8
START, MOST = 0.8, 0.999  # mean cosine of an input's points with its mean: initial and largest


class MCInfoNCE(Baseline):
    """1 / kappa of an input whose points are drawn around its frozen mean with concentration kappa.

    The loss is -log of the mean over draws of the InfoNCE probability of the partner's point, both ways. Difference to
    the paper: power spherical points with an exact gradient by kappa replace von Mises-Fisher ones. It recovers kappa
    in data generated as the paper assumes, but finds little in trained contrastive means, which need no second
    temperature.
    """

    name = "MCInfoNCE"
    source = "Kirchhof, Kasneci and Oh, ICML 2023 (arXiv 2302.02865)"

    @classmethod
    def fit_sides(cls, pairs: Pairs, seed: int) -> dict[str, Scorer]:
        with seeded(seed, pairs.image.device):
            image, text = upcast(pairs.image), upcast(pairs.text)
            heads = {"image": _Concentration(image), "text": _Concentration(text)}
            # So that logits start as the model's: points on both sides scale them by START^2.
            log_scale = nn.Parameter(torch.tensor(math.log(pairs.scale / START**2)).to(image))

            def loss(some: Tensor) -> Tensor:
                i, j = image[pairs.image_of[some]], text[pairs.text_of[some]]
                return mc_infonce(heads["image"].sample(i), heads["text"].sample(j), log_scale.exp())

            parameters = [*heads["image"].parameters(), *heads["text"].parameters(), log_scale]
            minimise(loss, parameters, len(pairs))
        return dict(heads)


class _Concentration(Scorer):
    def __init__(self, means: Tensor) -> None:
        super().__init__(means)
        self.head = Head(means)

    def kappa(self, means: Tensor) -> Tensor:
        """Return kappa (N,) from the bounded mean cosine kappa / (kappa + D - 1); unbounded, kappa can diverge."""
        cosine = MOST * (self.head(means).squeeze(1) + math.log(START / (MOST - START))).sigmoid()
        return (self.width - 1) * cosine / (1 - cosine)

    def sample(self, means: Tensor) -> Tensor:
        return power_spherical_sample(means, self.kappa(means), SAMPLES)

    def forward(self, features: Tensor) -> Tensor:
        return 1 / self.kappa(features)


def mc_infonce(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    """Compute -mean_i log mean_s p_si, p the partner's softmax probability in the batch, both ways; (S, B, D) -> ()."""
    logits = scale * image @ text.transpose(1, 2)
    both = torch.stack([logits.log_softmax(1), logits.log_softmax(2)])
    matched = both.diagonal(dim1=2, dim2=3)  # (2, S, B)
    return math.log(len(image)) - matched.logsumexp(1).mean()
