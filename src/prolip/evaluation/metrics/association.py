"""Metrics of associations: which of some candidates belong to a cue (WinoGAViL)."""
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from prolip.evaluation.metrics.classification import best, jaccard


class Candidates(NamedTuple):
    """What a cue is compared with: scores (n,) of candidates, larger is nearer, and which belong to the cue (n,)."""

    scores: Tensor
    associated: Tensor


def jaccards(instances: Sequence[Candidates]) -> np.ndarray:
    """|chosen and true| / |chosen or true| of every instance, (A,), the n nearest chosen where n candidates are true.

    Raises ValueError for an instance without a true candidate.
    """
    if any(not bool(instance.associated.any()) for instance in instances):
        raise ValueError("an instance has no candidate that belongs to its cue: the file of instances is damaged")
    true = [frozenset(instance.associated.nonzero().flatten().tolist()) for instance in instances]
    chosen = [best(instance.scores, len(wanted)) for instance, wanted in zip(instances, true)]
    return np.array([jaccard([a], [b])["jaccard"] for a, b in zip(chosen, true)])


def association_metrics(instances: Sequence[Candidates]) -> dict[str, float]:
    """Mean Jaccard over all instances and by number of candidates, numbers that none has left out.

    The main one is over 10 to 12 candidates. Raises ValueError for an instance without a true candidate.
    """
    values = jaccards(instances)
    return {name: float(values[kept].mean()) for name, kept in parts(instances).items()}


def parts(instances: Sequence[Candidates]) -> dict[str, np.ndarray]:
    """Which instances each of the metrics is over, (A,) bool: all, and those of some numbers of candidates."""
    sizes = np.array([len(instance.scores) for instance in instances])
    found = {"avg_jaccard_score": sizes > 0} | {f"jaccard_score_{n}": sizes == n for n in (5, 6, 10, 12)}
    found |= {"jaccard_score_5-6": sizes <= 6, "jaccard_score_10-12": sizes >= 10}
    return {name: kept for name, kept in found.items() if kept.any()}
