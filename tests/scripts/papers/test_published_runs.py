"""Published runs: the figures derived from them, and how near predictions from one to another come."""

from __future__ import annotations

from pathlib import Path

import pytest

from studies.papers.published_runs import check_published, published_table

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def checks():
    return {check.run.name: check for check in check_published()}


def test_the_papers_day_on_32_h100_is_7_percent_of_their_peak(checks):
    check = checks["ProLIP B/16, 1.28B samples in a day"]
    assert check.rate == pytest.approx(463, rel=0.005)
    assert check.mfu == pytest.approx(0.07, abs=0.003)


def test_runs_of_openclip_predict_each_other_within_a_quarter(checks):
    for check in checks.values():
        if check.run.family == "OpenCLIP":
            assert check.predicted / check.rate == pytest.approx(1, abs=0.25), check.run.name


def test_the_page_shows_what_the_command_prints(checks):
    page = (ROOT / "docs/benchmarks/planner.md").read_text()
    shown = page.partition("python scripts/studies/papers/published_runs.py\n```\n\n```text\n")[2].partition("```")[0]
    assert shown.strip() == published_table(list(checks.values())).strip()
