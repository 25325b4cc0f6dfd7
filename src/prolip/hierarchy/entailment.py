"""Entailment: AUC of scores of "A is a kind of B" against each sort of negative, with intervals over concepts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np
from scipy.sparse import csr_matrix

from prolip.evaluation.metrics import bootstrap
from prolip.evaluation.metrics.bootstrap import Interval, Statistic
from prolip.hierarchy.scores import SCORES, Items, KindScore

#: Most numbers in a block of draws for all pairs.
ELEMENTS = 1 << 22
BLOCK = 4096
#: Relation, score, and negative or "mean".
Key = tuple[str, str, str]
TITLES = {"texts": "Is text A a kind of text B?", "images": "Is text B true of image A?"}


@dataclass(frozen=True)
class KindPairs:
    """P pairs (inner, outer) in which the first is a kind of the second, each with negatives."""

    inner: np.ndarray  # (P,) rows, like the next three
    outer: np.ndarray
    random: np.ndarray  # in place of the outer, -1: none
    sibling: np.ndarray
    levels: np.ndarray  # (P, 2), of inner and outer, indices into `names`
    names: tuple[str, ...]
    shares: csr_matrix  # (P, K), weights of a pair on the concepts of its inner, rows of sum 1
    found: int  # true pairs before any sampling
    negatives: tuple[str, ...] = ("random", "reversed", "sibling")

    def __len__(self) -> int:
        return len(self.inner)

    @property
    def with_sibling(self) -> int:
        """Number of pairs with a sibling."""
        return int((self.sibling >= 0).sum())


class Entailment(NamedTuple):
    """AUCs of one model with their intervals, as functions of the draws, and by pair of levels."""

    model: str
    auc: dict[Key, Interval]
    statistics: dict[Key, Statistic]
    by_level: dict[Key, float]

    def names(self, relation: str) -> list[str]:
        """Return the scores that were evaluated on a relation."""
        return [name for kind, name, negative in self.auc if kind == relation and negative == "mean"]

    def best(self, relation: str) -> str:
        """Return the score with the highest mean AUC."""
        return max(self.names(relation), key=lambda name: self.auc[relation, name, "mean"].value)


def entailment_of(  # noqa: PLR0913 (what is compared, and how)
    model: str,
    scores: Mapping[str, KindScore],
    text: Items,
    image: Items,
    pairs: Mapping[str, KindPairs],
    draws: int = 500,
) -> Entailment:
    """Compute AUCs of embeddings; pairs: by relation, `images` between rows of image and text, others between texts."""
    statistics: dict[Key, Statistic] = {}
    by_level: dict[Key, float] = {}
    for (relation, found), (name, score) in product(pairs.items(), scores.items()):
        inner = image if relation == "images" else text
        places = {
            "random": (inner, found.inner, text, found.random),
            "reversed": (text, found.outer, inner, found.inner),
            "sibling": (inner, found.inner, text, found.sibling),
        }
        positive = scores_of_rows(score, inner, found.inner, text, found.outer)
        negatives = {kind: scores_of_rows(score, *places[kind]) for kind in found.negatives}
        for kind, negative in negatives.items():
            statistics[relation, name, kind] = auc_of(positive, negative, found.shares)
        every = [(1 / len(negatives), statistics[relation, name, kind]) for kind in negatives]
        statistics[relation, name, "mean"] = bootstrap.combine(every)
        for low, high in np.unique(found.levels, axis=0):
            rows = np.flatnonzero((found.levels == (low, high)).all(1))
            values = [
                auc_of(positive[rows], negative[rows], found.shares[rows]).value for negative in negatives.values()
            ]
            known = [value for value in values if not np.isnan(value)]
            levels = f"{found.names[low]} in {found.names[high]}"
            by_level[relation, name, levels] = float(np.mean(known)) if known else float("nan")
    intervals = bootstrap.intervals({"/".join(key): statistic for key, statistic in statistics.items()}, draws)
    return Entailment(model, {key: intervals["/".join(key)] for key in statistics}, statistics, by_level)


def scores_of_rows(score: KindScore, a: Items, rows: np.ndarray, b: Items, others: np.ndarray) -> np.ndarray:
    """Return a score of pairs of rows (P,), NaN where either is -1."""
    kept = np.flatnonzero((rows >= 0) & (others >= 0))
    out = np.full(len(rows), np.nan)
    for part in np.split(kept, range(BLOCK, len(kept), BLOCK)):
        if len(part):
            out[part] = score.pairs(a.select(rows[part]), b.select(others[part])).double().numpy()
    return out


def auc_of(positive: np.ndarray, negative: np.ndarray, shares: csr_matrix) -> Statistic:
    """Return the AUC of positive (P,) against negative (P,), NaN: none, by draws of the concepts; shares: (P, K)."""
    kept = np.flatnonzero(~np.isnan(negative))
    spread, size = shares[kept].astype(np.float64), shares.shape[1]
    scores = np.concatenate([positive[kept], negative[kept]])
    one = bootstrap.auroc_of(scores, np.repeat([1.0, 0.0], len(kept)), "pairs") if len(kept) else None

    def estimate(weights: bootstrap.Weights) -> np.ndarray:
        drawn, found = weights["concepts"], []
        if one is None:
            return np.full(len(drawn), np.nan)
        step = max(1, ELEMENTS // len(scores))
        for part in np.split(drawn, range(step, len(drawn), step)):
            of_pairs = (spread @ part.T).T
            found.append(one.estimate({"pairs": np.concatenate([of_pairs, of_pairs], 1)}))
        return np.concatenate(found)

    return Statistic({"concepts": size}, estimate)


def compare(
    first: Entailment, second: Entailment, relation: str, other: str = "", draws: int = 500
) -> tuple[str, str, Interval]:
    """Return the best score of `first`, `other` or the best of `second`, and the difference on the same draws."""
    best, against = first.best(relation), other or second.best(relation)
    ours, theirs = first.statistics[relation, best, "mean"], second.statistics[relation, against, "mean"]
    return best, against, bootstrap.paired({"mean": theirs}, {"mean": ours}, draws)["mean"]


def format_entailment(results: Sequence[Entailment], pairs: Mapping[str, KindPairs], draws: int = 500) -> str:
    """Format one table of all models, a block for each relation, with the differences between their best scores."""
    lines: list[str] = []
    for relation, found in pairs.items():
        columns = (*found.negatives, "mean")
        said = f"{len(found):,} of {found.found:,} true pairs, {found.with_sibling:,} with a sibling"
        lines.append(f"{TITLES[relation]} {said}; AUC, 95% intervals over concepts")
        lines.append(f"{'model':<28}{'score':<16}" + "".join(f"{kind:>22}" for kind in columns))
        for result in results:
            for name in result.names(relation):
                cells = (result.auc[relation, name, kind] for kind in columns)
                row = "".join(f"{f'{x.value:.3f} [{x.low:.3f}, {x.high:.3f}]':>22}" for x in cells)
                lines.append(f"{short(result.model):<28}{name:<16}{row}")
        for result in results:
            for other, score in [(result, "root"), *((other, "") for other in results if other is not result)]:
                best, against, d = compare(result, other, relation, score, draws)
                models = f"{short(result.model)} {best} - {short(other.model)} {against}"
                lines.append(f"{models}: {d.value:+.3f} [{d.low:+.3f}, {d.high:+.3f}]")
        lines.append("")
    return "\n".join([*lines, *(f"{name:<16}{score.words}" for name, score in SCORES.items())])


def short(model: str) -> str:
    """Return the name of a model for a column: for a run's folder, the run's name."""
    parts = [part for part in model.removeprefix("local-dir:").split("/") if part not in ("", "model")]
    return (parts[-1] if parts else model)[-27:]
