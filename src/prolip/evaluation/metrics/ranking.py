"""Retrieval metrics on a score matrix and a boolean relevance matrix: pure, exact, many matches per query.

Conventions, everywhere the same:
- larger scores are nearer; equal scores are ranked by gallery index, lower first, so a result is reproducible (a model
  that scores everything alike gets what chance gives, as long as the gallery is not sorted by the answer);
- a query without any match in the gallery has no recall: it is left out of every average and counted in
  `queries_without_match`;
- recall@k is the share of queries with at least one match among the first k; where both directions are known, it is
  left out for a k beyond the gallery, of which every query would find its match, and rsum with it;
- figures are shares in [0, 1], only RSUM is in percent (six recalls, at most 600), as the literature prints it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from scipy.stats import hypergeom
from torch import Tensor

Array = np.ndarray | Tensor
KS = (1, 5, 10)
#: Labels in which a plausible match may differ, and the queries that it is looked for at a time.
ZETAS, QUERIES = (0, 1, 2), 256


class Ranking(NamedTuple):
    """What the metrics need of every query's ranked gallery; all (Q,).

    first: rank of the first match, from 1, and 0 without a match; matches: R, how many there are; ap_at_r, r_precision:
    the query's own values, NaN without a match.
    """

    first: Tensor
    matches: Tensor
    ap_at_r: Tensor
    r_precision: Tensor

    def hit(self, k: int) -> Tensor:
        """(Q,) bool: a match stands among the first k."""
        return (self.first > 0) & (self.first <= k)

    @property
    def answerable(self) -> Tensor:
        """(Q,) bool: the gallery holds a match."""
        return self.first > 0


def refuse_nan(scores: Tensor, first_query: int = 0) -> None:
    """Raise ValueError for NaN among scores (Q, G), whose rows are queries from `first_query` on."""
    if scores.isnan().any():
        row, column = scores.isnan().nonzero()[0].tolist()
        raise ValueError(
            f"the score of query {first_query + row} and item {column} is NaN: look for a diverged model before ranking"
        )


def summarise(ranking: Ranking, ks: Sequence[int] = KS) -> dict[str, float]:
    """Averages over the queries that have a match: R@k, mAP@R, R-Precision, median_rank, and the counts."""
    kept = ranking.answerable
    count = int(kept.sum())
    out = {f"R@{k}": _mean(ranking.hit(k)[kept]) for k in ks}
    out["mAP@R"] = _mean(ranking.ap_at_r[kept])
    out["R-Precision"] = _mean(ranking.r_precision[kept])
    out["median_rank"] = float(ranking.first[kept].double().quantile(0.5)) if count else float("nan")
    return out | {"queries": float(count), "queries_without_match": float(len(kept) - count)}


def both_directions(i2t: Ranking, t2i: Ranking, ks: Sequence[int] = KS) -> dict[str, float]:
    """The summary of two rankings, `i2t/...` and `t2i/...`, and rsum = 100 x the sum of their recalls at 1, 5, 10.

    The queries of one are the gallery of the other: a k beyond it is left out.
    """
    pairs = (("i2t", i2t, len(t2i.first)), ("t2i", t2i, len(i2t.first)))
    out: dict[str, float] = {}
    for way, ranking, gallery in pairs:
        summary = summarise(ranking, [k for k in ks if k <= gallery])
        out |= {f"{way}/{key}": value for key, value in summary.items()}
    if min(gallery for *_, gallery in pairs) < max(KS):
        return out
    return out | {"rsum": 100 * sum(_mean(ranking.hit(k)[ranking.answerable]) for _, ranking, _ in pairs for k in KS)}


def retrieval_names(images: int = max(KS), texts: int = max(KS)) -> list[str]:
    """The names that `both_directions` gives its figures, of so many images and texts."""
    i2t, t2i = (Ranking(*(torch.ones(queries),) * 4) for queries in (images, texts))
    return list(both_directions(i2t, t2i))


def plausible_match(
    scores: Callable[[slice], Tensor], query_labels: Tensor, gallery_labels: Tensor
) -> dict[str, float]:
    """R-Precision where a pair matches if its label vectors differ in at most zeta places, PCME 4.1.1 and C.1.

    scores(rows) -> (len(rows), G) for queries (Q, L) and gallery (G, L), multi-hot; what has no label at all is left
    out on both sides, as in the paper. `PMRP@<zeta>` for each zeta, `PMRP` their mean, `queries` those with a label.
    Raises ValueError for labels of different widths.
    """
    query_labels, gallery_labels = query_labels.bool(), gallery_labels.bool()
    if query_labels.shape[1:] != gallery_labels.shape[1:] or query_labels.dim() != 2:
        raise ValueError(
            f"labels {tuple(query_labels.shape)} and {tuple(gallery_labels.shape)}: give multi-hot rows over one set "
            "of classes"
        )
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
    out = {f"PMRP@{zeta}": _mean(torch.cat(parts)) for zeta, parts in values.items()}
    return out | {"PMRP": sum(out.values()) / len(out), "queries": float(asked.sum())}


def chance_recall(matches: Tensor, gallery: int, k: int) -> float:
    """Expected recall@k of a random order: the mean of 1 - C(G - R, k) / C(G, k) over queries with R > 0 matches."""
    matches = matches[matches > 0]
    if not len(matches):
        return float("nan")
    counts = matches.cpu().numpy()
    return float(1 - hypergeom.pmf(0, gallery, counts, min(k, gallery)).mean())


def as_array(values: Array | Sequence, dtype: type | None = None) -> np.ndarray:
    """Values as a NumPy array: of tensors of any device, with a graph or without; bfloat16 is none of NumPy's types."""
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    return np.asarray(values, dtype=dtype)


def _mean(values: Tensor) -> float:
    return float(values.double().mean())
