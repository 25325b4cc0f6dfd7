"""What the paper's figures show is computed from the embeddings: which samples, which levels, which roots."""

import numpy as np
import pytest
import torch
from PIL import Image
from report_stand_in import make_result

from prolip.gaussian import Gaussian
from prolip.hierarchy.levels import plot_differences, traces_by_level
from prolip.hierarchy.traversal import traverse
from prolip.prompts.bprw import Reweighing
from prolip.prompts.weights import PromptWeights
from prolip.scores import CSDScore
from studies.papers.figures import paper
from studies.papers.figures.paper import Pictures, without_cells


def words_of(figure):
    """All texts of a figure and its parts."""
    return [text.get_text() for text in figure.findobj(lambda artist: hasattr(artist, "get_text")) if text.get_text()]


def pictures_of(figure):
    return [np.asarray(image.get_array()) for ax in figure.axes for image in ax.images]


@pytest.fixture(scope="module")
def result():
    return make_result(traces=[0.8, 0.4, 0.2, 0.1])


def test_ends_are_the_least_and_most_uncertain_from_the_outside_in():
    x = np.array([3.0, 1.0, 2.0, 9.0, 5.0])
    found = paper.ends(x, 2)
    assert found["certain"].tolist() == [1, 2] and found["uncertain"].tolist() == [3, 4]
    all_of_them = paper.ends(x, 99)
    assert len(np.intersect1d(*all_of_them.values())) == 0 and len(all_of_them["certain"]) == 2


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


class Stub:
    """An embedder that reads the variance off the share of white, and the mean off the brightness of the rest."""

    score = CSDScore()

    @classmethod
    def embed_images(cls, images):
        return cls.encode_image(torch.stack([cls.preprocess(image) for image in images]))

    @staticmethod
    def preprocess(image):
        return torch.from_numpy(np.asarray(image.convert("RGB"), dtype=np.float32)).permute(2, 0, 1) / 255

    @staticmethod
    def encode_image(pixels):
        white = (pixels == 1).all(1).flatten(1).float().mean(1)
        mean = torch.nn.functional.normalize(torch.stack([pixels.mean((1, 2, 3)), torch.ones(len(pixels))], 1), dim=1)
        return Gaussian(mean, (4 * white - 5)[:, None].expand(-1, 2).clone())


def test_erased_drawings_are_levels_whose_original_is_last(result):
    made = Pictures.erased(Stub, result.corpus, seed=0)
    assert [np.asarray(made.picture(2, level)).shape for level in range(4)] == [(16, 16, 3)] * 4
    shares = [(np.asarray(made.picture(2, level)) == 255).all(-1).mean() for level in range(4)]
    assert shares == pytest.approx([0.75, 0.5, 0.25, 0])
    wanted = 2 * np.exp(4 * np.array([0.75, 0.5, 0.25, 0]) - 5)
    np.testing.assert_allclose(made.traces.values, np.tile(wanted, (len(result.corpus.drawings), 1)), rtol=1e-4)
    assert [x.rate for x in made.inclusions] == [1, 1, 1] and len(made.failures(5)) == 0
    titles = [ax.get_title("left") for ax in paper.inclusion(made).axes]
    assert [title for title in titles if title] == [f"last in level {i}: 100%" for i in range(3)]
    assert "0% of 22 images" in " ".join(words_of(paper.failures(made)))


def test_failures_are_those_with_the_least_inclusion_first():
    mean = torch.nn.functional.normalize(torch.ones(4, 3), dim=1)
    wide = [-1.0, -6.0, -2.0, -7.0]  # of level 0; the original has -3
    z = [Gaussian(mean, torch.tensor(wide)[:, None].expand(4, 3)), Gaussian(mean, torch.full((4, 3), -3.0))]
    shown = []

    def picture(row, level):
        shown.append((row, level))
        return Image.new("RGB", (4, 4), (60 * row, 0, 90 * level))

    made = Pictures(Stub, z, picture)
    assert made.failures(9).tolist() == [3, 1] and made.failures(1).tolist() == [3]
    figure = paper.failures(made)
    assert "50% of 4 images" in " ".join(words_of(figure)) and shown == [(3, 0), (1, 0), (3, 1), (1, 1)]
    assert len(pictures_of(figure)) == 4


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
    assert any(f"true of {share:.0%}" in said for said in words)
    for walk in chosen:
        assert any(f"“{walk.root}”, {'' if walk.root_is_true else 'not '}true" in said for said in words)


def weights_of(*names):
    """Of three prompts, the later ones with more weight in later classes."""
    table = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.5, 0.3], [0.1, 0.2, 0.7]], dtype=torch.float64)[: len(names)]
    templates = ("a {c}.", "my {c}.", "one {c}.")
    return PromptWeights(names, templates, table, "m", "f" * 32, Reweighing(5), "data", "d" * 32)


def test_prompts_stand_beside_drawings_of_their_class_with_most_weight_first(result):
    weights = weights_of("bird", "no such thing", "Fruit")
    chosen = paper.choose(weights, result, seed=2)
    assert [shown.row for shown in chosen] == [0, 2]
    for shown, name in zip(chosen, ("bird", "fruit")):
        own = [result.corpus.concepts[result.corpus.drawings[i].concept].subgroup for i in shown.drawings]
        assert own == [name] * paper.PICTURES and len(set(shown.drawings.tolist())) == paper.PICTURES
    assert [shown.prompts.tolist() for shown in chosen] == [[0, 1, 2], [2, 1, 0]]
    figure = paper.prompts_of_classes(weights, result, seed=2)
    bars = [ax for ax in figure.axes if ax.patches]
    assert [[bar.get_width() for bar in ax.patches] for ax in bars] == [[0.5, 0.3, 0.2], [0.7, 0.2, 0.1]]
    assert [label.get_text() for label in bars[1].get_yticklabels()] == ["one {c}.", "my {c}.", "a {c}."]
    assert [ax.lines[0].get_xdata()[0] for ax in bars] == [pytest.approx(1 / 3)] * 2
    assert len(pictures_of(figure)) == 10
    with pytest.raises(ValueError, match="no drawing is of any of the 1 classes"):
        paper.choose(weights_of("car"), result)
