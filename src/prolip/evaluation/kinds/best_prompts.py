"""PCME++'s best top-K prompts of each class, chosen by labelled images: by one half of them for the other.

Chun 2024, C.6, chooses on the very images that are scored, and says so: of two rules that differ by chance alone the
one that suits these images then wins. Here no image is scored by a choice that it took part in. It is no zero-shot
figure.
"""
from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from prolip.evaluation.datasets.base import fingerprint
from prolip.evaluation.features import Features
from prolip.evaluation.metrics.blockwise import PairScores
from prolip.evaluation.zero_shot import CERTAIN, PromptRule, certainty_ranks
from prolip.gaussian import Gaussian, mixture
from prolip.scores import Score

CHOSEN = "best, chosen by one half of the labelled images for the other"


def cross_fitted(
    features: Features, prompts: Gaussian, labels: Tensor, score: Score
) -> Iterator[tuple[Tensor, Gaussian]]:
    """The images of each half (n,), and the classes (C, D) of the prompts (C, T, D) that the other half chose."""
    uncertainty = features.model.scored_by().uncertainty(prompts)
    hits = hits_by_count(features.image, prompts, uncertainty, labels, score)
    first = halves(features.keys, labels)
    for own in (first, ~first):
        counts = best_counts(hits[:, ~own], labels[~own], len(prompts.mean))
        kept = certainty_ranks(uncertainty) < counts.unsqueeze(1)
        yield own.nonzero().squeeze(1), mixture(prompts, kept / kept.sum(1, keepdim=True))


def halves(keys: tuple[str, ...], labels: Tensor) -> Tensor:
    """Every other image of each class, in an order that its keys alone determine: (N,) bool."""
    chosen = torch.zeros(len(keys), dtype=torch.bool)
    order = torch.tensor(sorted(range(len(keys)), key=lambda row: fingerprint("half", keys[row])))
    for label in labels.unique():
        chosen[order[labels[order] == label][::2]] = True
    return chosen


def hits_by_count(image: Gaussian, prompts: Gaussian, uncertainty: Tensor, labels: Tensor, score: Score) -> Tensor:
    """Which images are right where every class has its K most certain prompts, K = 1 to T: (T, N) bool."""
    found = []
    for count in range(1, prompts.mean.shape[1] + 1):
        classes = mixture(prompts, PromptRule(CERTAIN, count).weights(uncertainty))
        nearest = [block.argmax(1) for _, block in PairScores.from_gaussians(image, classes, score).blocks()]
        found.append(torch.cat(nearest) == labels)
    return torch.stack(found)


def best_counts(hits: Tensor, labels: Tensor, classes: int) -> Tensor:
    """The K with the most hits (T, n) of each class, (C,); of equal ones, and without an image, the largest."""
    of_class = torch.nn.functional.one_hot(labels, classes).double()
    totals = (hits.double() @ of_class).flip(0)  # (T, C), the largest K first, as argmax takes the first of equal ones
    return len(hits) - totals.argmax(0)
