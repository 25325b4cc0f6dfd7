"""Whether a model finds its pairs more often than chance would."""
from __future__ import annotations

#: Of the two-sided Clopper-Pearson interval.
CONFIDENCE = 0.95


def is_at_chance(hits: int, pairs: int, candidates: int) -> bool:
    """Whether `hits` of `pairs` queries, each with one match among `candidates`, show nothing better than chance.

    The 95% Clopper-Pearson interval of hits / pairs then reaches down to 1 / candidates. Its lower end is at most that
    where chance alone gives as many hits or more with a probability of at least 2.5%. Raises ValueError for counts
    that do not fit.
    """
    if not (0 <= hits <= pairs and pairs >= 1 and candidates >= 1):
        raise ValueError(f"{hits} hits of {pairs} pairs among {candidates} candidates: give 0 <= hits <= pairs, at"
                         " least one pair and one candidate")
    from scipy.special import bdtrc  # late: most who import a measure need none of it

    if hits == 0:
        return True
    return bool(bdtrc(hits - 1, pairs, 1 / candidates) >= (1 - CONFIDENCE) / 2)
