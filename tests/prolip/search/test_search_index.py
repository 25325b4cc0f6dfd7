"""Indexes on disk: what they find, as they grow, shrink, are opened again, and after their builder was killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator

import faiss
import pytest
import torch
from galleries import DIM, GALLERY, QUERIES, ROWS, brute_force, gaussians, parts_of

from forked import one_thread
from prolip.gaussian import Gaussian
from prolip.measures import inclusion_test, log_inclusion
from prolip.methods import find_score
from prolip.scores import CSDScore, TrueMatchScore
from prolip.search import store
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


# --- asking ----------------------------------------------------------------------------------------------------------
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


def test_wrong_questions_say_what_to_ask(folders, tmp_path):
    index = SearchIndex(folders / "ivf")
    with pytest.raises(ValueError, match=r"queries has the shape \(2, 8\), expected \(N, 16\)"):
        index.search(gaussians(2, 8))
    with pytest.raises(ValueError, match="give 1 or more"):
        index.search(QUERIES, 0)
    with pytest.raises(ValueError, match="points include nothing"):
        index.search_inclusion(Gaussian(QUERIES.mean, torch.full_like(QUERIES.mean, -torch.inf)))
    with pytest.raises(FileNotFoundError, match="no index in"):
        SearchIndex(tmp_path)
    (tmp_path / "index.json").write_text("{}")
    with pytest.raises(ValueError, match="describes no index"):
        SearchIndex(tmp_path)
    with pytest.raises(ValueError, match="'tree' is unknown: use one of flat, ivf, hnsw, pq"):
        IndexSpec("tree")


# --- growing and shrinking -------------------------------------------------------------------------------------------
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
    assert after["constant"] > before["constant"] and "rebuilding the approximate index" in caplog.text
    assert not (tmp_path / before["file"]).exists()
    assert recall(index.search(longer, 1, probe=ROWS).rows, torch.arange(ROWS, ROWS + 5).unsqueeze(1)) == 1


def test_keys_stand_once_and_unknown_ones_are_named(tmp_path):
    index = build(tmp_path)
    for name, first in (("b", ROWS - 1), ("c", 0)):
        with pytest.raises(ValueError, match="keys are in .* already or occur twice"):
            index.append(name, parts_of(QUERIES, first=first))
    assert len(index) == ROWS and not index.source("b")["done"]
    with pytest.raises(ValueError, match="1 of 2 keys are not in"):
        index.delete(["k1", "nothing"])
    index.delete(["k1"])
    with pytest.raises(ValueError, match="k1"):
        index.delete(["k1"])
    index.append("d", iter([Part([{"key": "k1"}], QUERIES.select(slice(1)), 1)]))  # a deleted key may come again
    assert index.search(QUERIES.select(slice(1)), 1).rows.item() == ROWS and len(index) == ROWS
    with pytest.raises(FileExistsError, match="holds an index already"):
        SearchIndex.create(tmp_path, CSDScore(), DIM)


def test_points_are_kept_without_variances(tmp_path):
    points = Gaussian(GALLERY.mean, torch.full_like(GALLERY.mean, -torch.inf))
    index = build(tmp_path, z=points)
    assert not (tmp_path / store.LOG_VAR).exists() and not (tmp_path / store.MEAN).exists()
    assert index.gaussians([3]).log_var.isneginf().all()
    asked = Gaussian(QUERIES.mean, torch.full_like(QUERIES.mean, -torch.inf))
    assert index.search(asked).rows.equal(
        (QUERIES.mean.double() @ GALLERY.mean.double().T).argsort(dim=1, descending=True)[:, :10]
    )


# --- killed ----------------------------------------------------------------------------------------------------------
def killed_while(work, is_there) -> None:
    """Run `work` in a process of its own, and kill it as soon as `is_there()`."""

    def alone() -> None:
        one_thread()
        work()

    process = multiprocessing.get_context("fork").Process(target=alone)
    process.start()
    end = time.monotonic() + 120
    while not is_there() and process.is_alive() and time.monotonic() < end:
        time.sleep(0.005)
    assert process.is_alive() and is_there()
    os.kill(process.pid, signal.SIGKILL)
    process.join()


def test_a_killed_build_goes_on_and_leaves_what_one_pass_leaves(tmp_path):
    whole = build(tmp_path / "whole", rows=300)
    index = SearchIndex.create(tmp_path / "broken", CSDScore(8.0, -3.0), DIM)

    def work() -> None:
        def slow() -> Iterator[Part]:
            for part in parts_of(GALLERY):
                time.sleep(0.05)
                yield part

        index.append("a", slow(), 300)

    killed_while(work, lambda: len(SearchIndex(tmp_path / "broken")) >= 300)
    for name in (store.VECTOR, store.ITEMS, store.ENDS):  # as if it had been killed while writing
        with (tmp_path / "broken" / name).open("ab") as file:
            file.write(b"some bytes")
    (tmp_path / "broken/keys-000009.run").write_bytes(b"some bytes")
    again = SearchIndex(tmp_path / "broken")
    start = again.source("a")["position"]
    assert start in (300, 600) and len(again) == start and not again.source("a")["done"]
    again.append("a", parts_of(GALLERY, start=start), 300)
    assert again.source("a")["done"]
    assert {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir() if path.name != "lock"} == {
        path.name: path.read_bytes() for path in (tmp_path / "broken").iterdir() if path.name != "lock"
    }
    assert again.search(QUERIES).rows.equal(whole.search(QUERIES).rows)
    assert again.items(range(ROWS)) == whole.items(range(ROWS))


# --- bytes -----------------------------------------------------------------------------------------------------------
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
