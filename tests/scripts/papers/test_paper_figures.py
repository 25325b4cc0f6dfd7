"""The paper's figures are computed from the embeddings: their samples, levels and roots."""

import numpy as np
import pytest
from PIL import Image
from report_stand_in import make_result

from prolip.gaussian import Gaussian
from prolip.hierarchy.levels import plot_differences, traces_by_level
from prolip.hierarchy.traversal import traverse
from studies.papers.figures import paper
from studies.papers.figures.paper import without_cells


def words_of(figure):
    """All texts of a figure and its parts."""
    return [text.get_text() for text in figure.findobj(lambda artist: hasattr(artist, "get_text")) if text.get_text()]


def pictures_of(figure):
    return [np.asarray(image.get_array()) for ax in figure.axes for image in ax.images]


@pytest.fixture(scope="module")
def result():
    return make_result(traces=[0.8, 0.4, 0.2, 0.1])


def test_the_figure_of_samples_shows_the_ends_with_their_uncertainties(result):
    figure = paper.certain_and_uncertain(result, drawings=3, texts=4)
    image, text = result.image.trace.numpy(), result.text.trace.numpy()
    words = words_of(figure)
    for i in [*np.argsort(text)[:4], *np.argsort(-text)[:4]]:
        assert f"{text[i]:.3g}" in words and any(result.table.texts[i] in said for said in words)
    shown = [*np.argsort(image)[:3], *np.argsort(-image)[:3]]
    wanted = [np.asarray(result.corpus.drawings[i].image()) for i in shown]
    assert all(np.array_equal(a, b) for a, b in zip(pictures_of(figure), wanted, strict=True))
    assert sum(f"\n{image[i]:.3g}" in said for i in shown for said in words) == 6


def test_corners_are_true_pairs_of_the_certain_and_the_uncertain_fifths(result):
    found = paper.corners(result, each=2, seed=1)
    assert [(x.image, x.text) for x in found] == [(i, t) for i in paper.ENDS for t in paper.ENDS]
    assert sum(len(x.drawings) for x in found) >= 5, "the corners are not empty"
    image, text = result.image.trace.numpy(), result.text.trace.numpy()
    for corner in found:
        for end, values, rows in ((corner.image, image, corner.drawings), (corner.text, text, corner.texts)):
            low, high = np.quantile(values, (0.22, 0.78))
            assert (values[rows] <= low).all() if end == "certain" else (values[rows] >= high).all()
        assert result.text_relation[corner.texts, corner.drawings].all()
        a, b = result.image.select(corner.drawings), result.text.select(corner.texts)
        wanted = (a.mean - b.mean).square().sum(1) + a.trace + b.trace
        np.testing.assert_allclose(corner.csd, wanted, rtol=1e-5)
    again = paper.corners(result, each=2, seed=1)
    assert all(np.array_equal(a.texts, b.texts) for a, b in zip(found, again))
    words = words_of(paper.pairs(result, each=2, seed=1))
    assert all(any(f"csd {d:.3g}" in said for said in words) for x in found for d in x.csd)


def test_larger_shares_erase_the_cells_of_smaller_ones_and_no_others():
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8))
    kept = np.ones((64, 64), bool)
    for share in (0.25, 0.5, 0.75):
        pixels = np.asarray(without_cells(image, share, 5))
        white = (pixels == 255).all(-1)
        assert white.mean() == pytest.approx(share) and np.array_equal(pixels[~white], np.asarray(image)[~white])
        assert (white | kept).all()
        cells = white.reshape(8, 8, 8, 8).mean((1, 3))
        assert set(cells.ravel().tolist()) == {0.0, 1.0}, "cells go as a whole"
        kept = ~white
    assert not np.array_equal(without_cells(image, 0.5, 5), without_cells(image, 0.5, 6))


def test_differences_of_levels_are_against_the_last():
    x = np.random.default_rng(0).normal(size=(50, 3))
    first, *others = plot_differences(traces_by_level(list(x.T)), "images").axes
    assert [ax.get_title("left") for ax in others] == [
        f"level {i} - last: > 0 for {(x[:, i] > x[:, 2]).mean():.0%}" for i in range(2)
    ]
    for i, ax in enumerate(others):
        assert sum(bar.get_height() for bar in ax.patches) == pytest.approx(1)
        left, right = ax.patches[0].get_x(), ax.patches[-1].get_x() + ax.patches[-1].get_width()
        difference = x[:, i] - x[:, 2]
        assert (left, right) == pytest.approx((difference.min(), difference.max()))
    assert [text.get_text() for text in first.get_legend().get_texts()] == ["level 0", "level 1", "last"]


def test_a_walk_is_the_traversals_path_with_its_root_and_the_truth(result):
    empty = Gaussian(result.text.mean.mean(0, keepdim=True), result.text.log_var[:1])
    found = traverse(result.image, result.text, empty, steps=9)
    chosen = paper.walks(result, found, most=4, seed=3)
    assert len(chosen) == 4 and [x.drawing for x in chosen] == sorted({x.drawing for x in chosen})
    for walk in chosen:
        concept = result.corpus.concepts[result.corpus.drawings[walk.drawing].concept]
        assert walk.met == tuple(result.table.texts[i] for i in found.path(walk.drawing))
        assert walk.root == result.table.texts[found.root_caption[walk.drawing]]
        own = {text for level in ("name", "keyword", "subgroup", "group") for text in concept.captions(level)}
        assert walk.root_is_true == (walk.root in own)
        assert walk.own == (concept.name, concept.keywords[0], concept.subgroup, concept.group)
    every = paper.walks(result, found, most=99)
    share = np.mean([walk.root_is_true for walk in every])
    assert len(every) == 22 and paper.true_roots(result, found) == pytest.approx(share) and share > 0
    words = words_of(paper.traversals(result, found, most=4, seed=3))
    assert any(f"matches {share:.0%}" in said for said in words)
    for walk in chosen:
        assert any(f"“{walk.root}”, {'' if walk.root_is_true else 'no '}match" in said for said in words)
