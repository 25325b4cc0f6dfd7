"""One class for each image: accuracy, and whether the images that are wrong are the uncertain ones."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from prolip.evaluation.datasets.base import Dataset
from prolip.evaluation.features import Features
from prolip.evaluation.kinds.base import (
    Kind,
    TaskMetrics,
    class_texts,
    own_labels,
    score_blocks,
    score_matrix,
    text_gaussians,
    too_small_for,
    uncertainty_of,
)
from prolip.evaluation.metrics.bootstrap import class_mean_of, mean_of
from prolip.evaluation.metrics.classification import confusion_matrix, label_ranks, mean_per_class_recall
from prolip.evaluation.metrics.study import Study, study_classification
from prolip.gaussian import Gaussian
from prolip.scores import Score

TOP = 5
#: Images up to which R-AUROC is computed: it takes their square of scores.
NEIGHBOURS = 50_000


@dataclass(frozen=True)
class ScoredImages:
    """A classification, sample by sample, for group metrics and studies of uncertainty.

    keys: N; labels: (N,) int64; groups: (N, G) or None; predictions: (N, k) the k nearest classes, nearest first (k: 5
    or all classes); score: (N,) of the nearest; rank: (N,) of the own class, from 1; image: (N, D); classes: (C, D).
    """

    keys: tuple[str, ...]
    labels: Tensor
    groups: Any
    predictions: Tensor
    score: Tensor
    rank: Tensor
    image: Gaussian
    classes: Gaussian


def score_classes(features: Features, score: Score, k: int = TOP) -> ScoredImages:
    """Every image against all classes; equal scores go to the lower class. ValueError without labels."""
    labels, parts = own_labels(features), []
    for rows, block in score_blocks(features, score):
        order = block.argsort(dim=1, descending=True, stable=True)[:, :k]
        best = block.gather(1, order[:, :1]).squeeze(1)
        parts.append((order, best, label_ranks(block, labels[rows])))
    predictions, best, rank = (torch.cat(column) for column in zip(*parts))
    classes = text_gaussians(features)
    return ScoredImages(features.keys, labels, features.groups, predictions, best, rank, features.image, classes)


def names(dataset: Dataset) -> list[str]:
    """acc1, acc5 with five classes or more, mean_per_class_recall."""
    return ["acc1", *(["acc5"] if len(dataset.classnames) >= TOP else []), "mean_per_class_recall"]


def evaluate(features: Features, score: Score, confusion: bool = False) -> TaskMetrics:
    """acc1, acc5 (with five classes or more) and the mean per-class recall."""
    scored = score_classes(features, score)
    metrics = {"acc1": float((scored.rank <= 1).double().mean())}
    statistics = {"acc1": mean_of(scored.rank <= 1, "images")}
    info: dict[str, Any] = {"classes": len(scored.classes.mean)}
    if info["classes"] >= TOP:
        metrics["acc5"] = float((scored.rank <= TOP).double().mean())
        statistics["acc5"] = mean_of(scored.rank <= TOP, "images")
    predicted = scored.predictions[:, 0]
    metrics["mean_per_class_recall"] = mean_per_class_recall(predicted, scored.labels)
    statistics["mean_per_class_recall"] = class_mean_of(predicted == scored.labels, scored.labels, "images")
    if confusion:
        info["confusion"] = confusion_matrix(predicted, scored.labels, info["classes"]).tolist()
    return TaskMetrics(metrics, info | too_small_for(["acc5"], metrics), statistics)


def study(features: Features, score: Score) -> Study:
    """Error: the wrong class."""
    return study_scores(score_matrix(features, score), own_labels(features), features, features.text, score)


def study_scores(
    scores: Tensor, labels: Tensor, features: Features, classes: Gaussian | None, score: Score
) -> Study:
    """The same of scores (N, C) and labels (N,) that are there."""
    image, own = (features.image, classes) if features.model.probabilistic else (None, None)
    return study_classification(scores, labels, image, own, score, uncertainty_of(features), len(labels) <= NEIGHBOURS)


KIND = Kind("acc1", class_texts, names, evaluate, study)
