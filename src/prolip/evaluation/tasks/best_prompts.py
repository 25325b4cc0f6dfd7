"""Prompts that images choose: by one half of them for the other.

PCME++'s best top-K prompts of each class (Chun 2024, C.6) are chosen on the very images that are scored, as the paper
says, and so are the weights of ProLIP's released BPRW: of two rules that differ by chance alone the one that suits
these images then wins. Here no image is scored by a choice that it took part in. With labels it is no zero-shot figure.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from prolip.evaluation.datasets.base import fingerprint
from prolip.evaluation.embed import Features
from prolip.evaluation.metrics.blockwise import PairScores
from prolip.evaluation.zero_shot import BEST, CERTAIN, PromptRule, Prompts, certainty_ranks
from prolip.gaussian import Gaussian, mixture
from prolip.prompts.bprw import reweigh
from prolip.scores import Score

CHOSEN = "best, chosen by one half of the labelled images for the other"


def described(prompts: Prompts) -> str:
    """A rule for readers."""
    if not isinstance(prompts, PromptRule) or prompts.fit is None:
        return CHOSEN if prompts.way == BEST else str(prompts)
    return f"{prompts}, fitted to one half of the {'labelled ' if prompts.fit.shots else ''}images for the other"


def cross_weights(
    features: Features, prompts: Gaussian, labels: Tensor, score: Score
) -> Iterator[tuple[Tensor, Tensor]]:
    """The images of each half (n,), and the weights (C, T) of the prompts (C, T, D) by the other half.

    By BPRW, without labels where it takes no shots; or even weights of the K most certain prompts of each class, with
    the K that suits them best.
    """
    fit, keys, uncertainty = features.rule.fit, features.keys, features.model.scored_by().uncertainty(prompts)
    first = halves(keys, labels if fit is None or fit.shots else torch.zeros_like(labels))
    hits = torch.empty(0) if fit else hits_by_count(features.image, prompts, uncertainty, labels, score)
    for own in (first, ~first):
        rows, others = (half.nonzero().squeeze(1) for half in (own, ~own))
        if fit is None:
            counts = best_counts(hits[:, others], labels[others], len(prompts.mean))
            kept = certainty_ranks(uncertainty) < counts.unsqueeze(1)
            yield rows, kept / kept.sum(1, keepdim=True)
        else:
            image, chosen = features.image.select(others), [keys[row] for row in others.tolist()]
            yield rows, reweigh(fit, image, chosen, prompts, score, labels[others] if fit.shots else None).weights


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
