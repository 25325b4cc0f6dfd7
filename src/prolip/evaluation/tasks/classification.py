"""One class for each image: accuracy, and a study of whether uncertain images are the wrong ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from prolip.evaluation.datasets.base import Dataset
from prolip.evaluation.embed import Features
from prolip.evaluation.metrics.bootstrap import class_mean_of, mean_of
from prolip.evaluation.metrics.study import predict, study_classification
from prolip.evaluation.prompts import cross_weights, described
from prolip.evaluation.tasks import base
from prolip.evaluation.tasks.base import Scored, Task
from prolip.gaussian import mixture
from prolip.scores import Score

TOP = 5


def names(dataset: Dataset) -> list[str]:
    """Return acc1, acc5 with at least five classes, mean_per_class_recall."""
    return ["acc1", *(["acc5"] if len(dataset.classnames) >= TOP else []), "mean_per_class_recall"]


def score_task(features: Features, score: Score, study: bool = False) -> Scored:
    """Compute `names`; if images choose or weigh prompts, each half does it for the other, without a study."""
    labels, found, info = base.own_labels(features), None, dict[str, Any]()
    if features.prompts is not None:
        if study:
            why = f"classes of {features.rule} prompts differ between two halves of the images"
            raise ValueError(f"{why}: use other prompts for a study")
        classes = len(features.prompts.mean)
        predicted, ranks = torch.empty_like(labels), torch.empty_like(labels)
        for rows, weights in cross_weights(features, features.prompts, labels, score):
            half = replace(features, image=features.image.select(rows), text=mixture(features.prompts, weights))
            predicted[rows], ranks[rows] = predict(base.pair_scores(half, score), labels[rows])
        info["prompts"] = described(features.rule)
    else:
        scores = base.pair_scores(features, score)
        classes = scores.texts
        if study:
            predicted, ranks, found = study_classification(scores, labels, *base.study_parts(features, score))
            found = base.with_neighbours(found, features)
        else:
            predicted, ranks = predict(scores, labels)
    statistics = {f"acc{k}": mean_of(ranks <= k, "images") for k in (1, TOP) if k <= classes}
    statistics["mean_per_class_recall"] = class_mean_of(predicted == labels, labels, "images")
    info = {"classes": classes} | info | base.too_small_for(["acc5"], statistics)
    return Scored(statistics, {}, info, found, {"predicted": predicted, "rank": ranks})


TASK = Task("acc1", base.class_texts, names, score_task)
