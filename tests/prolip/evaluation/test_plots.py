"""The plots show what they were given, at a size that can be read."""

import numpy as np
import pytest
from PIL import Image

from prolip.evaluation import plots as figures
from prolip.evaluation.metrics import calibration
from prolip.evaluation.metrics.selective import risk_coverage
from prolip.evaluation.metrics.study import Samples, Study


@pytest.fixture(scope="module")
def samples():
    rng = np.random.default_rng(0)
    hidden = rng.random(400)
    wrong = rng.random(400) < hidden
    return wrong.astype(float), {"image": hidden + 0.3 * rng.random(400), "score": rng.random(400)}


def lines(ax):
    return {line.get_label(): line for line in ax.lines}


def test_refusal_is_drawn_between_random_and_oracle(samples):
    error, uncertainties = samples
    curves = {name: risk_coverage(u, error) for name, u in uncertainties.items()}
    (ax,) = figures.plot_risk_coverage(curves).axes
    drawn = lines(ax)
    ours = next(line for label, line in drawn.items() if label.startswith("image"))
    assert ours.get_ydata()[-1] == pytest.approx(error.mean()) and ours.get_xdata()[-1] == 1
    assert list(drawn["random"].get_ydata()) == [error.mean()] * 2
    assert (np.asarray(drawn["oracle"].get_ydata())[-len(ours.get_ydata()) :] <= ours.get_ydata() + 1e-12).all()
    assert f"AURC {curves['image'].aurc:.3f}" in ours.get_label()
    assert ax.get_ylim()[0] == 0 and ax.get_xlabel().startswith("coverage")


@pytest.mark.parametrize("log_odds", [False, True])
def test_reliability_is_drawn_against_the_diagonal(samples, log_odds):
    rng = np.random.default_rng(1)
    probability = rng.random(3000) ** 6
    found = calibration.reliability(probability, rng.random(3000) < probability, calibration.LOG_ODDS)
    upper, below = figures.plot_reliability(found, "match", log_odds=log_odds).axes
    diagonal, ours = lines(upper)["calibrated"], upper.lines[1]
    np.testing.assert_allclose(diagonal.get_xdata(), diagonal.get_ydata())
    kept = (found.frequency > 0) & (found.frequency < 1) if log_odds else found.counts > 0
    want = found.frequency[kept]
    np.testing.assert_allclose(ours.get_ydata(), want)
    assert upper.get_xscale() == upper.get_yscale() == ("logit" if log_odds else "linear")
    assert sum(below.lines[0].get_ydata()) == pytest.approx(1) and "ECE" in ours.get_label()


def test_all_plots_of_a_study_are_files_of_600_pixels_or_more(samples, tmp_path):
    error, uncertainties = samples
    found = {"calibration/match": calibration.reliability([0.1, 0.2, 0.7], [0, 1, 1])}
    both = Samples(error, uncertainties)
    study = Study({"refusal/i2t": both, "refusal/t2i": both}, found, {})
    figures.write_plots(study, "a task", tmp_path / "plots")
    wanted = {f"{what}_{way}" for what in ("risk_coverage", "by_decile") for way in ("i2t", "t2i")}
    assert {path.stem for path in (tmp_path / "plots").iterdir()} == wanted | {"reliability_match"}
    for path in (tmp_path / "plots").iterdir():
        with Image.open(path) as picture:
            assert picture.width >= 600 and len(np.unique(np.asarray(picture))) > 20
