"""Cues, each with some candidate images of which some belong to it (WinoGAViL)."""
from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from prolip.evaluation.datasets.base import DamagedData, Dataset
from prolip.evaluation.features import Features
from prolip.evaluation.kinds.base import Kind, TaskMetrics, match_reliability, text_gaussians, uncertainty_of
from prolip.evaluation.metrics.association import Candidates, association_metrics, jaccards, parts
from prolip.evaluation.metrics.bootstrap import mean_of
from prolip.evaluation.metrics.study import Study, study_errors
from prolip.scores import Score


def texts(features: Features) -> tuple[list[str], None]:
    """The cues, as DataComp asks them."""
    return [cue_prompt(instance.cue) for instance in features.dataset.associations], None


def cue_prompt(cue: str) -> str:
    """The text of a WinoGAViL cue, in lower case behind "A" or, before a vowel, "An"."""
    cue = cue.lower()
    return f"{'An' if cue.startswith(tuple('aeiou')) else 'A'} {cue}"


def names(dataset: Dataset) -> list[str]:
    """Of the numbers of candidates that there are."""
    blank = [
        Candidates(torch.zeros(len(one.images)), torch.tensor([key in one.associated for key in one.images]))
        for one in dataset.associations
    ]
    return list(association_metrics(blank))


def score_candidates(features: Features, score: Score) -> Iterator[Candidates]:
    """The candidates' scores against each cue. DamagedData where a candidate's image was left out."""
    row = {key: i for i, key in enumerate(features.keys)}
    text = text_gaussians(features)
    for number, instance in enumerate(features.dataset.associations):
        missing = [key for key in instance.images if key not in row]
        if missing:
            raise DamagedData(f"the cue {instance.cue!r} has candidates that were left out: {', '.join(missing)}")
        candidates = features.image.select([row[key] for key in instance.images])
        scores = score.pairwise(candidates, text.select(slice(number, number + 1))).squeeze(1)
        yield Candidates(scores, torch.tensor([key in instance.associated for key in instance.images]))


def evaluate(features: Features, score: Score, confusion: bool = False) -> TaskMetrics:
    """`metrics.association.association_metrics`."""
    scored = list(score_candidates(features, score))
    values = jaccards(scored)
    statistics = {name: mean_of(np.where(kept, values, np.nan), "cues") for name, kept in parts(scored).items()}
    return TaskMetrics(association_metrics(scored), {}, statistics)


def study(features: Features, score: Score) -> Study:
    """Error: 1 - Jaccard of a cue."""
    return study_candidates(list(score_candidates(features, score)), features, score)


def study_candidates(scored: list[Candidates], features: Features, score: Score) -> Study:
    """The same of scores that are there.

    Refused by the negative of the best candidate's score, and by the cue's uncertainty. `calibration/match`: each cue
    with all its candidates.
    """
    uncertainties: dict[str, np.ndarray | Tensor] = {"score": np.array([-float(x.scores.max()) for x in scored])}
    if features.model.probabilistic and features.text is not None:
        uncertainties["text"] = uncertainty_of(features)(features.text)
    scores, true = (torch.cat(column) for column in zip(*scored))
    found = match_reliability(scores, true, score)
    return study_errors(1 - jaccards(scored), uncertainties)._replace(reliability=found)


KIND = Kind("jaccard_score_10-12", texts, names, evaluate, study)
