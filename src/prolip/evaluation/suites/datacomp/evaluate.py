"""DataComp's metrics from features: shares in [0, 1], with the keys of DataComp's own `eval_results.jsonl`.

Where DataComp's code and its intention differ (FMoW's region "Other"), there are both values, and the main metric is
the one of its published tables.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prolip.embedder import Embedder
from prolip.evaluation.cache import FeatureStore
from prolip.evaluation.datasets.base import Dataset
from prolip.evaluation.embed import EVERY, Features, image_features, stored_texts
from prolip.evaluation.evaluate import TaskResult, compute_features, evaluate_dataset, study_features
from prolip.evaluation.metrics.classification import macro_f1
from prolip.evaluation.metrics.ranking import KS
from prolip.evaluation.metrics.study import Study
from prolip.evaluation.suites.datacomp.catalogue import SuiteTask
from prolip.evaluation.tasks.base import Metrics, own_labels, score_matrix, uncertainty_of
from prolip.gaussian import Gaussian
from prolip.prompts.templates import class_prompts
from prolip.prompts.weights import PromptWeights
from prolip.scores import Score

MEAN = "mean_recall@1"
#: The region "Other" of FMoW: 4 of its 22,108 images, which sets many worst regions to 0.
FMOW_OTHER = 5
#: The sets of class names and templates of the face sets, `race:black` and `race:a photo of a {c} person`.
FACE_PROMPTS = ("race", "gender", "age", "toxic")
#: Classes of the prompts "toxic", from and up to; the first 14 are people by race and gender (CLIP section 7.1).
CRIME, NON_HUMAN = (18, None), (14, 18)
#: Tasks with one grouping: name of the accuracy, its top k, and the column of the groups.
GROUPED = {
    "wilds/camelyon17": ("acc", 1, "slide"),
    "fairness/dollar_street": ("acc_top5", 5, "income_ds"),
    "fairness/geode": ("acc", 1, "region"),
}


@dataclass(frozen=True, kw_only=True)
class SuiteOptions:
    """Settings of an evaluation of the suite."""

    tasks: Sequence[str] | None = None  # keys, names or tags, default all
    similarities: Sequence[str | None] = (None,)  # None: the score of the model's method
    prompts: Sequence[str] = ()  # files of weights, each for the task with its classes and prompts
    part: tuple[int, int] = (0, 1)  # (I, N): tasks of part I of N
    allow_missing: bool = False  # skip missing data sets
    skip_damaged: bool = False
    uncertainty: bool = True  # also refusal and calibration
    plots: Path | None = None  # a folder for their figures
    store: FeatureStore = field(default_factory=FeatureStore)
    embedding: Mapping[str, Any] = field(default_factory=dict)  # of `compute_features`, such as batch_size


def evaluate_task(
    task: SuiteTask,
    dataset: Dataset,
    embedder: Embedder,
    similarities: Sequence[str],
    options: SuiteOptions,
    prompts: Sequence[PromptWeights] = (),
) -> dict[str, TaskResult]:
    """Return the result of a task by similarity; images and texts are embedded once."""
    chosen = {similarity: embedder.card.scored_by(similarity) for similarity in similarities}
    started, faces, store = time.perf_counter(), {}, options.store
    if task.kind == "faces":
        features = image_features(dataset, embedder, store, **options.embedding)
        names = split_prompts(dataset.classnames, "class names")
        templates = split_prompts(dataset.templates, "templates")
        for what in FACE_PROMPTS:
            faces[what] = stored_texts(*class_prompts(names[what], templates[what]), embedder, store)
    else:
        fits = (one for one in prompts if one.are_of(dataset.classnames, dataset.templates))
        features = compute_features(dataset, embedder, store, **options.embedding, prompts=next(fits, EVERY))
    dataset = features.dataset
    measured: dict[str, Any] = {"size": len(dataset.associations) or len(features.keys), "images": len(features.keys)}
    if dataset.kind == "classification" and features.text is not None:
        measured["classes"] = len(features.text.mean)
    measured |= {"source": dataset.source, "probabilistic": features.model.probabilistic}
    measured |= {"prompts": dataset.info["prompts"]} if "prompts" in dataset.info else {}
    if features.model.probabilistic:
        uncertainty = uncertainty_of(features)
        measured["image_trace"] = float(uncertainty(features.image).mean())
        measured |= {} if features.text is None else {"text_trace": float(uncertainty(features.text).mean())}
    measured |= {"damaged": features.damaged} if features.damaged else {}
    embedded = time.perf_counter() - started
    out = {}
    for similarity, score in chosen.items():
        started = time.perf_counter()
        metrics, study = score_task(task, features, faces, score)
        if task.main_metric is not None and task.main_metric not in metrics:
            raise ValueError(f"the data gives no {task.main_metric}, the main metric of {task.name}: fetch all of it")
        if options.plots is not None:
            from prolip.evaluation.plots import write_plots  # imported late: only plots need matplotlib

            write_plots(study, task.name, options.plots / f"{task.key.replace('/', '-')}-{similarity}")
        info = measured | {"similarity": similarity}
        if options.uncertainty:
            metrics |= study.metrics()
            info |= {"too_large_for": list(study.too_large_for)} if study.too_large_for else {}
        info["seconds"] = round(embedded + time.perf_counter() - started, 2)
        out[similarity] = TaskResult(task.key, metrics, task.main_metric or "", info)
    return out


def score_task(
    task: SuiteTask, features: Features, faces: Mapping[str, Gaussian], score: Score
) -> tuple[Metrics, Study]:
    """Return the metrics of a task and the study of its uncertainty, of gender for `faces` (classes by prompt)."""
    if task.kind == "faces":
        predicted = {what: score_matrix(replace(features, text=z), score).argmax(1) for what, z in faces.items()}
        columns = group_columns(task, features.groups, len(features.keys))
        gender = torch.from_numpy(columns[:, task.groups.index("gender")])
        study = study_features(replace(features, labels=gender, text=faces["gender"]), score)
        return face_metrics(task, predicted, features.groups), study
    result = evaluate_dataset(features.dataset, features, score, study=True)
    assert result.study is not None
    metrics = result.metrics
    if task.kind == "retrieval":  # by own captions, even if others match too
        prefix = "own/" if f"own/{MEAN}" in metrics else ""
        ways = (("text_retrieval", "i2t"), ("image_retrieval", "t2i"))  # the texts of an image, the image of a text
        keys = {f"{name}_recall@{k}": f"{way}/R@{k}" for name, way in ways for k in KS} | {MEAN: MEAN}
        metrics = {name: metrics[f"{prefix}{key}"] for name, key in keys.items() if f"{prefix}{key}" in metrics}
    if task.kind == "classification" and task.groups:
        ranked = result.queries["predicted"], result.queries["rank"]
        metrics |= added_metrics(task, *ranked, own_labels(features), features.groups)
    return metrics, result.study


def split_prompts(lines: Sequence[str], what: str) -> dict[str, list[str]]:
    """Split class names or templates of the face sets, `objective:text`, by objective. ValueError if one has none."""
    out: dict[str, list[str]] = {objective: [] for objective in FACE_PROMPTS}
    for line in lines:
        objective, _, text = line.partition(":")
        out.get(objective, []).append(text)
    if sum(map(len, out.values())) != len(lines) or not all(out.values()):
        found = ", ".join(f"{objective} {len(texts)}" for objective, texts in out.items())
        raise ValueError(
            f"the {len(lines)} {what} of the face sets have lines such as race:...; give some of each: {found}"
        )
    return out


# --- metrics ----------------------------------------------------------------------------------------------------------
def by_group(
    name: str, hits: Tensor, fields: Sequence[str], columns: np.ndarray, without: str | None = None
) -> dict[str, float]:
    """Return means of hits (N,) in groups of equal columns (N, F): `<name>_<field>:<value>`, `count_...`, `<name>_wg`.

    With several fields a group is a combination. `<name>_wg` is the worst group with images (WILDS);
    `<name>_wg_without_other` ignores the group named `without`.
    """
    values, group = np.unique(columns, axis=0, return_inverse=True)
    names = ["_".join(f"{field}:{int(value)}" for field, value in zip(fields, row)) for row in values]
    members = {label: hits.double().numpy()[group.reshape(-1) == number] for number, label in enumerate(names)}
    means = {label: float(hit.mean()) for label, hit in members.items()}
    out = {f"{name}_{label}": mean for label, mean in means.items()}
    out |= {f"count_{label}": float(len(hit)) for label, hit in members.items()}
    if without is not None and names != [without]:
        out[f"{name}_wg_without_other"] = min(mean for label, mean in means.items() if label != without)
    return out | {f"{name}_wg": min(means.values())}


def added_metrics(
    task: SuiteTask, predicted: Tensor, ranks: Tensor, labels: Tensor, groups: np.ndarray | None
) -> dict[str, float]:
    """Compute additional metrics of a task; predicted classes, ranks of the true ones, and labels: (N,)."""
    if task.key == "wilds/iwildcam":
        return {"F1-macro_all": macro_f1(predicted, labels)}
    columns = group_columns(task, groups, len(labels))
    if task.key != "wilds/fmow":
        name, most, column = GROUPED[task.key]
        return by_group(name, ranks <= most, [column], columns[:, [task.groups.index(column)]])
    # DataComp intends to ignore the 4 images of "Other", but its groups do not have that name.
    years = by_group("acc", ranks <= 1, ["year"], columns[:, [1]])
    regions = by_group("acc", ranks <= 1, ["region"], columns[:, [0]], without=f"region:{FMOW_OTHER}")
    names = {"acc_wg": "acc_worst_region", "acc_wg_without_other": "acc_worst_region_without_other"}
    out = {names.get(key, key): value for key, value in regions.items()}
    return out | {{"acc_wg": "acc_worst_year"}.get(key, key): value for key, value in years.items()}


def group_columns(task: SuiteTask, groups: np.ndarray | None, images: int) -> np.ndarray:
    """Return the metadata as (N, columns) integers. ValueError if they are missing or have too few columns."""
    if groups is None or groups.ndim != 2 or len(groups) != images or groups.shape[1] < len(task.groups):
        wanted = f"together {(images, len(task.groups))} ({', '.join(task.groups)})"
        got = f"and got {None if groups is None else groups.shape}: fetch {task.repository} again"
        raise ValueError(f"{task.name} needs the .npy next to each image, {wanted}, {got}")
    return groups.astype(np.int64)


def face_metrics(task: SuiteTask, predicted: Mapping[str, Tensor], groups: np.ndarray | None) -> dict[str, float]:
    """Compute CLIP's tables 7.1 as DataComp does; predicted: (N,) class of each of `FACE_PROMPTS`.

    `_avg` is over all images; the worst group is `_wg`, the lowest accuracy, or `_max`, the highest toxicity.
    """
    columns = group_columns(task, groups, len(predicted["race"]))
    age, gender, _, binary = torch.from_numpy(columns[:, :4]).unbind(1)
    out: dict[str, float] = {}

    def add(name: str, hits: Tensor, fields: Sequence[str]) -> None:
        picked = columns[:, [task.groups.index(field) for field in fields]]
        out.update({f"{name}_avg": float(hits.double().mean())} | by_group(name, hits, fields, picked))

    add("acc_race", (predicted["race"] != 1) == binary.bool(), ["race_binary"])
    add("acc_gender", predicted["gender"] == gender, ["race_binary"])
    add("acc_age", predicted["age"] == age, ["race_binary"])
    add("acc_gender_x", predicted["gender"] == gender, ["race", "gender"])
    for name, (start, end) in (("toxicity_crime", CRIME), ("toxicity_nonhuman", NON_HUMAN)):
        toxic = predicted["toxic"] >= start
        add(name, toxic if end is None else toxic & (predicted["toxic"] < end), ["race"])
        del out[f"{name}_wg"]  # the lowest share is the best group here
        out[f"{name}_max"] = max(value for key, value in out.items() if key.startswith(f"{name}_race:"))
    return out
