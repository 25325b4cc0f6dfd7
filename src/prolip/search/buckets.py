"""Exact search by the expected likelihood kernel, which has no factors: buckets of the variances, and bounds on them.

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

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from prolip.gaussian import Gaussian
from prolip.search.exact import ELEMENTS, Found, GaussianArrays, joined, top

#: Rows of a bucket; fewer bound tighter, more are fewer matrix products.
ROWS = 128
#: Queries at a time.
QUERIES = 64


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
            found.append(Bucket(gallery, some, mean.amin(0), mean.amax(0), log_var.amin(0), log_var.amax(0),
                                log_var.mean(0)))  # fmt: skip
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
