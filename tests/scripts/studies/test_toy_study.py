"""The toys of PCME++ and PCME: two ratios of one paper, regions of captions of the other, and what they draw."""

from __future__ import annotations

import math
import re

import matplotlib.image
import pytest
import torch

from studies.methods import toy as toy_study
from studies.methods import toy_captions


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


def test_pcmes_captions_grow_wider_with_what_they_leave_open_and_the_generic_one_covers_them(tmp_path, capsys):
    toy_captions.main(["--seeds", "0", "--steps", "300", "--figure", str(tmp_path / "captions.png")])
    said = capsys.readouterr().out
    widths = [float(re.search(rf"^\| {what} \| (\S+) \|", said, re.M)[1]) for what in toy_captions.OPEN]
    assert widths == sorted(widths) and widths[1] > 1.5 * widths[0] and widths[3] > 1.2 * widths[1]
    assert float(re.search(r"all words open: (\d+)%", said)[1]) > 50  # "most of the caption variations"
    picture = matplotlib.image.imread(tmp_path / "captions.png")
    assert picture.shape[1] > 2 * picture.shape[0] and picture.std() > 0.05


def test_captions_name_a_kind_and_a_class_by_words_of_their_own():
    data = toy_captions.draw(torch.Generator().manual_seed(0))
    shared, kind, own = data.caption[:, :2], data.caption[:, 2], data.caption[:, 3]
    for words, of in ((kind, data.label // 3), (own, data.label)):
        for one in of.unique():
            assert not set(words[of == one].tolist()) & set(words[of != one].tolist())
    assert shared.max() < kind.min() and kind.max() < own.min() and own.max() < toy_captions.WORDS
    assert data.caption.min() > toy_captions.UNKNOWN
