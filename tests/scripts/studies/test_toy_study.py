"""The toys of PCME++ and PCME: two ratios of one paper, regions of captions of the other, and what they draw."""

from __future__ import annotations

import re

import matplotlib.image
import pytest

from studies.methods import toy as toy_study
from studies.methods import toy_captions


@pytest.mark.parametrize("way", toy_study.PAPER)
def test_the_ratio_is_the_papers_within_15_percent(way):
    ratios = [toy_study.train(way, seed, 500).ratio for seed in range(3)]
    assert sum(ratios) / 3 == pytest.approx(toy_study.PAPER[way], rel=0.15)


def test_a_table_and_a_figure_come_of_one_command(tmp_path, capsys):
    toy_study.main(["--seeds", "0", "--steps", "3", "--figure", str(tmp_path / "toy.png")])
    said = capsys.readouterr().out
    assert "| csd |" in said and "| wasserstein2 |" in said
    picture = matplotlib.image.imread(tmp_path / "toy.png")
    assert picture.shape[1] > 3 * picture.shape[0] and picture.std() > 0.05


def test_pcmes_captions_grow_wider_with_what_they_leave_open_and_the_generic_one_covers_them(tmp_path, capsys):
    toy_captions.main(["--seeds", "0", "--steps", "300", "--figure", str(tmp_path / "captions.png")])
    said = capsys.readouterr().out
    widths = [float(re.search(rf"^\| {what} \| (\S+) \|", said, re.M)[1]) for what in toy_captions.OPEN]
    assert widths == sorted(widths) and widths[1] > 1.5 * widths[0] and widths[3] > 1.2 * widths[1]
    assert float(re.search(r"without known words: (\d+)%", said)[1]) > 50  # "most of the caption variations"
    picture = matplotlib.image.imread(tmp_path / "captions.png")
    assert picture.shape[1] > 2 * picture.shape[0] and picture.std() > 0.05
