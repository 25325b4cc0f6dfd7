"""Comparison of a model's retrieval with chance."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

warn_once = cache(logging.getLogger(__name__).warning)  # logs a warning, the same one only once in a process
PAIRS = 256  # most pairs that are compared


def is_at_chance(hits: int, pairs: int, candidates: int) -> bool:
    """Return True if `hits` of `pairs` queries, each with one match among `candidates`, are no better than chance.

    Chance then gives at least as many hits with a probability of at least 2.5% (Clopper-Pearson).
    """
    if not (0 <= hits <= pairs and pairs >= 1 and candidates >= 1):
        remedy = "use 0 <= hits <= pairs, at least one pair and one candidate"
        raise ValueError(f"invalid counts, {hits} hits of {pairs} pairs among {candidates} candidates: {remedy}")
    from scipy.special import bdtrc  # imported late: few callers need scipy

    return hits == 0 or bool(bdtrc(hits - 1, pairs, 1 / candidates) >= 0.025)


class OwnFirst(NamedTuple):
    """Counts of images that rank their own text first among distinct candidates."""

    hits: int
    pairs: int
    candidates: int

    @classmethod
    def of(cls, scores: Tensor, own: Tensor) -> OwnFirst:
        """Count at most PAIRS rows of scores (N, C), given each image's own candidate (N,)."""
        rows = evenly(len(own))
        return cls(int((scores[rows].argmax(1) == own[rows]).sum()), len(rows), scores.shape[1])

    @classmethod
    def read(cls, counts: Any) -> OwnFirst:
        """Return saved counts, or zeros for anything else in a file."""
        own = isinstance(counts, list) and len(counts) == 3 and all(type(x) is int for x in counts)
        return cls(*counts) if own and 0 <= counts[0] <= counts[1] >= 1 else cls(0, 0, 0)

    @property
    def at_chance(self) -> bool:
        """True if chance finds as many; False with a single candidate."""
        return self.candidates > 1 and is_at_chance(*self)

    def __str__(self) -> str:
        compared = f", {chance_remark(self.candidates)}" if self.at_chance else f" (chance {1 / self.candidates:.1%})"
        return f"the model finds an image's own caption first in {self.hits / self.pairs:.1%}{compared}"


def chance_remark(candidates: int) -> str:
    """Return the remark about a model at chance, the same in all commands."""
    return f"no better than chance ({1 / candidates:.1%}): check weights, captions and classes"


def evenly(rows: int) -> Tensor:
    """Return PAIRS evenly spaced rows of so many, or all of fewer, int64."""
    return torch.linspace(0, rows - 1, min(rows, PAIRS)).long()
