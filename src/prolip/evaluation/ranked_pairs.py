"""Pairs to rank as a test for overfitting: equally many of a test set and of the training data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from prolip.evaluation.embed import Features
from prolip.gaussian import Gaussian
from prolip.scores import Score

#: Most pairs of a test set.
PAIRS = 256


class RankedPairs(NamedTuple):
    """Images and texts in pairs, (N, D); ids: (N,), equal for pairs with the same text."""

    image: Gaussian
    text: Gaussian
    ids: Tensor


def pairs_of(features: Features) -> RankedPairs | None:
    """Return at most PAIRS random images, each with its first caption or its class; None if an image has none."""
    chosen = torch.randperm(len(features.keys), generator=torch.Generator().manual_seed(0))[:PAIRS]
    if features.text is None:
        return None
    if features.owners is not None:
        row = {int(owner): i for i, owner in reversed(list(enumerate(features.owners)))}
        text = torch.tensor([row[i] for i in chosen.tolist() if i in row])
        ids = numbered([features.captions[i] for i in text.tolist()])
    elif features.labels is not None and features.labels.ndim == 1:
        text = ids = features.labels[chosen]
    else:
        return None
    if len(text) < len(chosen):
        return None
    return RankedPairs(features.image.select(chosen.tolist()), features.text.select(text.tolist()), ids)


def numbered(texts: Sequence[str]) -> Tensor:
    """Return a number for each text, (N,), the same for equal texts."""
    places = {text: i for i, text in enumerate(dict.fromkeys(texts))}
    return torch.tensor([places[text] for text in texts])


def recall_of_pairs(score: Score, pairs: RankedPairs, count: int) -> float:
    """Return R@1 among the first `count` pairs, the mean of both directions; pairs with the same text are right."""
    image, text, ids = pairs.image.select(slice(count)), pairs.text.select(slice(count)), pairs.ids[:count]
    scores, right = score.pairwise(image, text), ids[:, None] == ids
    hits = [right.take_along_dim(scores.argmax(axis, keepdim=True), axis) for axis in (0, 1)]
    return torch.cat([hit.flatten() for hit in hits]).double().mean().item()


def chance_of_pairs(pairs: RankedPairs, count: int) -> float:
    """Return the R@1 of `recall_of_pairs` that random scores reach on average."""
    ids = pairs.ids[:count]
    return (ids[:, None] == ids).double().mean().item()
