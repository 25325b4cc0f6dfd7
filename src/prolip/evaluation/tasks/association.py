"""Cues with candidate images, of which some belong to the cue (WinoGAViL)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from prolip.evaluation.datasets.base import DamagedData, Dataset
from prolip.evaluation.embed import Features
from prolip.evaluation.metrics import as_array
from prolip.evaluation.metrics.bootstrap import Statistic, mean_of
from prolip.evaluation.metrics.study import Samples, Study
from prolip.evaluation.tasks.base import Scored, Task, match_reliability, text_gaussians, uncertainty_of
from prolip.scores import Score


class Candidates(NamedTuple):
    """Candidates of a cue: scores (n,), larger is nearer, those that belong to it (n,), and places of both (n,)."""

    scores: Tensor
    associated: Tensor
    images: Tensor = torch.empty(0)
    cues: Tensor = torch.empty(0)


def jaccards(instances: Sequence[Candidates]) -> np.ndarray:
    """Return |chosen and true| / |chosen or true| of every instance, (A,), for n nearest chosen if n are true."""
    values = []
    for scores, associated, *_ in instances:
        true = set(associated.nonzero().flatten().tolist())
        if not true:
            raise ValueError("an instance has no candidate that belongs to its cue: fetch the file of instances again")
        chosen = set(np.argsort(-as_array(scores, np.float64), kind="stable")[: len(true)].tolist())
        values.append(len(chosen & true) / len(chosen | true))
    return np.array(values)


def parts(instances: Sequence[Candidates]) -> dict[str, np.ndarray]:
    """Return the instances of each metric, (A,) bool: all, and those with some numbers of candidates."""
    sizes = np.array([len(instance.scores) for instance in instances])
    found = {"avg_jaccard_score": sizes > 0} | {f"jaccard_score_{n}": sizes == n for n in (5, 6, 10, 12)}
    found |= {"jaccard_score_5-6": sizes <= 6, "jaccard_score_10-12": sizes >= 10}
    return {name: kept for name, kept in found.items() if kept.any()}


def texts(features: Features) -> tuple[list[str], None]:
    """Return the cues in DataComp's form: in lower case after "A" or, before a vowel, "An"."""
    cues = [instance.cue.lower() for instance in features.dataset.associations]
    return [f"{'An' if cue.startswith(tuple('aeiou')) else 'A'} {cue}" for cue in cues], None


def names(dataset: Dataset) -> list[str]:
    """Return the metric names for the numbers of candidates in the data."""
    return list(parts([Candidates(torch.zeros(len(one.images)), torch.empty(0)) for one in dataset.associations]))


def score_candidates(features: Features, score: Score) -> Iterator[Candidates]:
    """Score the candidates of each cue. DamagedData if a candidate's image was left out."""
    row = {key: i for i, key in enumerate(features.keys)}
    text = text_gaussians(features)
    for number, instance in enumerate(features.dataset.associations):
        missing = [key for key in instance.images if key not in row]
        if missing:
            raise DamagedData(f"the cue {instance.cue!r} has candidates that were left out: {', '.join(missing)}")
        rows = torch.tensor([row[key] for key in instance.images])
        scores = score.pairwise(features.image.select(rows), text.select(slice(number, number + 1))).squeeze(1)
        true = torch.tensor([key in instance.associated for key in instance.images])
        yield Candidates(scores, true, rows, torch.full_like(rows, number))


def statistics_of(scored: Sequence[Candidates]) -> dict[str, Statistic]:
    """Return mean Jaccard of all instances and by candidates' number. ValueError without a true candidate."""
    values = jaccards(scored)
    return {name: mean_of(np.where(kept, values, np.nan), "cues") for name, kept in parts(scored).items()}


def score_task(features: Features, score: Score, study: bool = False) -> Scored:
    """Return mean Jaccard by number of candidates; the study refuses 1 - Jaccard by best score and the cue's trace."""
    scored, found = list(score_candidates(features, score)), None
    if study:
        uncertainties: dict[str, np.ndarray | Tensor] = {"score": np.array([-float(x.scores.max()) for x in scored])}
        if features.model.probabilistic and features.text is not None:
            uncertainties["text"] = uncertainty_of(features)(features.text)
        samples = {"refusal": Samples.of(1 - jaccards(scored), uncertainties)}
        found = Study(samples, match_reliability(scored, features, score))
    return Scored(statistics_of(scored), study=found)


TASK = Task("jaccard_score_10-12", texts, names, score_task)
