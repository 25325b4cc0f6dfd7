"""Evaluate models on data sets: embeddings, then metrics, intervals and a study of uncertainty by any score."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from sklearn.metrics import confusion_matrix
from torch import Tensor

from prolip.embedder import Embedder
from prolip.evaluation.cache import FeatureStore, slug
from prolip.evaluation.datasets import coco_labels as coco
from prolip.evaluation.datasets.base import Dataset
from prolip.evaluation.embed import EVERY, Features, image_features, stored_texts, task_description, task_key, text_key
from prolip.evaluation.metrics import bootstrap
from prolip.evaluation.metrics.bootstrap import Statistic
from prolip.evaluation.metrics.study import Study
from prolip.evaluation.prompts import check_prompts, fit_prompts
from prolip.evaluation.tasks import TASKS
from prolip.evaluation.tasks.base import own_labels, pair_scores
from prolip.gaussian import Gaussian, mixture
from prolip.prompts.templates import ALL, BY_IMAGES, PromptRule, Prompts
from prolip.scores import Similarity
from prolip.utils.outputs import replacing

log = logging.getLogger(__name__)

#: The test sets of a few-shot task.
PARTS = ("base", "novel")


@dataclass(frozen=True)
class TaskResult:
    """The metrics of one task; fields with compare=False are neither compared nor written."""

    key: str
    metrics: dict[str, float]
    main_metric: str  # one of their names
    info: dict[str, Any] = field(default_factory=dict)  # JSON values: the run and the samples left out
    statistics: dict[str, Statistic] = field(default_factory=dict, compare=False, repr=False)
    study: Study | None = field(default=None, compare=False, repr=False)  # if requested
    queries: dict[str, Tensor] = field(default_factory=dict, compare=False, repr=False)  # as `tasks.base.Scored`

    @property
    def value(self) -> float:
        """The main metric."""
        return self.metrics[self.main_metric]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values; non-finite numbers are null."""
        finite = {name: value if math.isfinite(value) else None for name, value in self.metrics.items()}
        return {"key": self.key, "metrics": finite, "main_metric": self.main_metric, "info": self.info}


def compute_features(
    dataset: Dataset, embedder: Embedder, store: FeatureStore | None = None, *, prompts: Prompts = EVERY, **options: Any
) -> Features:
    """Embed images and texts of a data set, or read them from the store.

    prompts: the rule for the prompts of a class, or their weights; options: `batch_size` of images, default 256,
    `workers` (decoding threads), and `progress`, True for a bar. DamagedData for a damaged sample (unless
    `dataset.damage` counts them), ValueError for a set without images and for prompts of another set.
    """
    check_prompts(prompts, dataset, embedder.card)
    store = store or FeatureStore()
    features = image_features(dataset, embedder, store, **options)
    texts, counts = TASKS[dataset.kind].texts(features)
    key = text_key(texts, counts, embedder.card, prompts)
    if isinstance(prompts, PromptRule) and prompts.way in BY_IMAGES:
        each = Gaussian(*(x.unflatten(0, (len(dataset.classnames), -1)) for x in embedder.embed_texts(texts)))
        features = replace(features, text=mixture(each), prompts=each, rule=prompts)  # not stored
    else:
        features = replace(features, text=stored_texts(texts, counts, embedder, store, prompts))
    info = features.dataset.info | ({} if prompts.way == ALL else {"prompts": str(prompts)})
    features = replace(features, text_key=key, dataset=replace(features.dataset, info=info))
    if features.prompts is not None:
        return features
    if not features.damaged:
        store.write_task(dataset.name, task_key(features), task_description(features))
    elif store.folder is not None:
        log.warning("the features of %s are not saved in %s: damaged samples were left out", dataset.name, store.folder)
    return features


def evaluate_dataset(
    dataset: Dataset,
    source: Embedder | Features,
    similarity: Similarity = None,
    *,
    confusion: bool = False,
    draws: int = 0,
    study: bool = False,
    **options: Any,
) -> TaskResult:
    """Compute the metrics of a data set by a model or by its features.

    similarity: a score or its name, default: the method's score; a deterministic model accepts scores of points only;
    confusion: adds the matrix of counts to `info`, rows the true class; draws: of the bootstrap, whose 95% intervals
    are `info["intervals"]`, 0: none; study: fills `TaskResult.study`; options: of `compute_features`. ValueError for
    data that cannot be scored and DamagedData for a damaged set.
    """
    started = time.perf_counter()
    card = source.card if isinstance(source, Embedder) else source.model
    score = card.scored_by(similarity)
    features = compute_features(dataset, source, **options) if isinstance(source, Embedder) else source
    task = TASKS[dataset.kind]
    scored = task.score(features, score, study)
    metrics, info = scored.metrics, dict(scored.info)
    if confusion and "predicted" in scored.queries:
        labels, predicted = own_labels(features).numpy(), scored.queries["predicted"].numpy()
        info["confusion"] = confusion_matrix(labels, predicted, labels=range(info["classes"])).tolist()
    if draws:
        found = bootstrap.intervals(scored.statistics, draws)
        info["intervals"] = {name: [interval.low, interval.high] for name, interval in found.items()}
    info |= {"model": asdict(card), "similarity": score.name, "images": len(features.keys), "source": dataset.source}
    info["task"] = task_key(features)
    if "prompts" in features.dataset.info:
        info.setdefault("prompts", features.dataset.info["prompts"])
    if features.damaged:
        info["damaged"] = features.damaged
    info["seconds"] = round(time.perf_counter() - started, 2)
    main = task.main if task.main in metrics else next(iter(metrics))
    return TaskResult(dataset.name, metrics, main, info, scored.statistics, scored.study, scored.queries)


def study_features(features: Features, similarity: Similarity = None) -> Study:
    """Study how well uncertainty predicts errors, and how well probabilities are calibrated, on any task.

    Error of a query: the wrong class, no match in first place (by the most complete labels), 1 - average precision
    of an image's classes, 1 - Jaccard of a cue. ValueError if the set has no labels.
    """
    scored = TASKS[features.dataset.kind].score(features, features.model.scored_by(similarity), True)
    assert scored.study is not None
    return scored.study


def embed_datasets(
    datasets: Sequence[Dataset],
    embedder: Embedder,
    prompts: Prompts = EVERY,
    pool: Dataset | None = None,
    **options: Any,
) -> Iterator[Features]:
    """Yield the features of each data set; pool: images to fit the prompts of all sets to, if the rule fits them."""
    for dataset in datasets:
        check_prompts(prompts, dataset, embedder.card)
    for dataset in datasets:
        own = prompts
        if pool is not None and isinstance(prompts, PromptRule) and prompts.fit is not None:
            own = fit_prompts(pool, embedder, prompts.fit, dataset.templates, **options)
        yield compute_features(dataset, embedder, prompts=own, **options)


def evaluate_all(
    features: Iterable[Features],
    similarities: Sequence[str | None] = (None,),
    *,
    instances: str | None = None,
    plots: str | Path | None = None,
    output: str | Path | None = None,
    **shown: Any,
) -> list[TaskResult]:
    """Return a result for each data set and similarity; with draws, compare results of one data set to its first.

    instances: COCO's file of this name, for PMRP. plots: a folder. output: a JSON file, written after each data set.
    shown: options of `evaluate_dataset`.
    """
    results, drawn, draws = list[TaskResult](), set[str](), shown.get("draws", 0)
    for found in features:
        categories, card, image_ids = None, found.model, found.dataset.info.get("image_ids")
        if instances is not None and image_ids is not None:
            try:
                categories = coco.category_labels(instances, image_ids)  # (N, 80)
            except ValueError as error:
                log.warning("%s has no PMRP: %s", found.dataset.name, error)
        for similarity in similarities:
            result = evaluate_dataset(found.dataset, found, similarity, **shown)
            if categories is not None:
                assert found.owners is not None
                matches = coco.plausible(pair_scores(found, card.scored_by(similarity)), categories, found.owners)
                result.metrics.update({name: value for name, value in matches.items() if "/PMRP" in name})
            if result.study is not None:
                result.metrics.update(result.study.metrics())
                result.info.update({"too_large_for": list(lost)} if (lost := result.study.too_large_for) else {})
            if result.study is not None and plots:
                from prolip.evaluation.plots import write_plots  # imported late: only plots need matplotlib

                model = card.name if card.precision == "fp32" else f"{card.name}-{card.precision}"
                name = slug(f"{result.key}-{model}-{result.info['similarity']}")
                name = f"{name}-{result.info['task'][:6]}" if name in drawn else name
                drawn.add(name)
                write_plots(result.study, result.key, Path(plots) / name)
            results.append(result)
        if draws:
            compare_results(results, draws)
        add_harmonic_means(results, draws)
        if output:
            text = json.dumps([result.to_dict() for result in results], indent=1, allow_nan=False)
            with replacing(Path(output)) as temporary:
                temporary.write_text(text, encoding="utf-8")
    return results


def compare_results(results: Sequence[TaskResult], draws: int) -> None:
    """Set `info["difference"]` of each result to its difference from the first over the same queries."""
    first: dict[tuple[str, str], TaskResult] = {}
    for result in results:
        base = first.setdefault((result.key, result.info["source"]), result)
        both = [(one, result.statistics[name]) for name, one in base.statistics.items() if name in result.statistics]
        if base is result or "difference" in result.info or not all(one.same_queries(other) for one, other in both):
            continue
        found = bootstrap.paired(base.statistics, result.statistics, draws)
        to = {"model": base.info["model"]["name"], "similarity": base.info["similarity"]}
        result.info["difference"] = {"to": to, "metrics": {name: list(interval) for name, interval in found.items()}}


def parts_of(results: Sequence[TaskResult]) -> dict[tuple, dict[str, TaskResult]]:
    """Group results on base and novel classes by folder, model, fingerprint, precision, score and prompts."""
    sets: dict[tuple, dict[str, TaskResult]] = {}
    for result in results:
        folder, _, part = result.info["source"].rstrip("/").rpartition("/")
        if part in PARTS and "acc1" in result.statistics:
            card = result.info["model"]
            way = (card["precision"], result.info["similarity"], result.info.get("prompts", ""))
            sets.setdefault((folder, card["name"], card["fingerprint"], *way), {})[part] = result
    return {key: both for key, both in sets.items() if len(both) == len(PARTS)}


def add_harmonic_means(results: Sequence[TaskResult], draws: int = 0) -> None:
    """Set `info["harmonic_mean"]` of results on base and novel classes (VACSR, Table 4), with its interval."""
    for both in parts_of(results).values():
        found = {}
        if all("harmonic_mean" in result.info for result in both.values()):
            continue
        for name in ("acc1", "mean_per_class_recall"):
            h = bootstrap.harmonic_mean_of(*(bootstrap.drawn_as(part, both[part].statistics[name]) for part in PARTS))
            found[name] = [h.value, *(bootstrap.intervals({"": h}, draws)[""][1:] if draws else [])]
        for result in both.values():
            result.info["harmonic_mean"] = found
