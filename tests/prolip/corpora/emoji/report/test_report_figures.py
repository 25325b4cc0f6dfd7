"""The figures show the numbers they are given, and ellipses hold what they should."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from matplotlib.collections import LineCollection, PathCollection
from report_stand_in import make_result, with_doubt, with_units, write_run

from prolip.corpora.emoji.report import figures, page, pca, runs, uncertainty
from prolip.corpora.emoji.uncertainty import matches_metrics
from prolip.evaluation.metrics.calibration import reliability
from prolip.measures.plane import place


@pytest.fixture(scope="module")
def result():
    return make_result(traces=[0.8, 0.4, 0.2, 0.1])


def test_expected_numbers_and_their_intervals_stand_where_units_have_them_and_nowhere_without():
    result = make_result(traces=[0.8, 0.4, 0.2, 0.1])
    assert figures.expected_matches(result) is None and uncertainty.read_all(result)["expected"] == ""
    result = with_units(result)
    (axes,) = figures.expected_matches(result).axes
    drawn = np.concatenate([dots.get_offsets() for dots in axes.collections if isinstance(dots, PathCollection)])
    shown = result.text_relation.sum(1) > 0
    wanted = len(result.corpus.drawings) * np.exp(result.text.trace.numpy()[shown] / 0.1) / 5000
    np.testing.assert_allclose(np.sort(drawn[:, 1]), np.sort(wanted), rtol=1e-4)
    true, expected = result.text_relation.sum(1), result.expected_matches
    (diamonds,) = (line for line in axes.lines if line.get_label() == "mean of a group")
    group = np.floor(np.log2(np.maximum(expected, 0.5)))
    groups = [rows for rows in (group == k for k in np.unique(group)) if rows.sum() >= 5 and true[rows].any()]
    means = [(true[rows].mean(), expected[rows].mean()) for rows in groups]
    np.testing.assert_allclose(diamonds.get_xydata().reshape(-1, 2), np.reshape(means, (-1, 2)), rtol=1e-5)
    measured = matches_metrics(result.expected_matches, result.text_relation.sum(1))
    said = uncertainty.read_all(result)["expected"]
    assert f"Here {measured['matches/within_factor_2']:.0%} of the texts are in the band" in said
    assert f"could reach {measured['matches/chance_within_factor_2']:.0%}" in said and "a group about 3 in 5" in said
    result = with_doubt(make_result(traces=[0.8, 0.4, 0.2, 0.1]))
    (axes,) = figures.expected_matches(result).axes
    (lines,) = (drawn for drawn in axes.collections if isinstance(drawn, LineCollection))
    ends = np.array([segment[:, 1] for segment in lines.get_segments()])
    expected = result.expected_matches[result.text_relation.sum(1) > 0]
    np.testing.assert_allclose(ends, np.stack([expected / 2, expected * 2], 1), rtol=1e-5)
    result.metrics["matches/inside_interval"] = 0.875
    assert "For 88% of the texts the thin line contains the true number." in uncertainty.read_all(result)["expected"]


def test_reliability_of_first_captions_stands_beside_that_without_doubt():
    result = with_doubt(make_result(noise=2.5, traces=[0.8, 0.4, 0.2, 0.1]))
    axes = figures.reliability(result).axes[0]
    scores = result.score.pairwise(result.image, result.text)
    (best, item), true = scores.max(1), torch.from_numpy(result.text_relation.T)
    right, own, d = true[torch.arange(len(item)), item], torch.sigmoid(20 * best - 9), result.doubt
    share = result.score.units.share(result.text.trace)[item]
    labels = [line.get_label() for line in axes.lines]
    for name, p in (("adjusted", (1 - d) * own + d * share), ("unadjusted", own)):
        found = reliability(p, right)
        line = axes.lines[labels.index(f"{name}  (ECE {found.ece:.3g})")]
        shown = np.isfinite(line.get_xdata())
        np.testing.assert_allclose(line.get_xdata()[shown], found.probability[found.counts > 0], rtol=1e-5)
        np.testing.assert_allclose(line.get_ydata()[shown], found.frequency[found.counts > 0], rtol=1e-5)
    assert figures.reliability(replace(result, read={})) is None


def test_refusal_draws_the_errors_of_what_is_named_by_everything_that_the_model_knows(result):
    wrong = ~result.rankings["names"][0].hit(1).numpy()
    always = ["top score", "trace of the drawing"]
    for made, names in ((result, always), (with_units(result), ["answer's probability", *always])):
        (axes,) = figures.refused(made).axes
        labels = [line.get_label() for line in axes.lines]
        assert [label.split("  ")[0] for label in labels] == [*names, "random", "oracle"]
        assert axes.get_title(loc="left") == "Naming 22 drawings, refusing the least certain"
        by_trace = axes.lines[names.index("trace of the drawing")]
        order = result.image.trace.numpy().argsort(kind="stable")
        wanted = wrong[order].cumsum() / np.arange(1, 23)
        drawn = by_trace.get_ydata()
        np.testing.assert_allclose(drawn, wanted[-len(drawn) :])


def test_an_ellipse_holds_the_share_of_its_gaussian_in_the_plane(result, monkeypatch):
    kept = []
    monkeypatch.setattr(pca, "place", lambda *given: kept.append(given) or place(*given))
    (axes,) = pca.pca(result).axes
    ((plane, z),) = kept
    points = (z.sample(4000, generator=torch.Generator().manual_seed(1)).double() - plane.centre) @ plane.axes.mT
    assert len(axes.patches) == 4 * len(z.mean)
    for i, patch in enumerate(axes.patches[::2]):
        inside = patch.get_path().transformed(patch.get_patch_transform()).contains_points(points[:, i // 2].numpy())
        assert inside.mean() == pytest.approx(1 - math.exp(-((2 - i % 2) ** 2) / 2), abs=0.03)


def test_learning_curves_draw_every_term(tmp_path):
    run = runs.read(write_run(tmp_path / "demo"))
    drawn = figures.learning_curves(run)
    panels = {axes.get_title(loc="left"): axes for axes in drawn.axes if axes.get_visible()}
    models = {"Mean trace", "Logit scale a", "Logit bias b", "Learning rate"}
    assert set(panels) == {"Loss", "Inclusion terms (unweighted)", "VIB (unweighted)"} | models
    (scale,) = panels["Logit scale a"].lines
    assert scale.get_ydata()[-1] == 22.0 and scale.get_xdata()[-1] == 12
    assert [line.get_label() for line in panels["Mean trace"].lines] == ["image", "text"]
    for axes in panels.values():
        dashes = [str(line._unscaled_dash_pattern) for line in axes.lines]
        assert len(set(dashes)) == len(dashes), "lines are told apart without their colours"
    short = runs.RunFolder(tmp_path, train=run.train[:1])
    assert figures.learning_curves(short) is None


def test_evaluations_draw_each_main_metric_and_training_rows_beside_validation(tmp_path):
    def line(i):
        found = {"step": i, "mine/mean_recall@1": i / 100, "mine/own/mean_recall@1": 0.5, "mine/i2t/R@1": 0.5}
        found |= {"mine/pairs": 40.0, "mine/pairs_R@1": 0.1, "mine/train_pairs_R@1": i / 10}
        return found | {"ema/mine/mean_recall@1": i / 200, "birds/acc1": 0.3}

    run = runs.RunFolder(tmp_path, evals=[line(2), line(4), line(8)])
    shown = [ax for ax in figures.evaluations(run).axes if ax.get_visible()]
    lines = [{line.get_label(): list(line.get_ydata()) for line in ax.lines} for ax in shown]
    drawn = {ax.get_title(loc="left"): of_ax for ax, of_ax in zip(shown, lines)}
    sets = {"mine/mean_recall@1": [0.02, 0.04, 0.08], "ema/mine/mean_recall@1": [0.01, 0.02, 0.04]}
    sets["birds/acc1"] = [0.3] * 3
    pairs = {"training rows": [0.2, 0.4, 0.8], "validation": [0.1] * 3}
    assert drawn == {"Test sets": sets, "R@1 among 40 pairs: mine": pairs}
    assert figures.evaluations(runs.RunFolder(tmp_path, evals=run.evals[:1])) is None
    said = page.render(run, {"evaluations": b""})
    assert "80.0%" in said and "40.0%" not in said  # of the last evaluation


def test_every_figure_is_drawn_and_constant_traces_stop_none(result, tmp_path):
    drawn = figures.draw_all(runs.read(write_run(tmp_path / "demo", result)))
    traces = {"trace_histogram", "trace_by_level", "trace_by_length", "true_matches"}
    assert set(drawn) == {"evaluations", "learning_curves", "refused", "pca"} | traces
    drawn = figures.draw_all(runs.RunFolder(tmp_path, result=make_result()))
    assert "Spearman undefined" in drawn["true_matches"].axes[0].get_title(loc="left")
    assert "learning_curves" not in drawn
