"""The toy of PCME++: two ratios of the paper, and what it draws."""
from __future__ import annotations

import math
import sys
from pathlib import Path

import matplotlib.image
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import toy_study  # noqa: E402


@pytest.mark.parametrize("way", toy_study.PAPER)
def test_the_ratio_is_the_papers_within_15_percent(way):
    ratios = [toy_study.train(way, seed, 500).ratio for seed in range(3)]
    assert sum(ratios) / 3 == pytest.approx(toy_study.PAPER[way], rel=0.15)


def test_before_training_ambiguous_and_certain_points_are_alike():
    points, _ = toy_study.draw(0)
    assert len(points.label) == 1500 and points.ambiguous.sum() == 450
    assert points.ratio == pytest.approx(1.0, abs=0.15)
    assert points.z.var.mean() == pytest.approx(math.sinh(3) / 3, rel=0.1)  # E exp(2u), u in (-1.5, 1.5)


def test_a_table_and_a_figure_come_of_one_command(tmp_path, capsys):
    toy_study.main(["--seeds", "0", "--steps", "3", "--figure", str(tmp_path / "toy.png")])
    said = capsys.readouterr().out
    assert "| csd |" in said and "| wasserstein2 |" in said
    picture = matplotlib.image.imread(tmp_path / "toy.png")
    assert picture.shape[1] > 3 * picture.shape[0] and picture.std() > 0.05
