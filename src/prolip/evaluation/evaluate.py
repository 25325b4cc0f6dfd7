"""Evaluation of one model on several data sets by several similarities: features, metrics, uncertainty, comparison."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from prolip.embedder import Embedder
from prolip.evaluation.cache import slug
from prolip.evaluation.datasets import coco_labels as coco
from prolip.evaluation.datasets.base import Dataset
from prolip.evaluation.embed import EVERY, Features
from prolip.evaluation.prompts import check_prompts, fit_prompts
from prolip.evaluation.table import compare_results, harmonic_means
from prolip.evaluation.task import TaskResult, compute_features, evaluate_dataset, study_features
from prolip.evaluation.tasks.base import pair_scores
from prolip.prompts.templates import PromptRule, Prompts
from prolip.utils.outputs import replacing

log = logging.getLogger(__name__)


def embed_datasets(
    datasets: Sequence[Dataset],
    embedder: Embedder,
    prompts: Prompts = EVERY,
    pool: Dataset | None = None,
    **options: Any,
) -> Iterator[Features]:
    """The features of each data set in turn.

    pool: images that prompts are fitted to for all of them, where they have a rule for it; options: of
    `compute_features`. ValueError for prompts that do not fit a set, before the first one is embedded.
    """
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
    draws: int = 0,
    confusion: bool = False,
    instances: str | None = None,
    study: bool = False,
    plots: str | Path | None = None,
    output: str | Path | None = None,
) -> list[TaskResult]:
    """A result for each data set and similarity, in this order.

    draws: of the bootstrap; with them results of one data set are compared to its first. confusion: counts of true and
    predicted classes. instances: COCO's file of this name, for PMRP. study: refusal and calibration; plots: a folder
    for their figures. output: a JSON file, written after each data set.
    """
    results: list[TaskResult] = []
    drawn: set[str] = set()
    for found in features:
        categories = categories_of(found, instances)
        for similarity in similarities:
            result = evaluate_dataset(found.dataset, found, similarity, confusion=confusion, draws=draws)
            if categories is not None:
                assert found.owners is not None
                scores = pair_scores(found, found.model.scored_by(similarity))
                matches = coco.plausible(scores, categories, found.owners)
                result.metrics.update({name: value for name, value in matches.items() if "/PMRP" in name})
            results.append(with_uncertainty(result, found, plots, drawn) if study or plots else result)
        if draws:
            compare_results(results, draws)
        harmonic_means(results, draws)
        if output:
            text = json.dumps([result.to_dict() for result in results], indent=1, allow_nan=False)
            with replacing(Path(output)) as temporary:
                temporary.write_text(text, encoding="utf-8")
    return results


def categories_of(features: Features, instances: str | None) -> Tensor | None:
    """What each image of COCO shows, (N, 80); None, which the log says, where the file does not list these images."""
    image_ids = features.dataset.info.get("image_ids")
    if instances is None or image_ids is None:
        return None
    try:
        return coco.category_labels(instances, image_ids)
    except ValueError as error:
        log.warning("%s has no PMRP: %s", features.dataset.name, error)
        return None


def with_uncertainty(result: TaskResult, features: Features, plots: str | Path | None, drawn: set[str]) -> TaskResult:
    """The result with the figures of `Study` beside its metrics, and its plots where there is a folder for them.

    drawn: names of plots that other results of this command have, which are not overwritten.
    """
    similarity = result.info["similarity"]
    study = study_features(features, similarity)
    if plots:
        card = features.model
        model = card.name if card.precision == "fp32" else f"{card.name}-{card.precision}"
        name = slug(f"{result.key}-{model}-{similarity}")
        name = f"{name}-{result.info['task'][:6]}" if name in drawn else name
        drawn.add(name)
        from prolip.evaluation.plots import write_plots  # late: only plots need matplotlib

        write_plots(study, result.key, Path(plots) / name)
    info = result.info | ({"too_large_for": list(study.too_large_for)} if study.too_large_for else {})
    return replace(result, metrics=result.metrics | study.metrics(), info=info)
