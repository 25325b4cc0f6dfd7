"""Flat and bucket search: the order of brute force, for any variances, blocks and deletions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from galleries import arrays_of, brute_force, gaussians

from prolip.gaussian import Gaussian
from prolip.measures import pairwise_elk
from prolip.methods import find_score
from prolip.scores import TrueMatchScore, index_vectors
from prolip.search.exact import (
    bucket_bounds,
    candidates,
    error_bound,
    item_bounds,
    make_buckets,
    nearest,
    nearest_by_elk,
    score_all,
)

SCORES = {name: find_score(name)() for name in ("csd", "mean", "wasserstein2", "elk")}
SCORES["true_match"] = TrueMatchScore(0.4, 0.1, 50, 9)


def found_by(name: str, queries: Gaussian, gallery: Gaussian, k: int, block: int):
    arrays = arrays_of(SCORES[name], gallery, block)
    if name == "elk":
        return nearest_by_elk(queries, make_buckets(arrays, 64), k)[0]
    return nearest(SCORES[name], queries, arrays, k)


@pytest.mark.parametrize("name", SCORES)
def test_thousands_of_queries_have_the_order_of_brute_force(name):
    gallery, queries = gaussians(500, 8, 0), gaussians(1_500 if name == "elk" else 10_000, 8, 1)
    want = brute_force(SCORES[name], queries, gallery, 10)
    assert found_by(name, queries, gallery, 10, 150).rows.equal(want)


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("level, spread", [(-30.0, 0.5), (-9.0, 2.0), (-3.0, 6.0), (9.0, 1.0)])
def test_extreme_variances_keep_the_order(name, level, spread):
    gallery, queries = (gaussians(300, 10, seed, spread, level) for seed in (0, 1))
    found = found_by(name, queries, gallery, 7, 100)
    assert found.rows.equal(brute_force(SCORES[name], queries, gallery, 7))


@pytest.mark.parametrize("name", ["elk", "kl", "js", "bhattacharyya", "log_inclusion", "inclusion_test"])
def test_copies_anywhere_have_equal_bits_at_every_width(name):
    """Equal bits sort copies by rising row: functions of PyTorch have other last bits at the end of a block."""
    score = find_score(name)()
    for dim in (*range(1, 10), 16, 17, 19):
        queries, gallery, copies = gaussians(5, dim, 1), gaussians(60, dim, 0), [3, 20, 21, 40, 59]
        for x in gallery:
            x[copies] = x[copies[0]].clone()
        arrays = arrays_of(None, gallery, 17)
        every = score_all(score, queries, arrays, 60)
        sizes = (1, 7, 64) if name == "elk" else ()  # of buckets
        for rows, scores in [every, *(nearest_by_elk(queries, make_buckets(arrays, n), 60)[0] for n in sizes)]:
            assert rows.sort(1).values.equal(torch.arange(60).expand(5, -1))
            place = rows.argsort(1)[:, copies]
            assert place.equal(place[:, :1] + torch.arange(5)), (dim, place)
            own = scores.gather(1, place)
            assert own.equal(own[:, :1].expand(-1, 5))


def test_an_item_in_a_bucket_of_copies_comes_before_its_later_copies():
    """The bound of a bucket of copies is their very score: it may hold answers where it equals the k-th score."""
    for dim in (2, 5, 16):
        item, queries = gaussians(1, dim, 3), gaussians(40, dim, 4)
        wide = Gaussian(item.mean, item.log_var + 1)
        pure, mixed = [Gaussian(*(x.expand(2, -1) for x in item))], [wide, item]
        gallery = Gaussian(*(torch.cat(x) for x in zip(*pure, *mixed)))
        arrays = arrays_of(None, gallery, 2)
        for k in (1, 2, 3):
            best = nearest_by_elk(queries, make_buckets(arrays, 2), k)[0]
            assert best.rows.equal(score_all(SCORES["elk"], queries, arrays, k).rows)
            assert [row for row in best.rows[0].tolist() if row != 2][:3] == [0, 1, 3][: k - (2 in best.rows[0])]


@pytest.mark.parametrize("name", ["csd", "true_match"])  # of which a query adds less, or more, than 0 to all scores
def test_near_items_that_float32_cannot_tell_apart_are_ranked_in_float64(name):
    g = torch.Generator().manual_seed(0)
    mean = F.normalize(torch.randn(1, 16, generator=g) + 3e-7 * torch.randn(3000, 16, generator=g), dim=1)
    gallery = Gaussian(mean, torch.full_like(mean, -4.0))
    queries, score = gaussians(50, 16, 5), SCORES[name]
    arrays = arrays_of(score, gallery, 1000)
    want = brute_force(score, queries, gallery, 10)
    asked = index_vectors(score, queries, gallery=False, side="text")
    assert not candidates(asked.numpy(), arrays, 10).rows.equal(want)  # what float32 says
    assert nearest(score, queries, arrays, 10).rows.equal(want)


def test_deleted_rows_take_no_candidates_places():
    """Float32 cannot distinguish 1,500 near-equal rows, and most of those that it finds first are deleted."""
    g = torch.Generator().manual_seed(0)
    mean = F.normalize(torch.randn(1, 16, generator=g) + 1e-6 * torch.randn(1500, 16, generator=g), dim=1)
    gallery, queries, score = Gaussian(mean, torch.full_like(mean, -4.0)), gaussians(4, 16, 5), SCORES["csd"]
    asked = index_vectors(score, queries, gallery=False).numpy()
    whole = arrays_of(score, gallery)
    alive = np.ones(1500, dtype=bool)
    alive[candidates(asked, whole, 900).rows[0].numpy()] = False
    kept = torch.from_numpy(np.flatnonzero(alive))
    found = nearest(score, queries, whole._replace(alive=alive), 5)
    assert found.rows.equal(kept[brute_force(score, queries, gallery.select(kept), 5)])
    near = candidates(asked, whole._replace(alive=alive), 200).rows
    assert np.isin(near.numpy(), kept.numpy()).all()


@pytest.mark.parametrize("name", ["bhattacharyya", "log_inclusion", "kl"])
@pytest.mark.parametrize("side", ["image", "text"])
def test_every_other_score_is_searched_pair_by_pair(name, side):
    score, gallery, queries = find_score(name)(), gaussians(90, 6, 0), gaussians(70, 6, 1)
    z, w = queries.to(torch.float64), gallery.to(torch.float64)
    scores = score.pairwise(z, w) if side == "image" else score.pairwise(w, z).mT
    found = nearest(score, queries, arrays_of(score, gallery, 40), 5, side)
    assert found.rows.equal(scores.argsort(1, descending=True)[:, :5])
    torch.testing.assert_close(found.scores, scores.sort(1, descending=True).values[:, :5])


@pytest.mark.parametrize("level, spread", [(-30.0, 0.5), (-9.0, 2.0), (-3.0, 6.0), (9.0, 1.0)])
def test_no_score_is_above_the_bound_of_its_item_or_bucket(level, spread):
    gallery, queries = (gaussians(300, 10, seed, spread, level).to(torch.float64) for seed in (0, 1))
    arrays = arrays_of(None, gallery.float(), 120)
    gallery = gallery.float().to(torch.float64)
    made = make_buckets(arrays, 32)
    bounds, scores = bucket_bounds(queries, made), -pairwise_elk(queries, gallery)
    for number, bucket in enumerate(made):
        items = bucket.gallery.gaussian(bucket.rows).to(torch.float64)
        own = scores[:, torch.from_numpy(bucket.rows)]
        assert (own <= item_bounds(queries, items, bucket) + 1e-12 * own.abs()).all()
        assert (own.amax(1) <= bounds[:, number] + 1e-12 * bounds[:, number].abs()).all()


def test_most_pairs_are_never_scored_where_variances_differ():
    gallery, queries = gaussians(4000, 16, 0, 2.0, -4.0), gaussians(200, 16, 1, 0.5, -4.0)
    found, scored = nearest_by_elk(queries, make_buckets(arrays_of(None, gallery), 64), 10)
    assert scored < 0.15 * 800_000
    assert found.rows.equal(brute_force(SCORES["elk"], queries, gallery, 10))


def test_the_error_bound_is_above_what_float32_loses():
    queries, gallery, score = gaussians(50, 300, 0), gaussians(400, 300, 1), SCORES["csd"]
    asked, arrays = index_vectors(score, queries, gallery=False), arrays_of(score, gallery)
    near = candidates(asked.numpy(), arrays, 400)
    exact = score.pairwise(queries.to(torch.float64), gallery.to(torch.float64)) + 0.5 * queries.trace.double()[:, None]
    off = (near.scores - exact.gather(1, near.rows)).abs().amax(1)
    assert (off < error_bound(asked, arrays, near.scores[:, 9])).all() and (off > 0).all()
