"""Measures between diagonal Gaussians; each docstring gives the formula and its source.

Every measure is a paired function f(p, q) -> (...), leading dimensions broadcast, and a pairwise function
pairwise_f(p, q) with (B1, D), (B2, D) -> (B1, B2). `MEASURES` lists those that rank candidates by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from prolip.measures.matching import (
    log_match_probability,
    match_probability,
    pairwise_log_match_probability,
    pairwise_match_probability,
)
from prolip.measures.paired import (
    bhattacharyya,
    csd_distance,
    csd_similarity,
    elk,
    inclusion_test,
    inclusion_test_per_dim,
    js,
    kl,
    log_inclusion,
    mean_cosine,
    wasserstein2,
)
from prolip.measures.pairwise import (
    WORKSPACE,
    pairwise_bhattacharyya,
    pairwise_csd_distance,
    pairwise_csd_similarity,
    pairwise_elk,
    pairwise_inclusion_test,
    pairwise_js,
    pairwise_kl,
    pairwise_log_inclusion,
    pairwise_mean_cosine,
    pairwise_wasserstein2,
)
from prolip.utils.flags import did_you_mean


class Measure(NamedTuple):
    """A measure in both shapes, and whether larger means nearer (a similarity) or farther (a distance)."""

    paired: Callable[..., Tensor]
    pairwise: Callable[..., Tensor]
    is_similarity: bool

    def pairwise_scores(self, p, q, **options) -> Tensor:
        """The pairwise values with the sign that makes larger nearer, to rank by: (B1, D), (B2, D) -> (B1, B2)."""
        values = self.pairwise(p, q, **options)
        return values if self.is_similarity else -values


#: What f(p, q) alone can compute; match_probability needs a trained scale and bias, so it is bound where they are.
MEASURES = {
    "csd_distance": Measure(csd_distance, pairwise_csd_distance, False),
    "csd_similarity": Measure(csd_similarity, pairwise_csd_similarity, True),
    "mean_cosine": Measure(mean_cosine, pairwise_mean_cosine, True),
    "wasserstein2": Measure(wasserstein2, pairwise_wasserstein2, False),
    "kl": Measure(kl, pairwise_kl, False),
    "js": Measure(js, pairwise_js, False),
    "elk": Measure(elk, pairwise_elk, False),
    "bhattacharyya": Measure(bhattacharyya, pairwise_bhattacharyya, False),
    "log_inclusion": Measure(log_inclusion, pairwise_log_inclusion, True),
    "inclusion_test": Measure(inclusion_test, pairwise_inclusion_test, True),
}


def get_measure(name: str) -> Measure:
    """The entry of MEASURES. Raises ValueError with similar names for an unknown one."""
    if name not in MEASURES:
        known = f"known are {', '.join(MEASURES)}"
        raise ValueError(f"measure {name!r} is unknown: {did_you_mean(name, MEASURES, known)}")
    return MEASURES[name]


__all__ = ["MEASURES", "WORKSPACE", "Measure", "get_measure", "inclusion_test_per_dim"]
__all__ += ["bhattacharyya", "csd_distance", "csd_similarity", "elk", "inclusion_test", "js", "kl", "log_inclusion"]
__all__ += ["log_match_probability", "match_probability", "mean_cosine", "wasserstein2"]
__all__ += ["pairwise_bhattacharyya", "pairwise_csd_distance", "pairwise_csd_similarity", "pairwise_elk", "pairwise_js"]
__all__ += ["pairwise_inclusion_test", "pairwise_kl", "pairwise_log_inclusion", "pairwise_log_match_probability"]
__all__ += ["pairwise_match_probability", "pairwise_mean_cosine", "pairwise_wasserstein2"]
