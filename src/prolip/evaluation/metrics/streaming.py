"""Scores of all pairs in bounded memory, and ranks from them without sorting: one plus the number of items above."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from prolip.evaluation.metrics.ranking import KS, Ranking, both_directions, refuse_nan
from prolip.gaussian import Gaussian, upcast, without_autocast
from prolip.scores import CSDScore, MeanScore, Score, largest

#: Scores at a time (16 MiB of float32), but no fewer rows: each block reads the whole gallery's embeddings.
BLOCK, ROWS = 2**22, 64
#: A query with this many matches is sorted: a stable sort costs about as much as this many counts.
SORT_FROM = 256

Index = slice | Tensor
Indices = Sequence[int] | Tensor
Rows = Callable[[slice], Tensor]


class Relevance(NamedTuple):
    """Matches of queries with gallery items, as pairs sorted by query, each pair once."""

    query: Tensor  # (P,) int64
    item: Tensor
    queries: int  # number of queries
    gallery: int
    absent: Tensor  # (Q,), matches of a query outside of the gallery: they count in R, but are never retrieved

    @classmethod
    def from_pairs(cls, query: Indices, item: Indices, queries: int, gallery: int) -> Relevance:
        """Build from pairs in any order, without repeats. Raises ValueError for an index outside."""
        q, i = (torch.as_tensor(x, dtype=torch.int64).reshape(-1).cpu() for x in (query, item))
        for name, x, size in (("query", q, queries), ("item", i, gallery)):
            if len(outside := x[(x < 0) | (x >= size)]):
                why = f"a relevant pair names {name} {int(outside[0])}, but there are {size}"
                raise ValueError(f"{why}: count from 0 and give the sizes of both sides")
        key = torch.unique(q * max(gallery, 1) + i)
        absent = torch.zeros(queries, dtype=torch.int64)
        return cls(key // max(gallery, 1), key % max(gallery, 1), queries, gallery, absent)

    @classmethod
    def from_dense(cls, relevant: Tensor) -> Relevance:
        """Build from a boolean (Q, G) matrix."""
        query, item = relevant.bool().nonzero(as_tuple=True)
        return cls.from_pairs(query, item, *relevant.shape)

    @classmethod
    def from_ids(cls, matches: Mapping[int, Iterable[int]], query_ids: Indices, gallery_ids: Indices) -> Relevance:
        """Build from annotations by id: `matches` of a query's id; matching ids outside of the gallery are absent."""
        place = {int(key): i for i, key in enumerate(gallery_ids)}
        query, item, absent = [], [], torch.zeros(len(query_ids), dtype=torch.int64)
        for i, key in enumerate(query_ids):
            wanted = set(matches.get(int(key), ()))
            found = [place[x] for x in wanted if x in place]
            query += [i] * len(found)
            item += found
            absent[i] = len(wanted) - len(found)
        return cls.from_pairs(query, item, len(query_ids), len(gallery_ids))._replace(absent=absent)

    def within(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Return the pairs of some queries: (row, counted from the first of `rows`; item)."""
        pairs = _run(self.query, rows)
        return self.query[pairs] - rows.start, self.item[pairs]

    def transposed(self) -> Relevance:
        """Return the other direction; absent matches are unknown there and dropped."""
        return Relevance.from_pairs(self.item, self.query, self.gallery, self.queries)


@dataclass(frozen=True)
class PairScores:
    """Scores of images against texts, computed on demand; larger is nearer."""

    images: int
    texts: int
    block: Callable[[Index, Index], Tensor]  # (rows, columns) -> (r, c)
    shortlist: int = 0  # of each row, `paired` scores the coarse top again; they always rank first
    coarse: Any = None  # as `block`
    paired: Any = None  # int64 indices of images and texts, (N,) each -> (N,)

    @classmethod
    def from_matrix(cls, matrix: Tensor | np.ndarray) -> PairScores:
        """Build from a matrix in memory, images in rows: (N, M)."""
        scores = torch.as_tensor(matrix)

        def block(rows: Index, columns: Index) -> Tensor:
            both = isinstance(rows, Tensor) and isinstance(columns, Tensor)
            return scores[rows.unsqueeze(1) if both else rows, columns]  # type: ignore[union-attr]

        return cls(len(scores), scores.shape[1], block)

    @classmethod
    def from_gaussians(cls, image: Gaussian, text: Gaussian, score: Score | None = None) -> PairScores:
        """Build from image (N, D), text (M, D), by CSD by default; an asymmetric score always takes images first."""
        score = CSDScore() if score is None else score
        own: Any = score  # a score with a shortlist has `coarse` and `paired`
        means, traces = [z.float().mean for z in (image, text)], (image.trace, text.trace)  # once, not by block
        if type(score) is MeanScore:
            means = [F.normalize(mean, dim=-1) for mean in means]

        def block(rows: Index, columns: Index) -> Tensor:
            if type(score) not in (MeanScore, CSDScore):
                return score.pairwise(image.select(rows), text.select(columns))
            with without_autocast(image.mean.device):
                products = means[0][rows] @ means[1][columns].mT
            if type(score) is MeanScore:
                return products
            return products - 0.5 * (traces[0][rows].unsqueeze(1) + traces[1][columns])

        def coarse(rows: Index, columns: Index) -> Tensor:
            return own.coarse(image.select(rows), text.select(columns))

        def paired(i: Tensor, j: Tensor) -> Tensor:
            return own.paired(image.select(i), text.select(j))

        return cls(len(image.mean), len(text.mean), block, score.shortlist, coarse, paired)

    def image_rows(self, rows: slice) -> Tensor:
        """Score some images against all texts."""
        if not 0 < self.shortlist < self.texts:
            return self.block(rows, slice(None))
        return self._listed(self.coarse(rows, slice(None)), lambda i, j: self.paired(i + rows.start, j))

    def text_rows(self, rows: slice) -> Tensor:
        """Score some texts against all images."""
        if not 0 < self.shortlist < self.images:
            return self.block(slice(None), rows).mT
        return self._listed(self.coarse(slice(None), rows).mT, lambda j, i: self.paired(i, j + rows.start))

    def _listed(self, coarse: Tensor, paired: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Return scores of queries by rising place, float64: coarse (b, G); paired(row, item) -> (N,)."""
        near = largest(coarse, self.shortlist)
        row = torch.arange(len(coarse), device=near.device).unsqueeze(1).expand_as(near)
        again = paired(row.flatten(), near.flatten()).view_as(near).double()
        behind = again.amin(1, keepdim=True) - 1 - coarse.amax(1, keepdim=True)
        return (coarse + behind).scatter_(1, near, again)

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield images against all texts, some images at a time, as `row_blocks`."""
        return row_blocks(self.image_rows, self.images, self.texts)

    def subset(self, images: Tensor, texts: Tensor) -> PairScores:
        """Return the scores of some images and texts, int64 indices in the order that breaks ties."""

        def within(scores: Any) -> Any:
            return lambda i, j: scores(images[i], texts[j])

        parts = within(self.block), self.shortlist, within(self.coarse), within(self.paired)
        return PairScores(len(images), len(texts), *parts)


def row_blocks(
    scores: Rows, queries: int, gallery: int, wanted: Callable[[slice], bool] = lambda rows: True
) -> Iterator[tuple[slice, Tensor]]:
    """Yield rows of a score matrix, BLOCK scores or ROWS rows at a time, except rows that the filter skips."""
    step = max(ROWS, BLOCK // max(gallery, 1))
    for rows in (slice(start, min(start + step, queries)) for start in range(0, queries, step)):
        if not wanted(rows):
            continue
        block = scores(rows)
        if block.shape != (shape := (rows.stop - rows.start, gallery)):
            what = f"scores of queries {rows.start} to {rows.stop - 1} have shape {tuple(block.shape)}"
            raise ValueError(f"{what}, expected {shape}: give a row for each query, a column for each gallery item")
        refuse_nan(block, first_query=rows.start)
        yield rows, upcast(block.detach())


class Nearest:
    """The best gallery item of every query, from blocks of score rows: `item` and its `score`, (Q,)."""

    def __init__(self, queries: int):
        self.score = torch.full((queries,), torch.nan, dtype=torch.float64)
        self.item = torch.full((queries,), -1, dtype=torch.int64)

    def update(self, rows: slice, block: Tensor) -> None:
        """Add the scores (b, G) of these queries; of equal scores the lower index wins."""
        item = block.argmax(1)
        self.item[rows] = item.cpu()
        self.score[rows] = block.gather(1, item.unsqueeze(1)).squeeze(1).double().cpu()


def rank_sparse(scores: Rows, *relevances: Relevance, others: Sequence[Any] = ()) -> list[Ranking]:
    """Rank by every relevance in one pass over the rows of scores, which also updates `others` (`Nearest`)."""
    shapes = {(r.queries, r.gallery) for r in relevances}
    if len(shapes) != 1:
        raise ValueError(f"relevances of shapes {sorted(shapes)}: rank those of one score matrix together")
    queries, gallery = shapes.pop()
    keys = torch.cat([r.query * max(gallery, 1) + r.item for r in relevances])
    pairs, places = torch.unique(keys, return_inverse=True)
    query, item = pairs // max(gallery, 1), pairs % max(gallery, 1)
    ranks = torch.zeros_like(pairs)

    def wanted(rows: slice) -> bool:
        return bool(others) or len(query[_run(query, rows)]) > 0

    for rows, block in row_blocks(scores, queries, gallery, wanted):
        own = _run(query, rows)
        ranks[own] = match_ranks(block.cpu(), query[own] - rows.start, item[own])
        for one in others:
            one.update(rows, block)
    parts = ranks[places].split([len(relevance.query) for relevance in relevances])
    return [ranking_of(relevance, part) for relevance, part in zip(relevances, parts)]


def rank(scores: Rows, relevance: Relevance, *others: Any) -> tuple[Ranking, Nearest]:
    """Return ranks of the matches and first places of one direction, from one pass that `others` share."""
    nearest = Nearest(relevance.queries)
    (ranking,) = rank_sparse(scores, relevance, others=[nearest, *others])
    return ranking, nearest


def match_ranks(scores: Tensor, row: Tensor, item: Tensor) -> Tensor:
    """Return the rank, from 1, of item `item` in row `row` of scores (b, G), for P pairs sorted by row: (P,)."""
    many = torch.bincount(row, minlength=len(scores)) >= SORT_FROM
    ranks, table = torch.empty_like(row), scores.contiguous().numpy()
    if many.any():
        order = scores[many].argsort(dim=1, descending=True, stable=True)
        place = torch.arange(1, scores.shape[1] + 1).expand_as(order)
        by_item, own = torch.empty_like(order).scatter_(1, order, place), many[row]
        ranks[own] = by_item[(many.cumsum(0) - 1)[row[own]], item[own]]
    few = (~many[row]).nonzero().squeeze(1)  # NumPy compares at memory speed, thirty times PyTorch's
    counts = []
    for r, m in zip(row[few].tolist(), item[few].tolist()):
        line = table[r]
        counts.append(1 + np.count_nonzero(line[:m] >= line[m]) + np.count_nonzero(line[m:] > line[m]))
    ranks[few] = torch.tensor(counts, dtype=torch.int64)
    return ranks


def _run(query: Tensor, rows: slice) -> slice:
    """Return the pairs of some rows among pairs sorted by query."""
    return slice(*torch.searchsorted(query, torch.tensor([rows.start, rows.stop])).tolist())


def ranking_of(relevance: Relevance, ranks: Tensor) -> Ranking:
    """Compute the values of every query from the ranks (P,) of its matches.

    With r_1 < r_2 < ... the ranks of the R matches: AP@R = 1/R sum_{r_i <= R} i / r_i; R-Precision = #{r_i <= R} / R.
    """
    order = torch.argsort(relevance.query * (relevance.gallery + 1) + ranks)
    query, rank = relevance.query[order], ranks[order]
    found = torch.bincount(query, minlength=relevance.queries)
    place = torch.arange(1, len(query) + 1) - (found.cumsum(0) - found)[query]
    matches = torch.where(found > 0, found + relevance.absent, 0)
    within = (rank <= matches[query]).double()
    share = matches.double().where(found > 0, torch.nan)
    zeros = torch.zeros(relevance.queries, dtype=torch.float64)
    ap = zeros.index_add(0, query, within * place.double() / rank.double()) / share
    first = torch.zeros(relevance.queries, dtype=torch.int64)
    first[query[place == 1]] = rank[place == 1]
    return Ranking(first, matches, ap, zeros.index_add(0, query, within) / share)


def check_fit(scores: PairScores, relevance: Relevance) -> None:
    """Raise ValueError unless the relevance belongs to these images and texts."""
    if (relevance.queries, relevance.gallery) != (scores.images, scores.texts):
        given = f"relevance of {relevance.queries} images and {relevance.gallery} texts"
        raise ValueError(f"{given} for scores of {scores.images} and {scores.texts}: give equal counts")


def retrieval(scores: PairScores, relevance: Relevance, ks: Sequence[int] = KS) -> dict[str, float]:
    """Compute `both_directions` without the matrix; relevance: images x texts, many-to-many."""
    check_fit(scores, relevance)
    (i2t,) = rank_sparse(scores.image_rows, relevance)
    (t2i,) = rank_sparse(scores.text_rows, relevance.transposed())
    return both_directions(i2t, t2i, ks)
