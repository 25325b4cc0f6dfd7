"""Retrieval metrics from ranks, shares in [0, 1] (`rsum`: percent); equal scores are ranked by gallery index.

Averages ignore queries without a match; there is no R@k for a k beyond the gallery.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from scipy.stats import hypergeom
from torch import Tensor

from prolip.evaluation.metrics.bootstrap import Statistic, combine, mean_of

KS, WAYS = (1, 5, 10), ("i2t", "t2i")
#: Numbers of labels in which a plausible match may differ; queries at a time.
ZETAS, QUERIES = (0, 1, 2), 256


class Ranking(NamedTuple):
    """Numbers of every query's ranked gallery that metrics need; all (Q,)."""

    first: Tensor  # rank of the first match, from 1; 0 without a match
    matches: Tensor  # R, the number of matches
    ap_at_r: Tensor  # NaN without a match, like r_precision
    r_precision: Tensor

    def hit(self, k: int) -> Tensor:
        """Return (Q,) bool, True for a match among the first k."""
        return (self.first > 0) & (self.first <= k)

    @property
    def answerable(self) -> Tensor:
        """True for queries with a match in the gallery, (Q,) bool."""
        return self.first > 0


def refuse_nan(scores: Tensor, first_query: int = 0) -> None:
    """Raise ValueError for NaN among scores (Q, G), whose rows are queries from `first_query` on."""
    if scores.isnan().any():
        row, column = scores.isnan().nonzero()[0].tolist()
        what = f"the score of query {first_query + row} and item {column} is NaN"
        raise ValueError(f"{what}: look for a diverged model before ranking")


def summarise(ranking: Ranking, ks: Sequence[int] = KS) -> dict[str, float]:
    """Return R@k, mAP@R, R-Precision and median_rank of queries with a match, and the counts of queries."""
    return {name: one.value for name, one in _means(ranking, "", ks).items()} | _counts(ranking)


def statistics_of(i2t: Ranking, t2i: Ranking, texts: str = "texts", ks: Sequence[int] = KS) -> dict[str, Statistic]:
    """Return the metrics of two rankings that are means over queries; texts: the name of the queries of `t2i`."""
    out: dict[str, Statistic] = {}
    sides = (("i2t", i2t, "images", len(t2i.first)), ("t2i", t2i, texts, len(i2t.first)))
    for way, ranking, queries, gallery in sides:
        found = _means(ranking, queries, [k for k in ks if k <= gallery])
        out |= {f"{way}/{name}": one for name, one in found.items()}
    if all(f"{way}/R@1" in out for way in WAYS):
        first = [out[f"{way}/R@1"] for way in WAYS]
        out["mean_recall@1"] = combine([(0.5, one) for one in first], sum(one.value for one in first) / 2)
    if min(gallery for *_, gallery in sides) >= max(KS):
        every = [_means(ranking, queries, [k])[f"R@{k}"] for _, ranking, queries, _ in sides for k in KS]
        out["rsum"] = combine([(100.0, one) for one in every], 100 * sum(one.value for one in every))
    return out


def both_directions(i2t: Ranking, t2i: Ranking, ks: Sequence[int] = KS) -> dict[str, float]:
    """Return `summarise` of two rankings, `i2t/...` and `t2i/...`, and `rsum`, as `statistics_of`."""
    found, out = statistics_of(i2t, t2i, ks=ks), dict[str, float]()
    for way, ranking in zip(WAYS, (i2t, t2i)):
        out |= {name: one.value for name, one in found.items() if name.startswith(f"{way}/")}
        out |= {f"{way}/{name}": value for name, value in _counts(ranking).items()}
    return out | ({"rsum": found["rsum"].value} if "rsum" in found else {})


def retrieval_names(images: int = max(KS), texts: int = max(KS)) -> list[str]:
    """Return the names of the metrics of `both_directions`, for so many images and texts."""
    i2t, t2i = (Ranking(*(torch.ones(queries),) * 4) for queries in (images, texts))
    return list(both_directions(i2t, t2i))


def plausible_match(
    scores: Callable[[slice], Tensor], query_labels: Tensor, gallery_labels: Tensor
) -> dict[str, float]:
    """Return R-Precision if a pair matches when its labels differ in at most zeta places, PCME 4.1.1 and C.1.

    scores(rows) -> (len(rows), G) for queries (Q, L) and gallery (G, L), multi-hot; inputs without a label are ignored
    on both sides. `PMRP@<zeta>` for each zeta, `PMRP` their mean, `queries` those with a label.
    """
    query_labels, gallery_labels = query_labels.bool(), gallery_labels.bool()
    if query_labels.shape[1:] != gallery_labels.shape[1:] or query_labels.dim() != 2:
        shapes = f"labels {tuple(query_labels.shape)} and {tuple(gallery_labels.shape)}"
        raise ValueError(f"{shapes}: give multi-hot rows over one set of classes")
    asked, kept = query_labels.any(1), gallery_labels.any(1)
    values: dict[int, list[Tensor]] = {zeta: [] for zeta in ZETAS}
    for start in range(0, len(query_labels), QUERIES):
        rows = slice(start, min(start + QUERIES, len(query_labels)))
        some = scores(rows).cpu()[asked[rows]][:, kept]
        refuse_nan(some)
        order = some.argsort(dim=1, descending=True, stable=True)
        a, b = query_labels[rows][asked[rows]].float(), gallery_labels[kept].float()
        distance = (a.sum(1, keepdim=True) + b.sum(1) - 2 * a @ b.mT).round().gather(1, order)  # labels that differ
        for zeta in ZETAS:
            hits = distance <= zeta
            matches = hits.sum(1, keepdim=True)
            within = hits & (torch.arange(hits.shape[1]) < matches)
            values[zeta].append((within.sum(1).double() / matches.squeeze(1))[matches.squeeze(1) > 0])
    out = {f"PMRP@{zeta}": float(torch.cat(parts).double().mean()) for zeta, parts in values.items()}
    return out | {"PMRP": sum(out.values()) / len(out), "queries": float(asked.sum())}


def chance_recall(matches: Tensor, gallery: int, k: int) -> float:
    """Return the expected recall@k of a random order: mean of 1 - C(G - R, k) / C(G, k) over queries with R > 0."""
    counts = matches[matches > 0].cpu().numpy()
    return float(1 - hypergeom.pmf(0, gallery, counts, min(k, gallery)).mean()) if len(counts) else float("nan")


def _means(ranking: Ranking, queries: str, ks: Sequence[int]) -> dict[str, Statistic]:
    hits = {f"R@{k}": ranking.hit(k).double().where(ranking.answerable, torch.nan) for k in ks}
    values = hits | {"mAP@R": ranking.ap_at_r, "R-Precision": ranking.r_precision}
    return {name: mean_of(value, queries) for name, value in values.items()}


def _counts(ranking: Ranking) -> dict[str, float]:
    kept = ranking.answerable
    count = int(kept.sum())
    middle = float(ranking.first[kept].double().quantile(0.5)) if count else float("nan")
    return {"median_rank": middle, "queries": float(count), "queries_without_match": float(len(kept) - count)}
