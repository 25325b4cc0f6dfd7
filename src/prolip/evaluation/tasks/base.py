"""The parts of a task, and functions of features that several tasks share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from prolip.evaluation.datasets.base import Dataset
from prolip.evaluation.embed import Features
from prolip.evaluation.metrics.bootstrap import Statistic
from prolip.evaluation.metrics.calibration import EQUAL, LOG_ODDS, Matching, Reliability, reliability
from prolip.evaluation.metrics.selective import recall_auroc
from prolip.evaluation.metrics.streaming import PairScores
from prolip.evaluation.metrics.study import Study
from prolip.gaussian import Gaussian
from prolip.prompts.templates import class_prompts
from prolip.scores import Score

Metrics = dict[str, float]
#: Images up to which R-AUROC is computed, as its scores grow with their square.
NEIGHBOURS = 50_000


class Scored(NamedTuple):
    """The result of a task for `TaskResult`."""

    statistics: dict[str, Statistic]  # metrics that are functions of the queries
    others: Metrics = {}  # additional metrics, or all in their order
    info: dict[str, Any] = {}
    study: Study | None = None
    queries: dict[str, Tensor] = {}  # values by name, (N,), such as the predicted class of each image

    @property
    def metrics(self) -> Metrics:
        """All metrics by name, in the order of `others` if those are all."""
        return self.others | {name: one.value for name, one in self.statistics.items()}


class Task(NamedTuple):
    """One kind of task: its texts, its metrics with their names, and a study of its uncertainty."""

    main: str  # the metric to quote
    #: The texts to embed; the number per class, None: one text per item.
    texts: Callable[[Features], tuple[list[str], list[int] | None]]
    names: Callable[[Dataset], list[str]]  # names of the metrics, before they are computed
    score: Callable[[Features, Score, bool], Scored]  # True as the last argument adds a study


def class_texts(features: Features) -> tuple[list[str], list[int] | None]:
    """Return all prompts of the classes, and their number per class."""
    return class_prompts(features.dataset.classnames, features.dataset.templates)


def pair_scores(features: Features, score: Score) -> PairScores:
    """Return scores of images against texts, computed on demand."""
    return PairScores.from_gaussians(features.image, text_gaussians(features), score)


def score_matrix(features: Features, score: Score) -> Tensor:
    """Compute all scores at once, (images, texts)."""
    return torch.cat([block for _, block in pair_scores(features, score).blocks()])


def own_labels(features: Features) -> Tensor:
    """Return the labels. ValueError if the files have none."""
    if features.labels is None:
        why = f"{features.dataset.source} has no labels (.cls), only metadata (.npy)"
        raise ValueError(f"{why}: score face sets with prolip eval datacomp")
    return features.labels


def text_gaussians(features: Features) -> Gaussian:
    """Return the Gaussians of the texts. ValueError if only images were embedded."""
    if features.text is None:
        raise ValueError(f"the features of {features.dataset.name} have no texts: use compute_features")
    return features.text


def uncertainty_of(features: Features) -> Callable[[Gaussian], Tensor]:
    """Return the uncertainty of the model's method, also if another score ranks: (N, D) -> (N,)."""
    return features.model.scored_by().uncertainty


def study_parts(features: Features, score: Score) -> tuple[Any, ...]:
    """Return the arguments of `study_classification` and `study_retrieval` after the scores and their labels."""
    text, own, known = text_gaussians(features), features.model.scored_by(), features.model.probabilistic
    uncertainties = (own.uncertainty(z) if known else None for z in (features.image, text))

    def of_pairs(i: Tensor, j: Tensor) -> Tensor | None:
        return own.pair_uncertainty(features.image.select(i), text.select(j))

    return Matching.of(score, features.evidence, text), *uncertainties, of_pairs


def with_neighbours(study: Study, features: Features) -> Study:
    """Add `refusal/R-AUROC` and `refusal/1-NN` to a study, for at most NEIGHBOURS images with classes."""
    labels = features.labels
    if labels is None or not features.model.probabilistic or len(labels) < 2:
        return study
    if len(labels) > NEIGHBOURS:
        return study._replace(too_large_for=("refusal/R-AUROC", "refusal/1-NN"))
    found = recall_auroc(features.image, labels, uncertainty_of(features)(features.image))
    return study._replace(extra={f"refusal/{key}": value for key, value in found.items()})


def too_small_for(names: Sequence[str], metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `info` of metrics that were left out, {} for none."""
    absent = [name for name in names if name not in metrics]
    return {"too_small_for": absent} if absent else {}


def match_reliability(groups: Sequence[tuple[Tensor, ...]], features: Features, score: Score) -> dict[str, Reliability]:
    """Compute `calibration/match` of all pairs and `calibration/match_top1` of each query's best; {} if impossible.

    groups: of each query, scores of its pairs, True for matches, places of the image and of the text, (n,) each.
    """
    first = [int(scores.argmax()) for scores, *_ in groups]
    matches = Matching.of(score, features.evidence, text_gaussians(features))
    top = [torch.stack([x[i] for x, i in zip(column, first)]) for column in zip(*groups)]
    found = {}
    for name, columns, edges in ("match", map(torch.cat, zip(*groups)), LOG_ODDS), ("match_top1", top, EQUAL):
        scores, true, images, texts = columns
        if (probability := matches.pairs(images, texts, scores)) is not None:
            found[f"calibration/{name}"] = reliability(probability, true, edges)
    return found
