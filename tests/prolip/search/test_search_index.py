"""Indexes on disk: what they find, as they grow, shrink, are opened again, and after their builder was killed."""

from __future__ import annotations

import faiss
import pytest
import torch
from galleries import DIM, GALLERY, QUERIES, ROWS, brute_force, gaussians, parts_of

from prolip.gaussian import Gaussian
from prolip.measures import inclusion_test, log_inclusion
from prolip.methods import find_score
from prolip.scores import CSDScore, TrueMatchScore
from prolip.search.ann import KINDS, IndexSpec
from prolip.search.index import Part, SearchIndex
from prolip.search.query import answers_of


def build(folder, score=None, kind: str = "flat", z: Gaussian = GALLERY, rows: int = 400, **settings) -> SearchIndex:
    index = SearchIndex.create(folder, score or CSDScore(8.0, -3.0), z.mean.shape[1], IndexSpec(kind, **settings))
    index.append("a", parts_of(z), rows)
    index.finish()
    return index


def recall(found: torch.Tensor, want: torch.Tensor) -> float:
    return float((found.unsqueeze(2) == want.unsqueeze(1)).any(1).float().mean())


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """An index of every kind."""
    folder = tmp_path_factory.mktemp("kinds")
    for kind in KINDS:
        build(folder / kind, kind=kind)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_finds_nearly_all_and_with_all_effort_what_brute_force_finds(folders, kind):
    index = SearchIndex(folders / kind)
    want = brute_force(index.score, QUERIES, GALLERY, 10)
    found = index.search(QUERIES)
    assert recall(found.rows, want) > (0.999 if kind == "flat" else 0.8)
    assert recall(index.search(QUERIES, probe=ROWS, rerank=ROWS).rows, want) > 0.999
    assert index.search(QUERIES, exactly=True).rows.equal(want)
    scores = index.score.pairwise(QUERIES.to(torch.float64), GALLERY.to(torch.float64))
    torch.testing.assert_close(found.scores, scores.gather(1, found.rows), rtol=0, atol=1e-5)
    assert [item["path"] for item in index.items(found.rows[3].tolist())] == [f"p{row}.png" for row in found.rows[3]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["elk", "bhattacharyya"])
def test_scores_without_factors_rank_what_csd_has_chosen(tmp_path, kind, name):
    index = build(tmp_path, find_score(name)(), kind)
    want = brute_force(index.score, QUERIES, GALLERY, 10)
    assert index.search(QUERIES, exactly=True).rows.equal(want)
    found = index.search(QUERIES, rerank=ROWS, probe=ROWS)
    assert recall(found.rows, want) > 0.999
    few = index.search(QUERIES, rerank=30, probe=ROWS)
    near = index.search(QUERIES, rerank=30)
    assert recall(near.rows, want) > 0.2 and few.scores[:, 0].isfinite().all()
    if kind == "flat":
        chosen = brute_force(CSDScore(), QUERIES, GALLERY, 30)
        assert all(set(row) <= set(some) for row, some in zip(few.rows.tolist(), chosen.tolist()))


def test_a_score_of_images_and_texts_is_asked_from_the_other_side(tmp_path):
    score = TrueMatchScore(3.0, 0.1, 50, 9, 20.0, -9.0)
    texts = SearchIndex.create(tmp_path / "texts", score, DIM, side="text")
    images = SearchIndex.create(tmp_path / "images", score, DIM, side="image")
    for index in (texts, images):
        index.append("a", parts_of(GALLERY))
    by_text = score.pairwise(QUERIES.to(torch.float64), GALLERY.to(torch.float64))
    assert texts.search(QUERIES).rows.equal(by_text.argsort(dim=1, descending=True)[:, :10])
    by_image = score.pairwise(GALLERY.to(torch.float64), QUERIES.to(torch.float64)).mT
    found = images.search(QUERIES)
    assert found.rows.equal(by_image.argsort(dim=1, descending=True)[:, :10])
    torch.testing.assert_close(found.scores, by_image.gather(1, found.rows))
    assert not found.rows.equal(texts.search(QUERIES).rows)


def test_wider_and_narrower_pass_the_test_and_are_ranked_by_inclusion(folders):
    index = SearchIndex(folders / "flat")
    for wider in (True, False):
        found = index.search_inclusion(QUERIES, 5, wider, rerank=300)
        near = brute_force(index.score, QUERIES, GALLERY, 300)
        for i in range(len(near)):
            query, items = (z.to(torch.float64) for z in (QUERIES.select([i]), GALLERY.select(near[i])))
            pair = (query, items) if wider else (items, query)
            kept = inclusion_test(*pair) > 0
            best = near[i][kept][log_inclusion(*pair)[kept].argsort(descending=True)][:5]
            assert found.rows[i].tolist() == best.tolist() + [-1] * (5 - len(best))
    assert (found.rows[:, 0] >= 0).any()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_added_is_found_and_what_is_deleted_is_not(tmp_path, kind):
    index = build(tmp_path, kind=kind)
    more = gaussians(200, DIM, 7, 0.7, -5.0)
    index.append("b", parts_of(more, first=ROWS))
    if kind != "flat":
        with pytest.raises(ValueError, match="incomplete .1500 of 1700 rows"):
            index.search(QUERIES)
    index.finish()
    whole = Gaussian(*(torch.cat(x) for x in zip(GALLERY, more)))
    want = brute_force(index.score, more, whole, 1)
    assert recall(SearchIndex(tmp_path).search(more, 10, probe=ROWS).rows[:, :1], want) > 0.9
    gone = brute_force(index.score, QUERIES, whole, 2).flatten().unique()
    index.delete([f"k{row}" for row in gone.tolist()])
    kept = torch.tensor(sorted(set(range(ROWS + 200)) - set(gone.tolist())))
    for again in (index, SearchIndex(tmp_path)):
        found = again.search(QUERIES, 10, probe=ROWS, rerank=500)
        assert recall(found.rows, kept[brute_force(index.score, QUERIES, whole.select(kept), 10)]) > 0.98
        assert not set(found.rows.flatten().tolist()) & set(gone.tolist()) and len(again) == len(kept)


def test_an_item_beyond_all_others_has_the_index_made_anew(tmp_path, caplog):
    index = build(tmp_path, kind="ivf")
    before = index.store.values["near"]
    longer = Gaussian(3 * QUERIES.mean[:5], QUERIES.log_var[:5])
    index.append("b", parts_of(longer, first=ROWS))
    index.finish()
    after = index.store.values["near"]
    assert after["constant"] > before["constant"] and "Rebuilding the approximate index" in caplog.text
    assert not (tmp_path / before["file"]).exists()
    assert recall(index.search(longer, 1, probe=ROWS).rows, torch.arange(ROWS, ROWS + 5).unsqueeze(1)) == 1


def test_keys_stand_once_and_unknown_ones_are_named(tmp_path):
    index = build(tmp_path)
    for name, first in (("b", ROWS - 1), ("c", 0)):
        with pytest.raises(ValueError, match="keys are already in .* or occur twice"):
            index.append(name, parts_of(QUERIES, first=first))
    assert len(index) == ROWS and not index.source("b")["done"]
    with pytest.raises(ValueError, match="1 of 2 keys are not in"):
        index.delete(["k1", "nothing"])
    index.delete(["k1"])
    with pytest.raises(ValueError, match="k1"):
        index.delete(["k1"])
    index.append("d", iter([Part([{"key": "k1"}], QUERIES.select(slice(1)), 1)]))  # a deleted key may come again
    assert index.search(QUERIES.select(slice(1)), 1).rows.item() == ROWS and len(index) == ROWS
    with pytest.raises(FileExistsError, match="already has an index"):
        SearchIndex.create(tmp_path, CSDScore(), DIM)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "flat"])
def test_the_planned_bytes_of_an_item_are_those_that_faiss_writes(tmp_path, kind):
    sizes = {}
    for rows in (1000, ROWS):
        index = build(tmp_path / str(rows), kind=kind, z=GALLERY.select(slice(rows)), lists=8)
        sizes[rows] = len(faiss.serialize_index(index._read()))
    planned = IndexSpec(kind).memory_per_item(DIM + 1)
    assert (sizes[ROWS] - sizes[1000]) / (ROWS - 1000) == pytest.approx(planned, rel=0.1)


def test_answers_mean_what_the_units_of_the_other_side_say(tmp_path):
    """An image fits a share of the texts, a text a share of the images."""
    score = TrueMatchScore(0.4, 0.1, 5000, 9, 10.0, -5.0)
    for side, other in (("image", "texts"), ("text", "images")):
        index = SearchIndex.create(tmp_path / side, score, DIM, side=side)
        z = Gaussian(GALLERY.mean[:4], GALLERY.log_var[:4] - 4)
        index.append("a", parts_of(z))
        found = index.search(QUERIES.select([0]), 3)
        (answers,) = answers_of(index, found, [True], QUERIES.select([0]), None)
        trace = z.trace[found.rows[0]]
        assert [x.share for x in answers] == pytest.approx(score.units.share(trace, other).tolist())
        assert [x.bits for x in answers] == pytest.approx(score.units.information(trace, other, bits=True).tolist())
