"""Whether a model finds its pairs more often than chance would."""

from __future__ import annotations

import logging
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

warn_once = cache(logging.getLogger(__name__).warning)  # logs a warning, the same one only once in a process
PAIRS = 256  # pairs that decide whether a model knows some data


def is_at_chance(hits: int, pairs: int, candidates: int) -> bool:
    """Whether `hits` of `pairs` queries, each with one match among `candidates`, show nothing better than chance.

    Chance alone then gives as many hits or more with a probability of at least 2.5% (Clopper-Pearson).
    """
    if not (0 <= hits <= pairs and pairs >= 1 and candidates >= 1):
        remedy = "give 0 <= hits <= pairs, at least one pair and one candidate"
        raise ValueError(f"{hits} hits of {pairs} pairs among {candidates} candidates: {remedy}")
    from scipy.special import bdtrc  # late: most users of a measure need none of it

    return hits == 0 or bool(bdtrc(hits - 1, pairs, 1 / candidates) >= 0.025)


class OwnFirst(NamedTuple):
    """How many images rank their own text first among distinct candidates."""

    hits: int
    pairs: int
    candidates: int

    @classmethod
    def of(cls, scores: Tensor, own: Tensor) -> OwnFirst:
        """Of scores (N, C) and each image's own candidate (N,): counts over at most PAIRS of the rows."""
        rows = evenly(len(own))
        return cls(int((scores[rows].argmax(1) == own[rows]).sum()), len(rows), scores.shape[1])

    @property
    def at_chance(self) -> bool:
        """Whether chance finds as many; False with a single candidate."""
        return self.candidates > 1 and is_at_chance(*self)

    def __str__(self) -> str:
        known = ": it does not know this data" if self.at_chance else ""
        hits, chance = self.hits / self.pairs, 1 / self.candidates
        return f"the model finds its own caption first in {hits:.1%} (chance {chance:.1%}){known}"


def evenly(rows: int) -> Tensor:
    """PAIRS rows evenly spread over so many, or all of fewer: int64."""
    return torch.linspace(0, rows - 1, min(rows, PAIRS)).long()
