"""Traces and inclusion by level, and PCME's studies, of Gaussians whose order is known."""
import numpy as np
import pytest
import torch
from kinds_corpus import corpus_of
from test_entailment import gaussians

from prolip.data.emoji import Concept
from prolip.gaussian import Gaussian
from prolip.hierarchy import ambiguity, figures
from prolip.hierarchy.levels import format_levels, inclusion_by_level, traces_by_level
from prolip.measures import log_inclusion
from prolip.utils.style import write


def nested(rows=20, levels=4):
    """The same means with variances that fall from level to level."""
    z = gaussians(rows)
    return [Gaussian(z.mean, torch.full_like(z.mean, -2.0 - i)) for i in range(levels)]


def test_the_original_is_in_each_level_above_and_in_none_below():
    found = inclusion_by_level(nested())
    assert [x.level for x in found] == [0, 1, 2] and all(x.rate == 1 for x in found)
    assert found[0].h.mean() > found[2].h.mean() > 0
    assert all(x.rate == 0 for x in inclusion_by_level(nested()[::-1]))
    one, last = gaussians(8), gaussians(8, seed=3)
    (mixed,) = inclusion_by_level([one, last])
    wanted = log_inclusion(last, one) - log_inclusion(one, last)
    assert np.allclose(mixed.h, wanted.numpy(), atol=1e-3) and mixed.rate == float((wanted > 0).float().mean())


def test_traces_by_level_are_correlated_with_it():
    down = traces_by_level([z.trace.numpy() for z in nested()])
    assert down.spearman == pytest.approx(-1) and down.in_order == 1
    up = traces_by_level([z.trace.numpy() for z in nested()[::-1]])
    assert up.spearman == pytest.approx(1) and up.in_order == 0
    assert np.isnan(traces_by_level([np.ones(3)] * 2).spearman)
    text = format_levels(inclusion_by_level(nested()), down, "images")
    assert "20 chains" in text and text.count("H > 0 for 100.0%") == 3


def test_points_and_single_levels_have_no_inclusion():
    z = gaussians(3)
    with pytest.raises(ValueError, match="1 levels"):
        inclusion_by_level([z])
    with pytest.raises(ValueError, match="points"):
        inclusion_by_level([Gaussian(z.mean, torch.full_like(z.mean, -torch.inf))] * 2)


def test_erasing_more_erases_the_same_cells_and_others():
    pixels = torch.rand(5, 3, 32, 32) + 0.1
    before = torch.zeros(5, 3, 32, 32, dtype=torch.bool)
    for share in ambiguity.ERASED:
        out = ambiguity.erase(pixels, share, torch.Generator().manual_seed(3))
        gone = out == 0
        assert torch.equal(out[~gone], pixels[~gone]) and (gone | ~before).all()
        assert gone.float().mean((1, 2, 3)).tolist() == pytest.approx([share] * 5)
        before = gone
    assert len({tuple(row.flatten().tolist()) for row in gone}) == 5, "each image has cells of its own"
    assert (ambiguity.erase(pixels, 1.0, torch.Generator()) == 0).all()
    with pytest.raises(ValueError, match="share 1.5"):
        ambiguity.erase(pixels, 1.5, torch.Generator())


def test_mixing_goes_from_the_first_to_half_of_each():
    pixels = torch.rand(4, 3, 8, 8)
    assert torch.equal(ambiguity.mix(pixels, 0.0), pixels)
    wanted = 0.7 * pixels + 0.3 * pixels[[1, 2, 3, 0]]
    assert torch.allclose(ambiguity.mix(pixels, 0.3), wanted, atol=1e-6)


def test_dropping_more_words_keeps_fewer_of_the_same_in_order():
    text, kept = "one two three four five six seven", None
    for share, count in ((0.0, 7), (0.2, 6), (0.4, 4), (0.6, 3), (0.8, 1), (1.0, 1)):
        words = ambiguity.drop_words(text, share, np.random.default_rng(1)).split()
        assert len(words) == count and words == [word for word in text.split() if word in words]
        assert kept is None or set(words) <= set(kept)
        kept = words
    assert ambiguity.long_caption(Concept("1", "red cat", ("cat", "big pet"), "s", "g")) == "red cat big pet"


def test_a_study_says_how_uncertainty_rises_and_what_includes_the_original():
    x = np.array([[1.0, 2.0, 4.0], [2.0, 1.0, 5.0], [3.0, 3.0, 6.0]])
    study = ambiguity.Study("erase", (0.0, 0.4, 0.8), x, np.array([[0.0, 0, 0], [1, -1, 1], [1, 1, -2.0]]))
    assert study.spearman == pytest.approx((1 + 0.5 + 1) / 3)
    assert study.risen.tolist() == pytest.approx([0, 2 / 3, 1])
    assert np.isnan(study.rate[0]) and study.rate[1:].tolist() == pytest.approx([2 / 3, 2 / 3])
    assert "Spearman of uncertainty with strength +0.833" in ambiguity.format_study(study)
    points = ambiguity.Study("mix", (0.0, 0.5), np.zeros((2, 3)), np.full((2, 3), np.nan))
    assert np.isnan(points.rate).all() and np.isnan(points.spearman)


def test_a_corpus_without_words_or_drawings_is_refused():
    short = corpus_of(drawings=False)
    with pytest.raises(ValueError, match="five words"):
        ambiguity.study_texts(None, short)
    with pytest.raises(ValueError, match="0 drawings"):
        ambiguity.study_images(None, short)


def test_figures_are_written_as_pixels_and_as_vectors(tmp_path):
    levels = nested()
    traces, studies = traces_by_level([z.trace.numpy() for z in levels]), ambiguity.Study(
        "drop", (0.0, 0.5), np.array([[1.0, 2.0], [2.0, 3.0]]), np.array([[0.0, 0.0], [1.0, -1.0]])
    )
    drawn = {
        "a": figures.trace_by_level(traces, "texts"), "b": figures.inclusion_by_level(inclusion_by_level(levels)),
        "c": figures.ambiguity({"one": [studies], "two": [studies]}),
    }  # fmt: skip
    for name, figure in drawn.items():
        png, svg = write(figure, tmp_path / "figures", name)
        assert png.read_bytes()[:4] == b"\x89PNG" and b"<svg" in svg.read_bytes()
    assert [ax.get_title("left") for ax in drawn["b"].axes] == [f"last in level {i}: 100%" for i in range(3)]
    assert len(drawn["c"].axes[0].get_lines()) == 3, "both models, and the line of no change"
