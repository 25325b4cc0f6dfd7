"""Prompts that images of a data set choose or weigh: each half of the images decides for the other half."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from prolip.embedder import Embedder, ModelCard
from prolip.evaluation.datasets.base import Dataset
from prolip.evaluation.embed import Features, image_features
from prolip.evaluation.metrics.streaming import PairScores
from prolip.gaussian import Gaussian, mixture
from prolip.prompts.bprw import Reweighing, reweigh
from prolip.prompts.templates import (
    ALL,
    BEST,
    BPRW,
    BY_IMAGES,
    CERTAIN,
    PromptRule,
    Prompts,
    certainty_ranks,
    class_prompts,
)
from prolip.prompts.weights import PromptWeights, in_braces
from prolip.scores import Score
from prolip.utils.documents import fingerprint

CHOSEN = "best, chosen by one half of the labelled images for the other"


def check_prompts(prompts: Prompts, dataset: Dataset, model: ModelCard) -> None:
    """Raise ValueError for data without prompts, a deterministic model, and weights of other classes or models."""
    if prompts.way == ALL:
        return
    if not model.probabilistic:
        why = f"prompts {prompts} are chosen by uncertainty, and {model.name} gives points"
        raise ValueError(f"{why}: use a probabilistic model, or all prompts")
    if dataset.kind != "classification" and (prompts.way in BY_IMAGES or dataset.kind != "multilabel"):
        why = f"{dataset.source} is a {dataset.kind} set, which has no prompts to choose by {prompts}"
        raise ValueError(f"{why}: remove it, or use --prompts all")
    if isinstance(prompts, PromptRule):
        prompts.check(len(dataset.templates))
    else:
        prompts.check(dataset.classnames, dataset.templates, model.fingerprint, dataset.fingerprint)
        prompts.check_images(dataset)


def fit_prompts(
    dataset: Dataset, embedder: Embedder, settings: Reweighing, templates: Sequence[str] = (), **options: Any
) -> PromptWeights:
    """Fit the weights of prompts (default: the data set's) of all classes to its images; options: `compute_features`.

    ValueError for data without classes, a deterministic model, and shots of images without labels.
    """
    check_prompts(PromptRule(BPRW, fit=settings), dataset, embedder.card)
    templates = tuple(map(in_braces, templates or dataset.templates))
    features = image_features(dataset, embedder, **options)
    texts, _ = class_prompts(dataset.classnames, templates)
    prompts = Gaussian(*(x.unflatten(0, (len(dataset.classnames), -1)) for x in embedder.embed_texts(texts)))
    fit = reweigh(settings, features.image, features.keys, prompts, embedder.scored_by(), features.labels)
    model, seen = (embedder.name, embedder.fingerprint), frozenset(dataset.contents.values())
    own = (dataset.classnames, templates, fit.weights)
    return PromptWeights(*own, *model, settings, dataset.source, dataset.fingerprint, seen)


def check_pool(pool: Dataset, dataset: Dataset) -> None:
    """Raise ValueError unless weights fitted to `pool` may be used on `dataset`: same classes, no shared images."""
    if pool.classnames != dataset.classnames:
        counts = f"{pool.source} has other classes ({len(pool.classnames)}) than {dataset.source}"
        raise ValueError(f"{counts} ({len(dataset.classnames)}), or another order: give images of the same classes")
    same = pool.fingerprint == dataset.fingerprint
    if shared := "all images" if same else dataset.shared_with(set(pool.contents.values())):
        remedy = "give another split, such as --prompts-split train, or drop --prompts-fit to fit each half to"
        raise ValueError(f"{pool.source} has images that are scored, {shared}: {remedy} the other")


def described(prompts: Prompts) -> str:
    """Describe a rule for readers."""
    if not isinstance(prompts, PromptRule) or prompts.fit is None:
        return CHOSEN if prompts.way == BEST else str(prompts)
    return f"{prompts}, fitted to one half of the {'labelled ' if prompts.fit.shots else ''}images for the other"


def cross_weights(
    features: Features, prompts: Gaussian, labels: Tensor, score: Score
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the images of each half (n,), and weights (C, T) of prompts (C, T, D) from the other half: by BPRW (without
    labels if it takes no shots), or even weights of the K most certain prompts of each class, with the best K.
    """
    fit, keys, uncertainty = features.rule.fit, features.keys, features.model.scored_by().uncertainty(prompts)
    first = halves(keys, labels if fit is None or fit.shots else torch.zeros_like(labels))
    hits = torch.empty(0)  # (T, N), images that are right with the K most certain prompts of every class
    if fit is None:
        found = []
        for count in range(1, prompts.mean.shape[1] + 1):
            classes = mixture(prompts, PromptRule(CERTAIN, count).weights(uncertainty))
            blocks = PairScores.from_gaussians(features.image, classes, score).blocks()
            found.append(torch.cat([block.argmax(1) for _, block in blocks]) == labels)
        hits = torch.stack(found)
    for own in (first, ~first):
        rows, others = (half.nonzero().squeeze(1) for half in (own, ~own))
        if fit is None:
            of_class = torch.nn.functional.one_hot(labels[others], len(prompts.mean)).double()
            totals = (hits[:, others].double() @ of_class).flip(0)  # (T, C), the largest K first, to win ties
            counts = len(hits) - totals.argmax(0)
            kept = certainty_ranks(uncertainty) < counts.unsqueeze(1)
            yield rows, kept / kept.sum(1, keepdim=True)
        else:
            image, chosen = features.image.select(others), [keys[row] for row in others.tolist()]
            yield rows, reweigh(fit, image, chosen, prompts, score, labels[others] if fit.shots else None).weights


def halves(keys: tuple[str, ...], labels: Tensor) -> Tensor:
    """Choose every second image of each class, in an order that depends on its keys only: (N,) bool."""
    chosen = torch.zeros(len(keys), dtype=torch.bool)
    order = torch.tensor(sorted(range(len(keys)), key=lambda row: fingerprint("half", keys[row])))
    for label in labels.unique():
        chosen[order[labels[order] == label][::2]] = True
    return chosen
