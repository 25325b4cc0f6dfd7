"""A gallery as arrays, and exact search: in the order of the score in float64, equal scores by rising row.

Of a score that factors faiss finds candidates in float32; so many that none beyond them can be among the answers, by a
bound on float32's error, are scored again in float64. Of another score every pair is scored; of elk, the expected
likelihood kernel, which has no factors, those that bounds of buckets of the variances leave.

With v = exp(l) the score of a query p and an item q is -1/2 sum_d [(m_p - m_q)^2 / (v_p + v_q) + f(l_q)], where
f(l) = log(v_p + exp(l)). In a bucket whose items have means within [m_lo, m_hi] and log variances within [l_lo, l_hi],
dimension by dimension, two upper bounds hold.

An item's. v_q <= exp(l_hi), so its distance term is at least (m_p - m_q)^2 / (v_p + exp(l_hi)). f is convex, as
f'' = v_p exp(l) / (v_p + exp(l))^2 >= 0, so f(l_q) >= f(c) + f'(c) (l_q - c) for any c, with
f'(c) = exp(c) / (v_p + exp(c)). Both are linear in [m_q, m_q^2, l_q - c]: one matrix product bounds all pairs.

A bucket's. f rises, so f(l_q) >= f(l_lo); and no mean of it is nearer to m_p than the box [m_lo, m_hi] is.

A bucket, and then an item, whose bound is below the k-th score found so far is no answer, and is left out. All in
float64; an item's bound is taken to be higher by what its sum of large terms may have lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import faiss
import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from prolip.gaussian import Gaussian
from prolip.losses import Factors
from prolip.scores import Score, Side, index_vectors

#: Rows that a search looks at at once.
BLOCK = 32_768
#: Candidates beyond twice the answers that are asked for at first.
SPARE = 32
#: Numbers of items that are scored again at a time, and pairs of a score that does not factor.
ELEMENTS, PAIRS = 2**24, 2**20
#: Rows of a bucket of elk's (fewer bound tighter, more are fewer matrix products), and queries at a time.
ROWS, QUERIES = 128, 64
NOT_FINITE = "the gallery holds NaN or infinite numbers, so its files are damaged: ask with --verify, which names them"


class GaussianArrays(NamedTuple):
    """N Gaussians and their vectors.

    mean: (N, D) float32; log_var: (N, D) float32, None for points; vector: (N, P + 1) float32, [v, b] of a score that
    factors; reach, lift: max |v| and max(b, 0); alive: (N,) bool, None where nothing was deleted; block: rows that are
    looked at at once.
    """

    mean: np.ndarray
    log_var: np.ndarray | None
    vector: np.ndarray
    reach: float
    lift: float
    alive: np.ndarray | None = None
    block: int = BLOCK

    def blocks(self, first: int = 0, deleted: bool = False) -> Iterator[np.ndarray]:
        """The rows from `first` on, block by block (n,); deleted: those that were deleted, too."""
        for start in range(first, len(self.mean), self.block):
            rows = np.arange(start, min(start + self.block, len(self.mean)))
            kept = rows if self.alive is None or deleted else rows[self.alive[rows]]
            if len(kept):
                yield kept

    def gaussian(self, rows: np.ndarray) -> Gaussian:
        """Those of some rows (M,), in memory."""
        mean = torch.from_numpy(self.mean[rows])
        log_var = None if self.log_var is None else torch.from_numpy(self.log_var[rows])
        return Gaussian(mean, torch.full_like(mean, -torch.inf) if log_var is None else log_var)

    def factors(self, rows: np.ndarray) -> Factors:
        """The vectors of some rows (M,), in memory."""
        both = torch.from_numpy(self.vector[rows])
        return Factors(both[:, :-1], both[:, -1])


def make_arrays(score: Score, z: Gaussian, side: Side = "image") -> GaussianArrays:
    """Those of Gaussians in memory; score: what their vectors are of, which factors."""
    mean, log_var = (x.detach().float().contiguous() for x in z)
    factors = score.factors(Gaussian(mean, log_var), side)
    assert factors is not None
    vector = torch.cat([factors.vector, factors.offset.unsqueeze(-1)], -1).numpy()
    reach, lift = float(factors.vector.norm(dim=-1).max()), max(0.0, float(factors.offset.max()))
    return GaussianArrays(mean.numpy(), None if log_var.isneginf().all() else log_var.numpy(), vector, reach, lift)


class Found(NamedTuple):
    """Rows of the gallery, best first, int64 (Q, k), -1 where there are fewer; their scores, float64, -inf there."""

    rows: Tensor
    scores: Tensor

    def first(self, k: int) -> Found:
        """The k best of each query's."""
        return Found(self.rows[:, :k], self.scores[:, :k])


class Steady(TorchFunctionMode):
    """Computes the functions of the measures so that equal pairs get equal bits, wherever they are in a block.

    PyTorch computes logaddexp, sinh and atanh by other code at the end of a block than inside; exp, expm1 and log1p
    are the same everywhere. For values without a graph.
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


def nearest(score: Score, queries: Gaussian, gallery: GaussianArrays, k: int, side: Side = "text") -> Found:
    """The k best items of every query; side: what the queries are.

    The gallery's vectors are those of the score where it factors; where it does not, `score_all` scores every pair.
    """
    asked = index_vectors(score, queries.float(), gallery=False, side=side)
    if asked is None:
        return score_all(score, queries, gallery, k, side)
    parts = []
    step = max(1, ELEMENTS // (queries.mean.shape[1] * (2 * k + SPARE)))
    for start in range(0, len(asked), step):
        some = slice(start, start + step)
        parts.append(_nearest_of_some(score, queries.select(some), asked[some].contiguous(), gallery, k, side))
    return joined(parts, k)


def _nearest_of_some(
    score: Score, queries: Gaussian, asked: Tensor, gallery: GaussianArrays, k: int, side: Side
) -> Found:
    """`nearest`, the candidates doubled for the queries for which they do not suffice."""
    total = len(gallery.mean) if gallery.alive is None else int(gallery.alive.sum())
    rows = torch.full((len(asked), k), -1)
    scores = torch.full((len(asked), k), -torch.inf, dtype=torch.float64)
    left, count = torch.arange(len(asked)), min(total, 2 * k + SPARE)
    while len(left) and total:
        near = candidates(asked[left].numpy(), gallery, count)
        some = queries.select(left)
        again = rescored(score, some, near.rows, gallery.gaussian, side)
        best = top(Found(near.rows, again), k)
        enough = torch.ones(len(left), dtype=torch.bool)
        if count < total:
            own = score.factors(some.to(torch.float64), side)
            assert own is not None
            error = error_bound(asked[left], gallery, near.scores[:, k - 1])
            enough = near.scores[:, -1] + own.offset + error < best.scores[:, -1]
        size = min(k, best.rows.shape[1])
        rows[left[enough], :size], scores[left[enough], :size] = best.rows[enough], best.scores[enough]
        left, count = left[~enough], min(total, 4 * count)
    return Found(rows, scores)


def candidates(asked: np.ndarray, gallery: GaussianArrays, count: int) -> Found:
    """The `count` largest inner products with the gallery's vectors in float32, (Q, P + 1) -> (Q, count), float64.

    count: at most the rows that are not deleted.
    """
    rows = torch.full((len(asked), 0), -1)
    scores = torch.full((len(asked), 0), -torch.inf, dtype=torch.float64)
    for some in gallery.blocks():
        is_whole = some[-1] - some[0] + 1 == len(some)  # and needs no copy
        vectors = np.ascontiguousarray(gallery.vector[slice(some[0], some[-1] + 1) if is_whole else some])
        found, places = faiss.knn(asked, vectors, min(len(some), count), metric=faiss.METRIC_INNER_PRODUCT)
        if (places < 0).any():  # NaN is never found
            raise ValueError(NOT_FINITE)
        rows = torch.cat([rows, torch.from_numpy(some[places])], 1)
        scores = torch.cat([scores, torch.from_numpy(found).double()], 1)
        best = scores.topk(min(count, scores.shape[1]), dim=1)
        scores, rows = best.values, rows.gather(1, best.indices)
    return Found(rows.where(~scores.isneginf(), -1), scores)


def error_bound(asked: Tensor, gallery: GaussianArrays, least: Tensor) -> Tensor:
    """How far above its float32 inner product the score of an item that does not lie far behind may be, (Q,) float64.

    A dot product of P + 1 terms is off by (P + 1) eps/2 sum |u_i v_i| in any order of summation (Jeannerod and Rump
    2013), and its factors were rounded, and summed, in float32: (P + 64) eps (|u| |v| + |b|) is more than both. Of |b|:
    an item whose b is below -2 (|u| |v| + |s|) scores less than s, the `least` that counts, whatever its rounding.
    """
    length = asked[:, :-1].double().norm(dim=1) * gallery.reach
    offset = torch.maximum(2 * (length + least.abs()), torch.tensor(gallery.lift, dtype=torch.float64))
    return (asked.shape[1] + 64) * 2.0**-23 * (length + offset)


def rescored(
    score: Score, queries: Gaussian, rows: Tensor, items_of: Callable[[np.ndarray], Gaussian], side: Side = "text"
) -> Tensor:
    """The scores of some items of each query in float64 (float32 where networks score), (Q, m); -inf where rows are -1.

    rows: (Q, m); items_of: rows (M,) -> Gaussian (M, D).
    """
    dtype = torch.float32 if any(True for _ in score.parameters()) else torch.float64
    queries, other = queries.to(dtype), other_side(side)
    asked = score.factors(queries, side)
    out = torch.empty(rows.shape, dtype=torch.float64)
    step = max(1, ELEMENTS // max(1, rows.shape[1] * queries.mean.shape[1]))
    for start in range(0, len(rows), step):
        some = rows[start : start + step]
        items = items_of(some.clamp(min=0).flatten().numpy()).to(dtype)
        if asked is not None:
            given = score.factors(items, other)
            assert given is not None
            products = asked.vector[start : start + step].unsqueeze(1) * given.vector.unflatten(0, some.shape)
            offsets = asked.offset[start : start + step].unsqueeze(1) + given.offset.unflatten(0, some.shape)
            out[start : start + step] = products.sum(-1) + offsets
            if out[start : start + step].isnan().any():
                raise ValueError(NOT_FINITE)
            continue
        for i in range(len(some)):
            own = items.select(slice(i * some.shape[1], (i + 1) * some.shape[1]))
            out[start + i] = all_scores(score, queries.select(slice(start + i, start + i + 1)), own, side)[0]
    return out.masked_fill(rows < 0, -torch.inf)


def all_scores(score: Score, queries: Gaussian, items: Gaussian, side: Side) -> Tensor:
    """Scores of queries with items, (Q, N): images stand first, as a score need not be symmetric."""
    with Steady():
        return score.pairwise(queries, items) if side == "image" else score.pairwise(items, queries).mT


def other_side(side: Side) -> Side:
    """What a score compares this side with."""
    return "text" if side == "image" else "image"


def score_all(score: Score, queries: Gaussian, gallery: GaussianArrays, k: int, side: Side = "text") -> Found:
    """The k best by scoring every pair, in bounded memory: what ranks any score."""
    dtype = torch.float32 if any(True for _ in score.parameters()) else torch.float64
    queries = queries.to(dtype)
    parts = []
    for start in range(0, len(queries.mean), 64):
        some = queries.select(slice(start, start + 64))
        found: list[Found] = []
        for rows in gallery._replace(block=max(1, PAIRS // len(some.mean))).blocks():
            values = all_scores(score, some, gallery.gaussian(rows).to(dtype), side).double()
            places = torch.from_numpy(rows).expand(len(some.mean), -1)
            found = [top(Found(*(torch.cat(x, 1) for x in zip(*found, (places, values)))), k)]
        parts.append(found[0] if found else Found(*(torch.empty(len(some.mean), 0) for _ in range(2))))
    return joined(parts, k)


def top(found: Found, k: int) -> Found:
    """The k best of each query's, equal scores by rising row: (Q, m) -> (Q, min(k, m))."""
    by_row = found.rows.argsort(dim=1, stable=True)
    order = found.scores.gather(1, by_row).argsort(dim=1, descending=True, stable=True)[:, :k]
    place = by_row.gather(1, order)
    return Found(found.rows.gather(1, place), found.scores.gather(1, place))


def joined(parts: Sequence[Found], k: int) -> Found:
    """Those of all queries, filled up to k."""
    rows, scores = [], []
    for part in parts:
        missing = k - part.rows.shape[1]
        rows.append(torch.nn.functional.pad(part.rows.long(), (0, missing), value=-1))
        scores.append(torch.nn.functional.pad(part.scores.double(), (0, missing), value=-torch.inf))
    return Found(torch.cat(rows), torch.cat(scores))


class Bucket(NamedTuple):
    """Rows of a gallery that have similar variances, and what bounds them, each (D,) float64."""

    gallery: GaussianArrays
    rows: np.ndarray
    mean_low: Tensor
    mean_high: Tensor
    log_low: Tensor
    log_high: Tensor
    centre: Tensor


def make_buckets(gallery: GaussianArrays, rows: int = ROWS) -> list[Bucket]:
    """Buckets of at most `rows` rows of a block, by their mean log variance. ValueError for points."""
    found = []
    for block in gallery.blocks():
        log_vars = gallery.gaussian(block).log_var.numpy()
        if np.isneginf(log_vars).any():
            raise ValueError("elk needs variances, and these are points: use csd or mean")
        order = block[np.argsort(log_vars.mean(1), kind="stable")]
        for start in range(0, len(order), rows):
            some = np.sort(order[start : start + rows])
            mean, log_var = gallery.gaussian(some).to(torch.float64)
            found.append(
                Bucket(gallery, some, mean.amin(0), mean.amax(0), log_var.amin(0), log_var.amax(0), log_var.mean(0))
            )
    return found


def bucket_bounds(queries: Gaussian, buckets: Sequence[Bucket]) -> Tensor:
    """The highest score that any item of each bucket may have, (Q, buckets)."""
    out, var = [], queries.var
    for bucket in buckets:
        outside = torch.relu(bucket.mean_low - queries.mean) + torch.relu(queries.mean - bucket.mean_high)
        out.append(_negative_elk(outside, var + bucket.log_high.exp(), var + bucket.log_low.exp()))
    return torch.stack(out, 1)


def _negative_elk(difference: Tensor, width: Tensor, least: Tensor) -> Tensor:
    """-1/2 sum_d [difference^2 / width + log least], (N, D) -> (N,); width, least: v_p + v_q.

    Equal rows get equal bits in any place: logaddexp has other last bits at the end of a block, exp and log do not.
    """
    return difference.square().div_(width).add_(least.log()).sum(1).mul_(-0.5)


def item_bounds(queries: Gaussian, items: Gaussian, bucket: Bucket) -> Tensor:
    """The highest score that each item of a bucket may have, (Q, n)."""
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


def nearest_by_elk(queries: Gaussian, buckets: Sequence[Bucket], k: int) -> tuple[Found, int, int]:
    """The k items of the highest -elk of every query, in the order of `score_all`; pairs bounded, and scored."""
    parts, bounded, scored = [], 0, 0
    for start in range(0, len(queries.mean), QUERIES):
        some = queries.select(slice(start, start + QUERIES)).to(torch.float64)
        best = Found(torch.full((len(some.mean), k), -1), torch.full((len(some.mean), k), -torch.inf).double())
        if buckets:
            bounds = bucket_bounds(some, buckets)
            for number in bounds.amax(0).argsort(descending=True).tolist():
                asked = torch.nonzero(bounds[:, number] >= best.scores[:, -1])[:, 0]
                if len(asked):
                    bounded += len(asked) * len(buckets[number].rows)
                    scored += _look_into(buckets[number], some, asked, best)
        parts.append(best)
    return joined(parts, k), bounded, scored


def _look_into(bucket: Bucket, queries: Gaussian, asked: Tensor, best: Found) -> int:
    """Score the items of a bucket that may be among the best of these queries, which change in place; how many."""
    k = best.rows.shape[1]
    items = bucket.gallery.gaussian(bucket.rows).to(torch.float64)
    bounds = item_bounds(queries.select(asked), items, bucket)
    first = torch.zeros_like(bounds, dtype=torch.bool)
    first.scatter_(1, bounds.topk(min(k, bounds.shape[1]), dim=1).indices, True)
    first &= bounds >= best.scores[asked, -1].unsqueeze(1)
    rows = torch.from_numpy(bucket.rows)
    count = _score(first, rows, items, queries, asked, best)
    rest = (bounds >= best.scores[asked, -1].unsqueeze(1)) & ~first
    return count + _score(rest, rows, items, queries, asked, best)


def _score(which: Tensor, rows: Tensor, items: Gaussian, queries: Gaussian, asked: Tensor, best: Found) -> int:
    """Score the pairs that are True in `which` (Q', n), and keep the best."""
    query, item = which.nonzero(as_tuple=True)
    values = torch.full(which.shape, -torch.inf, dtype=torch.float64)
    step, queries_var, items_var = max(1, ELEMENTS // queries.mean.shape[1]), queries.log_var[asked].exp(), items.var
    for start in range(0, len(query), step):
        i, j = query[start : start + step], item[start : start + step]
        width = queries_var[i] + items_var[j]
        values[i, j] = _negative_elk(queries.mean[asked[i]] - items.mean[j], width, width)
    if len(query):
        changed = torch.nonzero(which.any(1))[:, 0]
        own = asked[changed]
        new = rows.expand(len(own), -1), values[changed]
        found = Found(*(torch.cat([old[own], more], 1) for old, more in zip(best, new)))
        kept = top(found, best.rows.shape[1])
        best.rows[own], best.scores[own] = kept.rows.where(~kept.scores.isneginf(), -1), kept.scores
    return len(query)
