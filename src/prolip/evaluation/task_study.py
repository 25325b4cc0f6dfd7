"""What uncertainty is worth on a task: the `Study` of its features, whatever its kind, and its plots."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from prolip.evaluation.datacomp.scores import Association as Instance
from prolip.evaluation.datacomp.scores import jaccards
from prolip.evaluation.embed import Similarity
from prolip.evaluation.features import Features
from prolip.evaluation.metrics.blockwise import Relevance
from prolip.evaluation.metrics.calibration import LOG_ODDS, Reliability, match_probability, reliability
from prolip.evaluation.metrics.classification import average_precision
from prolip.evaluation.metrics.ranking import Ranking
from prolip.evaluation.metrics.selective import recall_auroc
from prolip.evaluation.study import Logit, Study, study_classification, study_errors, study_retrieval
from prolip.evaluation.task import instances, own_labels, pair_scores, relevance_of, score_blocks
from prolip.gaussian import Gaussian

NEIGHBOURS = 50_000
"""Images up to which R-AUROC is computed: it takes their square of scores."""


def study_features(features: Features, similarity: Similarity = None) -> Study:
    """What can be refused by, and how well probabilities are kept, on any task.

    Error of a query: the wrong class, no match in the first place (by the most complete labels), 1 - average precision
    of an image's classes, 1 - Jaccard of a cue. ValueError where the set has no labels.
    """
    kind = features.dataset.kind
    if kind == "retrieval":
        own, complete = relevance_of(features)
        study = retrieval_study(features, own if complete is None else complete, similarity)[2]
        return study._replace(extra=neighbour_figures(features))
    if kind == "association":
        return association_study(list(instances(features, similarity)), features, similarity)
    scores = torch.cat([block for _, block in score_blocks(features, similarity)])
    labels = own_labels(features)
    if kind == "multilabel":
        return multilabel_study(scores, labels, features, similarity)
    return class_study(scores, labels, features, features.text, similarity)


def class_study(
    scores: Tensor, labels: Tensor, features: Features, classes: Gaussian | None, similarity: Similarity
) -> Study:
    """Of a classification: scores (N, C), labels (N,)."""
    image, own = (features.image, classes) if features.model.probabilistic else (None, None)
    neighbours = len(labels) <= NEIGHBOURS
    return study_classification(scores, labels, image, own, logit_of(features, similarity), neighbours)


def neighbour_figures(features: Features) -> dict[str, float]:
    """`refusal/R-AUROC` and `refusal/1-NN` of captioned images that have classes too (CUB), {} of others."""
    labels = features.labels
    if labels is None or not features.model.probabilistic or not 1 < len(labels) <= NEIGHBOURS:
        return {}
    return {f"refusal/{key}": value for key, value in recall_auroc(features.image, labels).items()}


def multilabel_study(scores: Tensor, labels: Tensor, features: Features, similarity: Similarity) -> Study:
    """Of sets of labels (N, C), multi-hot. Refused by the negative of the best class's score, and by the image's trace.

    Images without any label have no precision, and are left out there. `calibration/match`: all images and classes.
    """
    error = 1 - average_precision(scores.mT, labels.mT)
    kept = ~np.isnan(error)
    uncertainties: dict[str, np.ndarray | Tensor] = {"score": -scores.amax(1)[kept]}
    if features.model.probabilistic:
        uncertainties["image"] = features.image.trace[kept]
    found = match_reliability(scores, labels, features, similarity)
    return study_errors(error[kept], uncertainties)._replace(reliability=found)


def retrieval_study(features: Features, relevance: Relevance, similarity: Similarity) -> tuple[Ranking, Ranking, Study]:
    """Of retrieval in both directions, with the rankings."""
    image, text = (features.image, features.text) if features.model.probabilistic else (None, None)
    return study_retrieval(pair_scores(features, similarity), relevance, image, text, logit_of(features, similarity))


def association_study(scored: list[Instance], features: Features, similarity: Similarity) -> Study:
    """Of WinoGAViL. Refused by the negative of the best candidate's score, and by the cue's trace.

    similarity: that of the scores. `calibration/match`: each cue with all its candidates.
    """
    uncertainties: dict[str, np.ndarray | Tensor] = {"score": np.array([-float(x.scores.max()) for x in scored])}
    if features.model.probabilistic and features.text is not None:
        uncertainties["text"] = features.text.trace
    scores, true = (torch.cat(column) for column in zip(*scored))
    found = match_reliability(scores, true, features, similarity)
    return study_errors(1 - jaccards(scored), uncertainties)._replace(reliability=found)


def match_reliability(
    scores: Tensor, true: Tensor, features: Features, similarity: Similarity
) -> dict[str, Reliability]:
    """`calibration/match` of pairs in any shape, {} where the model has no match probability by this similarity."""
    logit = logit_of(features, similarity)
    if logit is None or logit.bias is None:
        return {}
    probability = match_probability(scores, logit.scale, logit.bias).flatten()
    return {"calibration/match": reliability(probability, true.flatten(), LOG_ODDS)}


def logit_of(features: Features, similarity: Similarity) -> Logit | None:
    """What turns scores into match probabilities, for the score that the model was trained with."""
    score = features.model.scored_by(similarity)
    return None if score.scale is None else Logit(score.scale, score.bias)


def plot(study: Study, title: str, folder: Path) -> None:
    """FOLDER/*.png: risk by coverage, error by decile of uncertainty, reliability."""
    from matplotlib import pyplot

    from prolip.evaluation.plots import draw, save  # late: only plots need matplotlib

    for name, figure in draw(study, title).items():
        save(figure, folder / f"{name}.png")
        pyplot.close(figure)


__all__ = ["class_study", "logit_of", "plot", "study_features"]
