"""Published runs: the figures derived from them, and how near predictions from one to another come."""

from __future__ import annotations

from pathlib import Path

import pytest

from studies.papers.published_runs import RUNS, check_published, published_table

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def checks():
    return {check.run.name: check for check in check_published()}


def test_the_papers_day_on_32_h100_is_7_percent_of_their_peak(checks):
    check = checks["ProLIP B/16, 1.28B samples in a day"]
    assert check.rate == pytest.approx(463, rel=0.005)
    assert check.mfu == pytest.approx(0.07, abs=0.003)


def test_gpu_hours_of_openclips_page_follow_from_their_rates(checks):
    """The page gives 10,700, 13,620 and 50,800 GPU-hours."""
    for name, hours, wanted in (
        ("OpenCLIP B/16, LAION-400M, 61 h", 61, 10_700),
        ("OpenCLIP B/16+ 240, LAION-400M, 61 h", 61, 13_620),
        ("OpenCLIP L/14, LAION-400M, 127 h, recomputing", 127, 50_800),
    ):
        run = checks[name].run
        assert hours * run.gpus == pytest.approx(wanted, rel=0.01)
        assert 32 * 407_332_084 / run.samples_per_second / 3600 == pytest.approx(hours)


def test_runs_of_openclip_predict_each_other_within_a_quarter(checks):
    for check in checks.values():
        if check.run.family == "OpenCLIP":
            assert check.predicted / check.rate == pytest.approx(1, abs=0.25), check.run.name


def test_a_prediction_does_not_know_its_own_run(checks):
    """The published speed of a run does not enter the prediction for it."""
    run = RUNS[1]
    doubled = [one._replace(samples_per_second=2 * one.samples_per_second) if one is run else one for one in RUNS]
    changed, before = check_published(doubled)[1], checks[run.name]
    assert (changed.predicted, changed.mfu) == (before.predicted, 2 * before.mfu)


def test_the_page_shows_what_the_command_prints(checks):
    page = (ROOT / "docs/scaling.md").read_text()
    shown = page.partition("python scripts/studies/papers/published_runs.py\n```\n\n```text\n")[2].partition("```")[0]
    assert shown.strip() == published_table(list(checks.values())).strip()
