"""Measures between diagonal Gaussians (specified with their sources in each docstring).

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
    csd,
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
    pairwise_csd,
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
    "csd": Measure(csd, pairwise_csd, False),
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
    """The entry of MEASURES; an unknown name raises ValueError with the near ones."""
    if name not in MEASURES:
        known = f"known are {', '.join(MEASURES)}"
        raise ValueError(f"measure {name!r} is unknown: {did_you_mean(name, MEASURES, known)}")
    return MEASURES[name]


__all__ = [
    "MEASURES",
    "WORKSPACE",
    "Measure",
    "bhattacharyya",
    "csd",
    "csd_similarity",
    "elk",
    "get_measure",
    "inclusion_test",
    "inclusion_test_per_dim",
    "js",
    "kl",
    "log_inclusion",
    "log_match_probability",
    "match_probability",
    "mean_cosine",
    "pairwise_bhattacharyya",
    "pairwise_csd",
    "pairwise_csd_similarity",
    "pairwise_elk",
    "pairwise_inclusion_test",
    "pairwise_js",
    "pairwise_kl",
    "pairwise_log_inclusion",
    "pairwise_log_match_probability",
    "pairwise_match_probability",
    "pairwise_mean_cosine",
    "pairwise_wasserstein2",
    "wasserstein2",
]
