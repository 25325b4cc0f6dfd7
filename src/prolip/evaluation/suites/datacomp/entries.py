"""One entry of the suite: its dataset through a model, once, and the figures of every similarity asked for."""
from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from prolip.evaluation.datasets.base import Dataset
from prolip.evaluation.feature_store import FeatureStore
from prolip.evaluation.features import Features, image_features, stored_texts
from prolip.evaluation.kinds import KINDS, classification
from prolip.evaluation.kinds.base import Metrics, class_prompts, own_labels, score_matrix, uncertainty_of
from prolip.evaluation.metrics.study import Study
from prolip.evaluation.model import Embedder
from prolip.evaluation.suites.datacomp.scores import (
    added_metrics,
    face_metrics,
    group_columns,
    retrieval_metrics,
    split_prompts,
)
from prolip.evaluation.suites.datacomp.tasks import FACE_PROMPTS, Task
from prolip.evaluation.task import TaskResult, compute_features
from prolip.gaussian import Gaussian
from prolip.prompts.weights import PromptWeights
from prolip.scores import Score, Similarity


@dataclass(frozen=True)
class Settings:
    """How entries are evaluated. uncertainty: with the figures of refusal and calibration; plots: a folder for their
    pictures; store: where embeddings are kept; prompts: weights, each for the task whose classes and prompts it
    has; the rest as in `compute_features`."""

    uncertainty: bool = True
    plots: Path | None = None
    batch_size: int = 256
    workers: int | None = None
    progress: bool = False
    store: FeatureStore | None = None
    prompts: tuple[PromptWeights, ...] = ()


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
    compute = image_features if task.kind == "faces" else compute_features
    own = next((one for one in settings.prompts if one.are_of(dataset.classnames, dataset.templates)), None)
    weighed: dict[str, Any] = {} if own is None else {"prompts": own}
    features = compute(
        dataset, embedder, store, batch_size=settings.batch_size, workers=settings.workers, progress=settings.progress,
        **weighed,
    )  # fmt: skip
    faces = face_classes(dataset, embedder, store) if task.kind == "faces" else {}
    embedded = time.perf_counter() - started
    out = {}
    for similarity, score in scores.items():
        started = time.perf_counter()
        metrics, study = score_task(task, features, faces, score)
        metrics |= study.metrics() if settings.uncertainty else {}
        if settings.plots is not None:
            from prolip.evaluation.plots import write_plots  # late: only plots need matplotlib

            write_plots(study, task.name, settings.plots / f"{task.key.replace('/', '-')}-{similarity}")
        seconds = round(embedded + time.perf_counter() - started, 2)
        info = facts_of_entry(features, similarity) | {"seconds": seconds}
        info |= {"too_large_for": list(study.too_large_for)} if settings.uncertainty and study.too_large_for else {}
        if task.main_metric is not None and task.main_metric not in metrics:
            named = ", ".join(key for key in metrics if "/" not in key)
            raise ValueError(f"the data gives no {task.main_metric}, the main metric of {task.name}: is it the whole "
                             f"set? It gives {named}")  # fmt: skip
        out[similarity] = TaskResult(task.key, metrics, task.main_metric or "", info)
    return out


def facts_of_entry(features: Features, similarity: Similarity) -> dict[str, Any]:
    """What a reader of a result asks: on what, and how uncertain; `size` is what the published figures count."""
    dataset = features.dataset
    out: dict[str, Any] = {"size": len(dataset.associations) or len(features.keys), "images": len(features.keys)}
    if dataset.kind == "classification" and features.text is not None:
        out["classes"] = len(features.text.mean)
    out |= {"similarity": similarity, "source": dataset.source, "probabilistic": features.model.probabilistic}
    out |= {"prompts": dataset.info["prompts"]} if "prompts" in dataset.info else {}
    if features.model.probabilistic:
        uncertainty = uncertainty_of(features)
        out["image_trace"] = float(uncertainty(features.image).mean())
        out |= {} if features.text is None else {"text_trace": float(uncertainty(features.text).mean())}
    return out | ({"damaged": features.damaged} if features.damaged else {})


def score_task(task: Task, features: Features, faces: Mapping[str, Gaussian], score: Score) -> tuple[Metrics, Study]:
    """The metrics of a task, and what its uncertainty is worth; faces: classes of the four prompts of the face sets."""
    if task.kind == "faces":
        predicted = {what: score_matrix(replace(features, text=z), score).argmax(1) for what, z in faces.items()}
        columns = group_columns(task, features.groups, len(features.keys))
        # uncertainty against errors of gender, which both sets label alike
        gender = torch.from_numpy(columns[:, task.groups.index("gender")])
        study = classification.study(replace(features, labels=gender, text=faces["gender"]), score)
        return face_metrics(task, predicted, features.groups), study
    kind = KINDS[task.kind]
    metrics = kind.evaluate(features, score, False).metrics
    if task.kind == "retrieval":
        metrics = retrieval_metrics(metrics)
    if task.kind == "classification":
        predictions = classification.predictions(features, score)
        metrics |= added_metrics(task, *predictions, own_labels(features), features.groups)
    return metrics, kind.study(features, score)


def face_classes(dataset: Dataset, embedder: Embedder, store: FeatureStore) -> dict[str, Gaussian]:
    """The classes of race, gender, age and toxic, each with the prompts of its own."""
    names = split_prompts(dataset.classnames, "class names")
    templates = split_prompts(dataset.templates, "templates")
    return {
        what: stored_texts(*class_prompts(names[what], templates[what]), embedder, store) for what in FACE_PROMPTS
    }
