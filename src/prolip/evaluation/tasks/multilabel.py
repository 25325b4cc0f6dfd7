"""Any number of classes for each image: average precision of every class."""

from __future__ import annotations

import numpy as np
import torch

from prolip.evaluation.datasets.base import Dataset
from prolip.evaluation.embed import Features
from prolip.evaluation.metrics.bootstrap import average_precision_of
from prolip.evaluation.metrics.classification import average_precision, multilabel
from prolip.evaluation.metrics.study import Samples, Study
from prolip.evaluation.tasks import base
from prolip.evaluation.tasks.base import Scored, Task
from prolip.scores import Score


def names(dataset: Dataset) -> list[str]:
    return list(multilabel(torch.zeros(1, 1), torch.ones(1, 1)))


def score_task(features: Features, score: Score, study: bool = False) -> Scored:
    """Compute `multilabel`; the study refuses 1 - average precision of an image's classes by best score and image."""
    scores, labels, found = base.score_matrix(features, score), base.own_labels(features), None
    if study:
        error = 1 - average_precision(scores.mT, labels.mT)
        kept = ~np.isnan(error)
        uncertainties = {"score": -scores.amax(1)[kept]}
        if features.model.probabilistic:
            uncertainties["image"] = base.uncertainty_of(features)(features.image)[kept]
        images, texts = torch.meshgrid(*(torch.arange(count) for count in scores.shape), indexing="ij")
        reliability = base.match_reliability(list(zip(scores, labels, images, texts)), features, score)
        found = Study({"refusal": Samples.of(error[kept], uncertainties)}, reliability)
    statistics = {"mAP": average_precision_of(scores, labels, "images")}
    return Scored(statistics, multilabel(scores, labels), {"classes": scores.shape[1]}, found)


TASK = Task("mAP", base.class_texts, names, score_task)
