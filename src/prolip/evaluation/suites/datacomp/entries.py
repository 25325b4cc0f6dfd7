"""One entry of the suite: its dataset through a model, once, and the figures of every similarity asked for."""
from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from prolip.evaluation.datasets.base import Dataset
from prolip.evaluation.feature_store import FeatureStore
from prolip.evaluation.features import Features, image_features, stored_texts
from prolip.evaluation.kinds.association import association_metrics, score_candidates, study_candidates
from prolip.evaluation.kinds.base import class_prompts, own_labels, score_matrix, uncertainty_of
from prolip.evaluation.kinds.classification import study_scores
from prolip.evaluation.kinds.retrieval import relevance_of, study_rankings
from prolip.evaluation.metrics.study import Study
from prolip.evaluation.model import Embedder
from prolip.evaluation.suites.datacomp.scores import (
    classification_metrics,
    face_metrics,
    group_columns,
    retrieval_metrics,
    split_prompts,
)
from prolip.evaluation.suites.datacomp.tasks import FACE_PROMPTS, Task
from prolip.evaluation.task import TaskResult, compute_features
from prolip.gaussian import Gaussian
from prolip.scores import Score, Similarity

#: Metrics of a task, and what there is to say of its uncertainty.
Scored = tuple[dict[str, float], Study]


@dataclass(frozen=True)
class Settings:
    """How entries are evaluated. uncertainty: with the figures of refusal and calibration; plots: a folder for their
    pictures; store: where embeddings are kept; the rest as in `compute_features`."""

    uncertainty: bool = True
    plots: Path | None = None
    batch_size: int = 256
    workers: int | None = None
    progress: bool = False
    store: FeatureStore | None = None


def evaluate_entry(
    task: Task, dataset: Dataset, embedder: Embedder, similarities: Sequence[str], settings: Settings | None = None
) -> dict[str, TaskResult]:
    """The result of a task by similarity; images and texts are embedded once.

    Metrics as `datacomp.scores` names them, with `refusal/...` and `calibration/...` of `metrics.study` beside them.
    Raises ValueError (DamagedData) for data that cannot be scored.
    """
    scores = {similarity: embedder.card.scored_by(similarity) for similarity in similarities}
    settings = settings or Settings()
    store = settings.store or FeatureStore()
    started = time.perf_counter()
    options: dict[str, Any] = {"batch_size": settings.batch_size, "workers": settings.workers}
    compute = image_features if task.kind == "faces" else compute_features
    features = compute(dataset, embedder, store, progress=settings.progress, **options)
    classes = face_classes(dataset, embedder, store) if task.kind == "faces" else {}
    embedded = time.perf_counter() - started
    out = {}
    for similarity, score in scores.items():
        started = time.perf_counter()
        if task.kind == "faces":
            metrics, study = score_faces(task, features, classes, score)
        else:
            metrics, study = SCORES[task.kind](task, features, score)
        metrics |= study.metrics() if settings.uncertainty else {}
        if settings.plots is not None:
            from prolip.evaluation.plots import write_plots  # late: only plots need matplotlib

            write_plots(study, task.name, settings.plots / f"{task.key.replace('/', '-')}-{similarity}")
        seconds = round(embedded + time.perf_counter() - started, 2)
        info = facts_of_entry(features, similarity) | {"seconds": seconds}
        out[similarity] = TaskResult(task.key, metrics, check_main(task, metrics), info)
    return out


def facts_of_entry(features: Features, similarity: Similarity) -> dict[str, Any]:
    """What a reader of a result asks: on what, and how uncertain; `size` is what the published figures count."""
    dataset = features.dataset
    out: dict[str, Any] = {"size": len(dataset.associations) or len(features.keys), "images": len(features.keys)}
    if dataset.kind == "classification" and features.text is not None:
        out["classes"] = len(features.text.mean)
    out |= {"similarity": similarity, "source": dataset.source, "probabilistic": features.model.probabilistic}
    if features.model.probabilistic:
        uncertainty = uncertainty_of(features)
        out["image_trace"] = float(uncertainty(features.image).mean())
        out |= {} if features.text is None else {"text_trace": float(uncertainty(features.text).mean())}
    return out | ({"damaged": features.damaged} if features.damaged else {})


def check_main(task: Task, metrics: dict[str, float]) -> str:
    """The name of the main metric, "" for the face sets. ValueError where the data does not give it."""
    if task.main_metric is None:
        return ""
    if task.main_metric not in metrics:
        raise ValueError(f"the data gives no {task.main_metric}, the main metric of {task.name}: is it the whole set? "
                         f"It gives {', '.join(key for key in metrics if '/' not in key)}")  # fmt: skip
    return task.main_metric


def score_classification(task: Task, features: Features, score: Score) -> Scored:
    """Classes and, where the task has them, groups."""
    scores = score_matrix(features, score)
    labels = own_labels(features)
    metrics = classification_metrics(task, scores, labels, features.groups)
    return metrics, study_scores(scores, labels, features, features.text, score)


def score_retrieval(task: Task, features: Features, score: Score) -> Scored:
    """Images and their own captions."""
    own, _ = relevance_of(features)
    i2t, t2i, study = study_rankings(features, own, score)
    return retrieval_metrics(i2t, t2i), study


def score_associations(task: Task, features: Features, score: Score) -> Scored:
    """WinoGAViL."""
    scored = list(score_candidates(features, score))
    return association_metrics(scored), study_candidates(scored, features, score)


SCORES: dict[str, Callable[[Task, Features, Score], Scored]] = {
    "classification": score_classification, "retrieval": score_retrieval, "association": score_associations,
}  # fmt: skip


def face_classes(dataset: Dataset, embedder: Embedder, store: FeatureStore) -> dict[str, Gaussian]:
    """The classes of race, gender, age and toxic, each with the prompts of its own."""
    names = split_prompts(dataset.classnames, "class names")
    templates = split_prompts(dataset.templates, "templates")
    return {
        what: stored_texts(*class_prompts(names[what], templates[what]), embedder, store) for what in FACE_PROMPTS
    }


def score_faces(task: Task, features: Features, classes: dict[str, Gaussian], score: Score) -> Scored:
    """The four classifications of the face sets; uncertainty against errors of gender, which both sets label alike."""
    scores = {what: score.pairwise(features.image, z) for what, z in classes.items()}
    predicted = {what: of_class.argmax(1) for what, of_class in scores.items()}
    metrics = face_metrics(task, predicted, features.groups)
    columns = group_columns(task, features.groups, len(features.keys))
    gender = torch.from_numpy(columns[:, task.groups.index("gender")])
    return metrics, study_scores(scores["gender"], gender, features, classes["gender"], score)
