"""Measures between diagonal Gaussians; each docstring gives the formula and its source.

Every measure is a paired function f(p, q) -> (...), leading dimensions broadcast, and a pairwise function
pairwise_f(p, q) with (B1, D), (B2, D) -> (B1, B2). `MEASURES` lists those that rank candidates by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from prolip.measures import matching, paired, pairwise
from prolip.measures.matching import *  # noqa: F403
from prolip.measures.paired import *  # noqa: F403
from prolip.measures.pairwise import *  # noqa: F403
from prolip.utils.flags import did_you_mean

__all__ = ["MEASURES", "Measure", "get_measure"]
__all__ += matching.__all__
__all__ += paired.__all__
__all__ += pairwise.__all__


class Measure(NamedTuple):
    """A paired and a pairwise function; is_similarity: larger is nearer, else the measure is a distance."""

    paired: Callable[..., Tensor]
    pairwise: Callable[..., Tensor]
    is_similarity: bool

    def pairwise_scores(self, p, q, **options) -> Tensor:
        """Return pairwise scores, larger is nearer: (B1, D), (B2, D) -> (B1, B2)."""
        values = self.pairwise(p, q, **options)
        return values if self.is_similarity else -values


SIMILARITIES = ("csd_similarity", "mean_cosine", "log_inclusion", "inclusion_test")
DISTANCES = ("csd_distance", "wasserstein2", "kl", "js", "elk", "bhattacharyya")
#: Measures of p and q alone. match_probability also needs a trained scale and bias, so its score binds it.
MEASURES = {
    name: Measure(getattr(paired, name), getattr(pairwise, f"pairwise_{name}"), name in SIMILARITIES)
    for name in (*DISTANCES, *SIMILARITIES)
}


def get_measure(name: str) -> Measure:
    """Return the entry of MEASURES. Raises ValueError with similar names for an unknown one."""
    if name not in MEASURES:
        known = f"known are {', '.join(MEASURES)}"
        raise ValueError(f"measure {name!r} is unknown: {did_you_mean(name, MEASURES, known)}")
    return MEASURES[name]
