"""Weights of prompts fitted to the images of a data set, for others to be scored by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prolip.embedder import Embedder
from prolip.evaluation.cache import FeatureStore
from prolip.evaluation.datasets.base import Dataset
from prolip.evaluation.embed import image_features
from prolip.evaluation.task import check_prompts
from prolip.evaluation.tasks.base import class_prompts
from prolip.evaluation.zero_shot import BPRW, PromptRule
from prolip.gaussian import Gaussian
from prolip.prompts.bprw import Reweighing, reweigh
from prolip.prompts.weights import PromptWeights, in_braces
from prolip.scores import Similarity


def fit_prompts(
    dataset: Dataset,
    embedder: Embedder,
    settings: Reweighing,
    templates: Sequence[str] = (),
    similarity: Similarity = None,
    store: FeatureStore | None = None,
    **options: Any,
) -> PromptWeights:
    """The weights of all prompts of a data set's classes by its images, see `bprw.reweigh`.

    templates: prompts, default the data set's own; similarity: what images are near by where there are no shots,
    default the model's; store, options: as of `compute_features`. ValueError for data without classes, a model of
    points, and shots of images without labels.
    """
    check_prompts(PromptRule(BPRW, fit=settings), dataset, embedder.card)
    score = embedder.card.scored_by(similarity)
    templates = tuple(map(in_braces, templates or dataset.templates))
    features = image_features(dataset, embedder, store, **options)
    texts, _ = class_prompts(dataset.classnames, templates)
    prompts = Gaussian(*(x.unflatten(0, (len(dataset.classnames), -1)) for x in embedder.embed_texts(texts)))
    fit = reweigh(settings, features.image, features.keys, prompts, score, features.labels)
    return PromptWeights(
        dataset.classnames,
        templates,
        fit.weights,
        embedder.name,
        embedder.fingerprint,
        settings,
        dataset.source,
        dataset.fingerprint,
        frozenset(dataset.contents.values()),
    )


def check_pool(pool: Dataset, dataset: Dataset) -> None:
    """ValueError unless weights that are fitted to one may be used on the other: the same classes, other images.

    Images are compared by the bytes of their files, whatever reads them.
    """
    if pool.classnames != dataset.classnames:
        raise ValueError(
            f"{pool.source} has other classes ({len(pool.classnames)}) than {dataset.source}"
            f" ({len(dataset.classnames)}), or another order: give images of the same classes"
        )
    same = pool.fingerprint == dataset.fingerprint
    if shared := "all images" if same else dataset.shared_with(set(pool.contents.values())):
        raise ValueError(
            f"{pool.source} holds the very images that are scored, {shared}: give another split, such as"
            " --prompts-split train, or drop --prompts-fit, and each half is fitted to the other"
        )
