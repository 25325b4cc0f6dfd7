"""Exact search over a gallery held as arrays: ordered by the score in float64, ties by rising row.

If the score factors, faiss proposes candidates in float32 until a bound on its error excludes all others; these are
scored again in float64. elk does not factor: bounds skip buckets and items. Other scores rank every pair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import faiss
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from prolip.gaussian import Gaussian
from prolip.losses import Factors
from prolip.scores import Score, Side, index_vectors

BLOCK = 32_768  # rows that a search reads at once
SPARE = 32  # candidates of the first attempt, in addition to twice the requested answers
#: Numbers of items scored again at a time, and pairs of a score that does not factor.
ELEMENTS, PAIRS = 2**24, 2**20
ROWS, QUERIES = 128, 64  # rows of a bucket of elk (fewer: tighter bounds, more matrix products), and queries at a time
NOT_FINITE = "the gallery has NaN or infinite numbers, so its files are damaged. Find them with --verify"


class GaussianArrays(NamedTuple):
    """N Gaussians and their search vectors, [v, b] of a score that factors."""

    mean: np.ndarray  # (N, D) float32
    log_var: np.ndarray | None  # (N, D) float32, None for points
    vector: np.ndarray  # (N, P + 1) float32
    reach: float  # max |v|
    lift: float  # max(b, 0)
    alive: np.ndarray | None = None  # (N,) bool, None if no row is deleted
    block: int = BLOCK  # rows read at once

    def blocks(self, first: int = 0, deleted: bool = False) -> Iterator[np.ndarray]:
        """Yield the rows from `first` on, block by block (n,). deleted: include deleted rows."""
        for start in range(first, len(self.mean), self.block):
            rows = np.arange(start, min(start + self.block, len(self.mean)))
            kept = rows if self.alive is None or deleted else rows[self.alive[rows]]
            if len(kept):
                yield kept

    def gaussian(self, rows: np.ndarray) -> Gaussian:
        """Load the Gaussians of some rows, (M,) -> (M, D)."""
        mean = torch.from_numpy(self.mean[rows])
        log_var = None if self.log_var is None else torch.from_numpy(self.log_var[rows])
        return Gaussian(mean, torch.full_like(mean, -torch.inf) if log_var is None else log_var)

    def factors(self, rows: np.ndarray) -> Factors:
        both = torch.from_numpy(self.vector[rows])
        return Factors(both[:, :-1], both[:, -1])


def make_arrays(score: Score, z: Gaussian, side: Side = "image") -> GaussianArrays:
    """Build arrays of Gaussians in memory, with the vectors of a score that factors."""
    mean, log_var = (x.detach().float().contiguous() for x in z)
    factors = score.factors(Gaussian(mean, log_var), side)
    assert factors is not None
    vector = torch.cat([factors.vector, factors.offset.unsqueeze(-1)], -1).numpy()
    reach, lift = float(factors.vector.norm(dim=-1).max()), max(0.0, float(factors.offset.max()))
    return GaussianArrays(mean.numpy(), None if log_var.isneginf().all() else log_var.numpy(), vector, reach, lift)


class TopK(NamedTuple):
    """rows: of the gallery, best first, int64 (Q, k), -1 if there are fewer; scores: float64 (Q, k), -inf there."""

    rows: Tensor
    scores: Tensor

    def first(self, k: int) -> TopK:
        return TopK(self.rows[:, :k], self.scores[:, :k])


def empty(queries: int, k: int) -> TopK:
    """Return an empty result, (Q, k)."""
    return TopK(torch.full((queries, k), -1), torch.full((queries, k), -torch.inf, dtype=torch.float64))


class Steady(TorchFunctionMode):
    """Mode in which measures give equal pairs equal bits at any position of a block. For values without a graph.
    PyTorch computes logaddexp, sinh and atanh differently at the end of a block, but not exp, expm1 and log1p.
    """

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.logaddexp:
            high = torch.maximum(*args)
            return torch.minimum(*args).sub_(high).exp_().log1p_().add_(high)
        if func is torch.sinh:
            return torch.expm1(args[0]).sub_(torch.expm1(-args[0])).mul_(0.5)
        if func is torch.atanh:
            return torch.log1p(args[0]).sub_(torch.log1p(-args[0])).mul_(0.5)
        return func(*args, **(kwargs or {}))


def nearest(score: Score, queries: Gaussian, gallery: GaussianArrays, k: int, side: Side = "text") -> TopK:
    """Find the k best items of each query of a side, by the gallery's vectors, else by every pair."""
    asked = index_vectors(score, queries.float(), gallery=False, side=side)
    if asked is None:
        return score_all(score, queries, gallery, k, side)
    total = len(gallery.mean) if gallery.alive is None else int(gallery.alive.sum())
    rows, scores = empty(len(asked), k)
    step = max(1, ELEMENTS // (queries.mean.shape[1] * (2 * k + SPARE)))
    for left in torch.arange(len(asked)).split(step):
        count = min(total, 2 * k + SPARE)
        while len(left) and total:  # queries with too few candidates get more
            near, some = candidates(asked[left].numpy(), gallery, count), queries.select(left)
            best = top(TopK(near.rows, rescored(score, some, near.rows, gallery.gaussian, side)), k)
            enough = torch.ones(len(left), dtype=torch.bool)
            if count < total:
                own = score.factors(some.to(torch.float64), side)
                assert own is not None
                error = error_bound(asked[left], gallery, near.scores[:, k - 1])
                enough = near.scores[:, -1] + own.offset + error < best.scores[:, -1]
            rows[left[enough]], scores[left[enough]] = best.rows[enough], best.scores[enough]
            left, count = left[~enough], min(total, 4 * count)
    return TopK(rows, scores)


def candidates(asked: np.ndarray, gallery: GaussianArrays, count: int) -> TopK:
    """Find the largest float32 inner products with the gallery's vectors, (Q, P + 1) -> (Q, count), of living rows."""
    rows, scores = empty(len(asked), 0)
    for some in gallery.blocks():
        is_whole = some[-1] - some[0] + 1 == len(some)  # needs no copy
        vectors = np.ascontiguousarray(gallery.vector[slice(some[0], some[-1] + 1) if is_whole else some])
        found, places = faiss.knn(asked, vectors, min(len(some), count), metric=faiss.METRIC_INNER_PRODUCT)
        if (places < 0).any():  # faiss never finds NaN
            raise ValueError(NOT_FINITE)
        rows = torch.cat([rows, torch.from_numpy(some[places])], 1)
        scores = torch.cat([scores, torch.from_numpy(found).double()], 1)
        best = scores.topk(min(count, scores.shape[1]), dim=1)
        scores, rows = best.values, rows.gather(1, best.indices)
    return TopK(rows.where(~scores.isneginf(), -1), scores)


def error_bound(asked: Tensor, gallery: GaussianArrays, least: Tensor) -> Tensor:
    """Bound how far an item's float64 score can be above its float32 inner product, (Q,) float64. A dot product of P +
    1 terms is off by (P + 1) eps/2 sum |u_i v_i| in any order of summation (Jeannerod and Rump 2013), and its factors
    were rounded and summed in float32: (P + 64) eps (|u| |v| + |b|) exceeds both. An item whose b is below -2 (|u| |v|
    + |s|) scores less than s, the `least` that counts, however it is rounded.
    """
    length = asked[:, :-1].double().norm(dim=1) * gallery.reach
    offset = torch.maximum(2 * (length + least.abs()), torch.tensor(gallery.lift, dtype=torch.float64))
    return (asked.shape[1] + 64) * 2.0**-23 * (length + offset)


def rescored(
    score: Score, queries: Gaussian, rows: Tensor, items_of: Callable[[np.ndarray], Gaussian], side: Side = "text"
) -> Tensor:
    """Score items of each query in float64 (networks: float32), rows (Q, m) -> (Q, m); -inf where rows are -1."""
    queries, other = queries.to(precise(score)), other_side(side)
    asked, parts = score.factors(queries, side), []
    step = max(1, ELEMENTS // max(1, rows.shape[1] * queries.mean.shape[1]))
    for start in range(0, len(rows), step):
        some, place = rows[start : start + step], slice(start, start + step)
        items = items_of(some.clamp(min=0).flatten().numpy()).to(precise(score))
        given = score.factors(items, other)
        if asked is not None and given is not None:
            products = asked.vector[place].unsqueeze(1) * given.vector.unflatten(0, some.shape)
            offsets = asked.offset[place].unsqueeze(1) + given.offset.unflatten(0, some.shape)
            parts.append(products.sum(-1) + offsets)
            if parts[-1].isnan().any():
                raise ValueError(NOT_FINITE)
            continue
        for i, own in enumerate(torch.arange(some.numel()).view(some.shape), start):
            parts.append(all_scores(score, queries.select(slice(i, i + 1)), items.select(own), side))
    return torch.cat([torch.zeros(0, rows.shape[1]), *parts]).double().masked_fill(rows < 0, -torch.inf)


def precise(score: Score) -> torch.dtype:
    """Return float64, or the float32 of a score with networks."""
    return torch.float32 if any(True for _ in score.parameters()) else torch.float64


def all_scores(score: Score, queries: Gaussian, items: Gaussian, side: Side) -> Tensor:
    """Score queries with items, (Q, N). Images come first, as a score need not be symmetric."""
    with Steady():
        return score.pairwise(queries, items) if side == "image" else score.pairwise(items, queries).mT


def other_side(side: Side) -> Side:
    """Return the other side, which a score compares with this one."""
    return "text" if side == "image" else "image"


def score_all(score: Score, queries: Gaussian, gallery: GaussianArrays, k: int, side: Side = "text") -> TopK:
    """Find the k best by scoring every pair, for any score, in bounded memory."""
    parts = []
    for start in range(0, len(queries.mean), QUERIES):
        some = queries.select(slice(start, start + QUERIES)).to(precise(score))
        found = empty(len(some.mean), 0)
        for rows in gallery._replace(block=max(1, PAIRS // len(some.mean))).blocks():
            values = all_scores(score, some, gallery.gaussian(rows).to(precise(score)), side).double()
            found = top(extended(found, torch.from_numpy(rows), values), k)
        parts.append(found)
    return joined(parts)


def extended(found: TopK, rows: Tensor, scores: Tensor) -> TopK:
    """Return answers with further rows (n,) and their scores (Q, n)."""
    return TopK(torch.cat([found.rows, rows.expand_as(scores)], 1), torch.cat([found.scores, scores], 1))


def top(found: TopK, k: int) -> TopK:
    """Return the k best of each query, equal scores by rising row: (Q, m) -> (Q, k)."""
    by_row = found.rows.argsort(dim=1, stable=True)
    order = found.scores.gather(1, by_row).argsort(dim=1, descending=True, stable=True)[:, :k]
    place, pad = by_row.gather(1, order), (0, max(0, k - found.rows.shape[1]))
    rows, scores = found.rows.gather(1, place), found.scores.gather(1, place)
    return TopK(F.pad(rows, pad, value=-1), F.pad(scores, pad, value=-torch.inf))


def joined(parts: Sequence[TopK]) -> TopK:
    return TopK(*map(torch.cat, zip(*parts)))


# --- elk --------------------------------------------------------------------------------------------------------------
# With v = exp(l) the score of a query p and an item q is -1/2 sum_d [(m_p - m_q)^2 / (v_p + v_q) + f(l_q)], where
# f(l) = log(v_p + exp(l)) rises and is convex. The bounds are in float64.
class Bucket(NamedTuple):
    """Rows of a gallery with similar variances, and their bounds, each (D,) float64."""

    gallery: GaussianArrays
    rows: np.ndarray
    mean_low: Tensor
    mean_high: Tensor
    log_low: Tensor
    log_high: Tensor
    centre: Tensor


def make_buckets(gallery: GaussianArrays, rows: int = ROWS) -> list[Bucket]:
    """Sort the rows of each block by mean log variance into buckets of at most `rows`. ValueError for points."""
    found = []
    for block in gallery.blocks():
        log_vars = gallery.gaussian(block).log_var.numpy()
        if np.isneginf(log_vars).any():
            raise ValueError("elk needs variances, and these are points: use csd or mean")
        order = block[np.argsort(log_vars.mean(1), kind="stable")]
        for start in range(0, len(order), rows):
            some = np.sort(order[start : start + rows])
            mean, log_var = gallery.gaussian(some).to(torch.float64)
            bounds = (mean.amin(0), mean.amax(0), log_var.amin(0), log_var.amax(0), log_var.mean(0))
            found.append(Bucket(gallery, some, *bounds))
    return found


def bucket_bounds(queries: Gaussian, buckets: Sequence[Bucket]) -> Tensor:
    """Return the highest scores of any items of buckets, (Q, buckets): nearest point of the box, extreme variances."""
    out, var = [], queries.var
    for bucket in buckets:
        outside = torch.relu(bucket.mean_low - queries.mean) + torch.relu(queries.mean - bucket.mean_high)
        out.append(_negative_elk(outside, var + bucket.log_high.exp(), var + bucket.log_low.exp()))
    return torch.stack(out, 1)


def _negative_elk(difference: Tensor, width: Tensor, least: Tensor) -> Tensor:
    """Compute -1/2 sum_d [difference^2 / width + log least], (N, D) -> (N,), equal rows bit for bit at any position."""
    return difference.square().div_(width).add_(least.log()).sum(1).mul_(-0.5)


def item_bounds(queries: Gaussian, items: Gaussian, bucket: Bucket) -> Tensor:
    """Return an upper bound of each item's score in a bucket, (Q, n). v_q <= exp(l_high) bounds the distance; as f is
    convex, f(l_q) >= f(c) + f'(c) (l_q - c), f'(c) = exp(c) / (v_p + exp(c)). Both are linear in [m_q, m_q^2, l_q - c],
    so one matrix product bounds all pairs; a rounding term covers its sum of large terms.
    """
    precision = (-torch.logaddexp(queries.log_var, bucket.log_high)).exp()
    at_centre = torch.logaddexp(queries.log_var, bucket.centre)
    slope = (bucket.centre - at_centre).exp()
    weights = torch.cat([-2 * precision * queries.mean, precision, slope], 1)
    shift = items.log_var - bucket.centre
    both = torch.cat([items.mean, items.mean.square(), shift], 1)
    energy = (precision * queries.mean.square()).sum(1)
    total = weights @ both.T + (energy + at_centre.sum(1)).unsqueeze(1)
    largest = precision @ (2 * items.mean.square() + shift.abs()).T  # of every |term|, by 2 |ab| <= a^2 + b^2
    size = largest + slope @ shift.abs().T + (2 * energy + (1 + at_centre.abs()).sum(1)).unsqueeze(1)
    return -0.5 * (total - (3 * queries.mean.shape[1] + 32) * torch.finfo(torch.float64).eps * size)


def nearest_by_elk(queries: Gaussian, buckets: Sequence[Bucket], k: int) -> tuple[TopK, int]:
    """Find the k items of the highest -elk, in the order of `score_all`; count the pairs scored."""
    parts, scored = [], 0
    for start in range(0, len(queries.mean), QUERIES):
        some = queries.select(slice(start, start + QUERIES)).to(torch.float64)
        best = empty(len(some.mean), k)
        if buckets:
            bounds = bucket_bounds(some, buckets)
            for number in bounds.amax(0).argsort(descending=True).tolist():
                asked = torch.nonzero(bounds[:, number] >= best.scores[:, -1])[:, 0]
                if len(asked):
                    scored += _search_bucket(buckets[number], some, asked, best)
        parts.append(best)
    return joined(parts), scored


def _search_bucket(bucket: Bucket, queries: Gaussian, asked: Tensor, best: TopK) -> int:
    """Update `best` with the items that can be in it, highest bounds first; return their number."""
    items = bucket.gallery.gaussian(bucket.rows).to(torch.float64)
    bounds, rows = item_bounds(queries.select(asked), items, bucket), torch.from_numpy(bucket.rows)
    first = torch.zeros_like(bounds, dtype=torch.bool)
    first.scatter_(1, bounds.topk(min(best.rows.shape[1], bounds.shape[1]), dim=1).indices, True)
    count, queries_var, items_var = 0, queries.log_var[asked].exp(), items.var
    step = max(1, ELEMENTS // queries.mean.shape[1])
    for which in (first, ~first):
        which &= bounds >= best.scores[asked, -1].unsqueeze(1)
        values = torch.full(which.shape, -torch.inf, dtype=torch.float64)
        for query, item in (pairs.unbind(1) for pairs in which.nonzero().split(step)):
            width = queries_var[query] + items_var[item]
            values[query, item] = _negative_elk(queries.mean[asked[query]] - items.mean[item], width, width)
        if len(changed := torch.nonzero(which.any(1))[:, 0]):
            own = asked[changed]
            found = top(extended(TopK(best.rows[own], best.scores[own]), rows, values[changed]), best.rows.shape[1])
            best.rows[own], best.scores[own] = found.rows.where(~found.scores.isneginf(), -1), found.scores
        count += int(which.sum())
    return count
