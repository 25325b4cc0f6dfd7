"""What an evaluation during a run has found."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # brings scipy, which runs without an evaluation need not load
    from prolip.evaluation.result import Result

#: What the figures of the averaged model begin with.
EMA = "ema/"


@dataclass
class Found:
    """Of one model, on the first rank: figures by name, what to tell the person, the corpus's whole result."""

    figures: dict[str, float] = field(default_factory=dict)
    headlines: list[str] = field(default_factory=list)
    corpus: Result | None = None


def figures(found: dict[str, Found]) -> dict[str, float]:
    """Name -> figure of the model, and ema/name -> figure of the averaged weights."""
    return {prefix + name: value for prefix, part in found.items() for name, value in part.figures.items()}
