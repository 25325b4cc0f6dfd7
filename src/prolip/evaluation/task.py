"""One task by one model: features, then metrics and a study of uncertainty by any score, in bounded memory.

Metrics are shares in [0, 1] by clip_benchmark's and DataComp's names where they have one: `acc1`, `acc5` (with five
classes or more), `mean_per_class_recall`; `mAP`; `i2t/R@1` ... `rsum` and `mean_recall@1`; `jaccard_score_10-12`. What
a set is too small for, as R@10 among nine images is always 1, is left out and named in `info["too_small_for"]`.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from prolip.embedder import Embedder
from prolip.evaluation.cache import FeatureStore
from prolip.evaluation.datasets.base import Dataset
from prolip.evaluation.embed import (
    EVERY,
    Features,
    image_features,
    stored_texts,
    task_description,
    task_key,
    text_key,
)
from prolip.evaluation.metrics import bootstrap
from prolip.evaluation.metrics.bootstrap import Statistic
from prolip.evaluation.metrics.study import Study
from prolip.evaluation.prompts import check_prompts
from prolip.evaluation.tasks import KINDS
from prolip.gaussian import Gaussian, mixture
from prolip.prompts.templates import ALL, BY_IMAGES, PromptRule, Prompts
from prolip.scores import Similarity

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TaskResult:
    """The metrics of one task, JSON-able. main_metric: one of their names; info: what was run and what was left out.

    statistics: the metrics as functions of the queries, for intervals of differences; they are not written.
    """

    key: str
    metrics: dict[str, float]
    main_metric: str
    info: dict[str, Any] = field(default_factory=dict)
    statistics: dict[str, Statistic] = field(default_factory=dict, compare=False, repr=False)

    @property
    def value(self) -> float:
        """The main metric."""
        return self.metrics[self.main_metric]

    def to_dict(self) -> dict[str, Any]:
        """JSON values; what is not finite is null."""
        finite = {name: value if math.isfinite(value) else None for name, value in self.metrics.items()}
        return {"key": self.key, "metrics": finite, "main_metric": self.main_metric, "info": self.info}


def compute_features(
    dataset: Dataset,
    embedder: Embedder,
    store: FeatureStore | None = None,
    batch_size: int = 256,
    workers: int | None = None,
    progress: bool = False,
    prompts: Prompts = EVERY,
) -> Features:
    """Images and texts of a data set through a model, or out of the store.

    prompts: which of a class's prompts it is made of, or how much each of them counts; workers: threads that decode
    images, default as many as cores but one, at most 16, none on a single core. Raises DamagedData where a sample is
    damaged (unless `dataset.damage` counts them) and ValueError for a set without images, and for prompts that cannot
    be chosen.
    """
    check_prompts(prompts, dataset, embedder.card)
    store = store or FeatureStore()
    features = image_features(dataset, embedder, store, batch_size, workers, progress)
    texts, counts = KINDS[dataset.kind].texts(features)
    key = text_key(texts, counts, embedder.card, prompts)
    if isinstance(prompts, PromptRule) and prompts.way in BY_IMAGES:
        each = Gaussian(*(x.unflatten(0, (len(dataset.classnames), -1)) for x in embedder.embed_texts(texts)))
        features = replace(features, text=mixture(each), prompts=each, rule=prompts)  # no file keeps them
    else:
        features = replace(features, text=stored_texts(texts, counts, embedder, store, prompts))
    features = replace(features, text_key=key)
    if prompts.way != ALL:
        info = features.dataset.info | {"prompts": str(prompts)}
        features = replace(features, dataset=replace(features.dataset, info=info))
    if features.prompts is not None:
        return features
    if not features.damaged:
        store.write_task(dataset.name, task_key(features), task_description(features))
    elif store.folder is not None:
        log.warning("the features of %s are not kept in %s: damaged samples were left out", dataset.name, store.folder)
    return features


def evaluate_dataset(
    dataset: Dataset,
    source: Embedder | Features,
    similarity: Similarity = None,
    confusion: bool = False,
    draws: int = 0,
    **options: Any,
) -> TaskResult:
    """The metrics of a data set by a model or by its features.

    similarity: a score or the name of one, default: that of the model's method; a deterministic model takes those of
    points alone; confusion: the matrix of counts in `info`, rows the true class; draws: of the bootstrap, whose 95%
    intervals are `info["intervals"]`, 0: none; options: of `compute_features`. Raises ValueError for what cannot be
    scored and DamagedData for a damaged set.
    """
    started = time.perf_counter()
    card = source.card if isinstance(source, Embedder) else source.model
    score = card.scored_by(similarity)
    features = compute_features(dataset, source, **options) if isinstance(source, Embedder) else source
    kind = KINDS[dataset.kind]
    metrics, info, statistics = kind.evaluate(features, score, confusion)
    main = kind.main if kind.main in metrics else next(iter(metrics))
    if draws:
        found = bootstrap.intervals(statistics, draws)
        info["intervals"] = {name: [interval.low, interval.high] for name, interval in found.items()}
    info |= {"model": asdict(card), "similarity": score.name, "images": len(features.keys), "source": dataset.source}
    info["task"] = task_key(features)
    if "prompts" in features.dataset.info:
        info.setdefault("prompts", features.dataset.info["prompts"])
    if features.damaged:
        info["damaged"] = features.damaged
    info["seconds"] = round(time.perf_counter() - started, 2)
    return TaskResult(dataset.name, metrics, main, info, statistics)


def study_features(features: Features, similarity: Similarity = None) -> Study:
    """What can be refused by, and how well probabilities are kept, on any task.

    Error of a query: the wrong class, no match in the first place (by the most complete labels), 1 - average precision
    of an image's classes, 1 - Jaccard of a cue. ValueError where the set has no labels.
    """
    return KINDS[features.dataset.kind].study(features, features.model.scored_by(similarity))
