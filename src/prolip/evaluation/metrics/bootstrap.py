"""Metrics as functions of query weights; bootstrap intervals (Efron 1979; clusters: Davison and Hinkley 1997, 3.8)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from prolip.evaluation.metrics import Array, as_array
from prolip.evaluation.metrics.classification import multilabel

#: Weights in memory at once.
ELEMENTS = 1 << 24
Weights = Mapping[str, np.ndarray]


class Clusters(NamedTuple):
    """Clusters to draw queries by."""

    name: str  # name of the set of clusters
    of: np.ndarray  # (Q,), the cluster of each query
    size: int


class Statistic(NamedTuple):
    """A metric as a function of query weights, the number of draws of each query.

    estimate: weights (draws, Q) by name of a set of queries -> (draws,), NaN if a draw has nothing to average.
    """

    sizes: dict[str, int]  # numbers of queries or clusters, by name of their set ("images", "texts")
    estimate: Callable[[Weights], np.ndarray]
    clusters: dict[str, Clusters] = {}  # for sets whose queries are not drawn one by one
    exact: float | None = None  # by an unweighted sum, which rounds like published numbers

    @property
    def value(self) -> float:
        """The metric itself: every query has weight 1."""
        if self.exact is not None:
            return self.exact
        return float(self.estimate({name: np.ones((1, size)) for name, size in self.sizes.items()})[0])

    def same_queries(self, other: Statistic) -> bool:
        """Return True if both have equal numbers of queries, in the same clusters."""
        (a, b), same = (self.clusters, other.clusters), np.array_equal
        alike = a.keys() == b.keys() and all(a[x].name == b[x].name and same(a[x].of, b[x].of) for x in a)
        return self.sizes == other.sizes and alike


class Interval(NamedTuple):
    """An estimate, and percentiles of its draws."""

    value: float
    low: float
    high: float


def mean_of(values: Array, queries: str) -> Statistic:
    """Return the mean over queries of values (Q,), without NaN."""
    x = as_array(values, np.float64)
    kept = ~np.isnan(x)
    filled, counted = np.where(kept, x, 0.0), kept.astype(np.float64)

    def estimate(weights: Weights) -> np.ndarray:
        return _ratio(weights[queries] @ filled, weights[queries] @ counted)

    own = values[torch.from_numpy(kept)].double() if isinstance(values, Tensor) else x[kept]
    return Statistic({queries: len(x)}, estimate, exact=float(own.mean()) if kept.any() else float("nan"))


def class_mean_of(hits: Array, labels: Array, queries: str) -> Statistic:
    """Return the mean of the class means of hits (Q,), over the classes in a draw."""
    hit, label = as_array(hits, np.float64), as_array(labels)
    order = np.argsort(label, kind="stable")
    starts = np.unique(label[order], return_index=True)[1]

    def estimate(weights: Weights) -> np.ndarray:
        drawn = weights[queries][:, order]
        right, all_of = (np.add.reduceat(x, starts, axis=1) for x in (drawn * hit[order], drawn))
        return np.nanmean(_ratio(right, all_of), axis=1)

    return Statistic({queries: len(hit)}, estimate)


def average_precision_of(scores: Array, targets: Array, queries: str) -> Statistic:
    """Return the mean over classes of the average precision of scores (Q, C) for targets (Q, C), as scikit-learn's."""
    exact = multilabel(scores, targets)["mAP"]
    scores, targets = as_array(scores, np.float64), as_array(targets).astype(np.float64)

    def of_class(scores: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Sum precision times added recall over thresholds, (draws,); NaN without a target."""
        order = np.argsort(-scores, kind="stable")
        ranked = -scores[order]
        last = np.searchsorted(ranked, ranked, side="right") - 1  # equal scores share a threshold
        drawn = weights[:, order]
        true = drawn * targets[order]
        precision = _ratio(true.cumsum(1)[:, last], drawn.cumsum(1)[:, last])
        return _ratio((np.nan_to_num(precision) * true).sum(1), true.sum(1))

    def estimate(weights: Weights) -> np.ndarray:
        return np.nanmean([of_class(s, t, weights[queries]) for s, t in zip(scores.T, targets.T)], axis=0)

    return Statistic({queries: len(scores)}, estimate, exact=exact)


def risk_area_of(uncertainty: Array, error: Array, queries: str) -> Statistic:
    """Return the AURC of an uncertainty (Q,) for errors (Q,), without NaN, as `selective.risk_coverage`'s.

    After n queries of total error E, a tie of s queries with mean error m adds m s + (E - m n) (H(n + s) - H(n)), H the
    harmonic numbers; a query drawn twice is a tie.
    """
    order, starts, errors = _by_rise(uncertainty, error)

    def estimate(weights: Weights) -> np.ndarray:
        drawn = weights[queries][:, order]
        size, wrong = (np.add.reduceat(x, starts, axis=1) for x in (drawn, drawn * errors))
        count = size.cumsum(1).astype(np.int64)  # clusters of several queries may draw more than Q
        harmonic = np.concatenate([[0.0], (1 / np.arange(1, count.max(initial=0) + 1)).cumsum()])
        before, mean = count - size.astype(np.int64), np.nan_to_num(_ratio(wrong, size))
        area = mean * size + (wrong.cumsum(1) - wrong - mean * before) * (harmonic[count] - harmonic[before])
        return _ratio(area.sum(1), size.sum(1))

    return Statistic({queries: len(as_array(error))}, estimate)


def auroc_of(uncertainty: Array, wrong: Array, queries: str) -> Statistic:
    """Return the AUROC of an uncertainty (Q,) for errors (Q,), 0, 1 or NaN (ignored). NaN for draws of one kind."""
    order, starts, errors = _by_rise(uncertainty, wrong)

    def estimate(weights: Weights) -> np.ndarray:
        drawn = weights[queries][:, order]
        bad, good = (np.add.reduceat(drawn * x, starts, axis=1) for x in (errors, 1 - errors))
        below = good.cumsum(1) - good / 2
        return _ratio((bad * below).sum(1), bad.sum(1) * good.sum(1))

    return Statistic({queries: len(as_array(wrong))}, estimate)


def clustered(part: Statistic, clusters: Mapping[str, Clusters]) -> Statistic:
    """Return the statistic with its query sets drawn by `clusters`, by name of the set; other sets as before."""
    own = {name: clusters[name] for name in part.sizes if name in clusters}
    return part._replace(sizes=part.sizes | {link.name: link.size for link in own.values()}, clusters=own)


def combine(terms: Sequence[tuple[float, Statistic]], exact: float | None = None) -> Statistic:
    """Return a weighted sum of statistics, possibly of different query sets, such as the mean of both directions."""

    def estimate(weights: Weights) -> np.ndarray:
        return np.sum([factor * part.estimate(weights) for factor, part in terms], axis=0)

    return _over([part for _, part in terms], estimate)._replace(exact=exact)


def drawn_as(name: str, part: Statistic) -> Statistic:
    """Return the statistic drawn independently of others: prefix the names of its sets with `name`."""

    def estimate(weights: Weights) -> np.ndarray:
        return part.estimate({own: weights[f"{name}/{own}"] for own in part.sizes})

    clusters = {f"{name}/{own}": link._replace(name=f"{name}/{link.name}") for own, link in part.clusters.items()}
    return Statistic({f"{name}/{own}": size for own, size in part.sizes.items()}, estimate, clusters, part.exact)


def harmonic_mean_of(first: Statistic, second: Statistic) -> Statistic:
    """Return H = 2 a b / (a + b) of two shares, 0 if both are 0; see `drawn_as` for queries of two test sets."""

    def estimate(weights: Weights) -> np.ndarray:
        a, b = first.estimate(weights), second.estimate(weights)
        return np.divide(2 * a * b, a + b, out=a + b, where=a + b != 0)

    return _over([first, second], estimate)


def intervals(
    statistics: Mapping[str, Statistic], draws: int = 1000, level: float = 0.95, seed: int = 0
) -> dict[str, Interval]:
    """Return every statistic with its interval, NaN if no draw has a value. ValueError for fewer than two draws."""
    if draws < 2 or not 0 < level < 1:
        raise ValueError(f"{draws} draws at level {level}: give two or more, and a level such as 0.95")
    sizes = {name: size for statistic in statistics.values() for name, size in statistic.sizes.items()}
    clusters = {name: link for statistic in statistics.values() for name, link in statistic.clusters.items()}
    streams = {name: np.random.default_rng([seed, crc32(name.encode())]) for name in sizes if name not in clusters}
    drawn: dict[str, list[np.ndarray]] = {name: [] for name in statistics}
    step = max(1, ELEMENTS // max(sizes.values(), default=1))
    for start in range(0, draws, step):
        rows = min(step, draws - start)
        weights = {
            name: stream.multinomial(sizes[name], np.full(sizes[name], 1 / sizes[name]), size=rows).astype(np.float64)
            for name, stream in streams.items()
        }
        weights |= {name: weights[link.name][:, link.of] for name, link in clusters.items()}
        for name, statistic in statistics.items():
            drawn[name].append(statistic.estimate(weights))
    found = {}
    for name, parts in drawn.items():
        kept = np.concatenate(parts)
        kept = kept[~np.isnan(kept)]
        low, high = np.quantile(kept, ((1 - level) / 2, (1 + level) / 2)) if len(kept) else (np.nan, np.nan)
        found[name] = Interval(statistics[name].value, float(low), float(high))
    return found


def paired(first: Mapping[str, Statistic], second: Mapping[str, Statistic], draws: int = 1000) -> dict[str, Interval]:
    """Return second - first on the same draws, for statistics of both. ValueError if the queries differ."""
    both = [name for name in first if name in second]
    for name in both:
        if not first[name].same_queries(second[name]):
            what = (
                f"{name} is over {first[name].sizes} and {second[name].sizes} queries, or over other clusters of them"
            )
            raise ValueError(f"{what}: compare two results of the same test set, with no samples left out")
    change = {name: combine([(1.0, second[name]), (-1.0, first[name])]) for name in both}
    return intervals(change, draws)


def _over(parts: Sequence[Statistic], estimate: Callable[[Weights], np.ndarray]) -> Statistic:
    """Return a statistic of the queries and clusters of all parts."""
    sizes = {name: size for part in parts for name, size in part.sizes.items()}
    return Statistic(sizes, estimate, {name: link for part in parts for name, link in part.clusters.items()})


def _by_rise(uncertainty: Array, error: Array) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return rows with an error by rising uncertainty, starts of the groups of equal uncertainty, and the errors."""
    x, y = as_array(uncertainty, np.float64), as_array(error, np.float64)
    rows = np.flatnonzero(~np.isnan(y))
    order = rows[np.argsort(x[rows], kind="stable")]
    return order, np.unique(x[order], return_index=True)[1], y[order]


def _ratio(total: np.ndarray, count: np.ndarray) -> np.ndarray:
    return np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)
