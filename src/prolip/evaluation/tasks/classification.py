"""One class for each image: accuracy, and whether the images that are wrong are the uncertain ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from sklearn.metrics import confusion_matrix
from torch import Tensor

from prolip.evaluation.datasets.base import Dataset
from prolip.evaluation.embed import Features
from prolip.evaluation.metrics.bootstrap import class_mean_of, mean_of
from prolip.evaluation.metrics.calibration import Matches
from prolip.evaluation.metrics.classification import label_ranks
from prolip.evaluation.metrics.study import Study, study_classification
from prolip.evaluation.prompts import cross_weights, described
from prolip.evaluation.tasks.base import (
    Kind,
    TaskMetrics,
    class_texts,
    own_labels,
    pair_scores,
    pair_uncertainty_of,
    score_matrix,
    text_gaussians,
    too_small_for,
    uncertainty_of,
)
from prolip.gaussian import mixture
from prolip.scores import Score

TOP = 5
#: Images up to which R-AUROC is computed, as it takes their square of scores, and what is left out beyond.
NEIGHBOURS = 50_000
BY_NEIGHBOURS = ("refusal/R-AUROC", "refusal/1-NN")


def names(dataset: Dataset) -> list[str]:
    """acc1, acc5 with five classes or more, mean_per_class_recall."""
    return ["acc1", *(["acc5"] if len(dataset.classnames) >= TOP else []), "mean_per_class_recall"]


def evaluate(features: Features, score: Score, confusion: bool = False) -> TaskMetrics:
    """acc1, acc5 (with five classes or more) and the mean per-class recall; equal scores go to the lower class.

    Where images are to choose or weigh the prompts, one half of them does it for the other.
    """
    labels, classes = own_labels(features), len(text_gaussians(features).mean)
    info: dict[str, Any] = {"classes": classes}
    if features.prompts is None:
        predicted, ranks = predictions(features, score)
    else:
        predicted, ranks = (torch.empty_like(labels) for _ in range(2))
        for rows, weights in cross_weights(features, features.prompts, labels, score):
            text = mixture(features.prompts, weights)
            half = replace(features, image=features.image.select(rows), labels=labels[rows], text=text)
            predicted[rows], ranks[rows] = predictions(half, score)
        info["prompts"] = described(features.rule)
    statistics = {f"acc{k}": mean_of(ranks <= k, "images") for k in (1, TOP) if k <= classes}
    statistics["mean_per_class_recall"] = class_mean_of(predicted == labels, labels, "images")
    metrics = {name: statistic.value for name, statistic in statistics.items()}
    if confusion:
        info["confusion"] = confusion_matrix(labels.numpy(), predicted.numpy(), labels=range(classes)).tolist()
    return TaskMetrics(metrics, info | too_small_for(["acc5"], metrics), statistics)


def predictions(features: Features, score: Score) -> tuple[Tensor, Tensor]:
    """The nearest class of every image, (N,), and the rank of its own one, (N,)."""
    labels = own_labels(features)
    parts = [
        (block.argmax(1), label_ranks(block, labels[rows])) for rows, block in pair_scores(features, score).blocks()
    ]
    predicted, ranks = (torch.cat(column) for column in zip(*parts))
    return predicted, ranks


def study(features: Features, score: Score) -> Study:
    """Error: the wrong class. ValueError where images are to choose the prompts."""
    if features.prompts is not None:
        raise ValueError(
            f"classes of {features.rule} prompts differ between two halves of the images: no study of them is made"
        )
    labels = own_labels(features)
    image, classes = (features.image, features.text) if features.model.probabilistic else (None, None)
    found = study_classification(
        score_matrix(features, score),
        labels,
        image,
        classes,
        Matches.of(score, features.evidence, text_gaussians(features)),
        uncertainty_of(features),
        len(labels) <= NEIGHBOURS,
        pair_uncertainty_of(features),
    )
    large = image is not None and len(labels) > NEIGHBOURS
    return found._replace(too_large_for=BY_NEIGHBOURS) if large else found


KIND = Kind("acc1", class_texts, names, evaluate, study)
