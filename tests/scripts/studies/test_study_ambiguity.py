"""PCME's studies: what erasing, mixing and dropping words change, and the figure of a small model."""

from pathlib import Path

import numpy as np
import pytest
import torch

from studies.papers.figures.paper import erase
from studies.uncertainty import ambiguity as study_ambiguity

ROOT = Path(__file__).resolve().parents[3]


def test_erasing_more_erases_the_same_cells_and_others():
    pixels = torch.rand(5, 3, 32, 32) + 0.1
    before = torch.zeros(5, 3, 32, 32, dtype=torch.bool)
    for share in study_ambiguity.ERASED:
        out = erase(pixels, share, torch.Generator().manual_seed(3))
        gone = out == 0
        assert torch.equal(out[~gone], pixels[~gone]) and (gone | ~before).all()
        assert gone.float().mean((1, 2, 3)).tolist() == pytest.approx([share] * 5)
        before = gone
    assert len({tuple(row.flatten().tolist()) for row in gone}) == 5, "each image has cells of its own"
    assert (erase(pixels, 1.0, torch.Generator()) == 0).all()
    with pytest.raises(ValueError, match="share 1.5"):
        erase(pixels, 1.5, torch.Generator())


def test_a_study_says_how_uncertainty_rises_and_what_includes_the_original():
    x = np.array([[1.0, 2.0, 4.0], [2.0, 1.0, 5.0], [3.0, 3.0, 6.0]])
    study = study_ambiguity.Study("erase", (0.0, 0.4, 0.8), x, np.array([[0.0, 0, 0], [1, -1, 1], [1, 1, -2.0]]))
    assert study.spearman == pytest.approx((1 + 0.5 + 1) / 3)
    assert study.risen.tolist() == pytest.approx([0, 2 / 3, 1])
    assert np.isnan(study.rate[0]) and study.rate[1:].tolist() == pytest.approx([2 / 3, 2 / 3])
    assert "Spearman of uncertainty with strength +0.833" in study_ambiguity.format_study(study)
    points = study_ambiguity.Study("mix", (0.0, 0.5), np.zeros((2, 3)), np.full((2, 3), np.nan))
    assert np.isnan(points.rate).all() and np.isnan(points.spearman)


def test_all_three_changes_are_drawn_of_two_models(small_model, tmp_path, capsys):
    words = ["--data", str(ROOT / "data/emoji/emojione.tar"), "--select", "group=food drink", "--inputs", "6"]
    study_ambiguity.main(["--model", small_model, "--model", small_model, *words, "--output", str(tmp_path / "out")])
    text = capsys.readouterr().out
    assert all(text.count(f"{name}: 6 inputs") == 2 for name in ("erase", "mix", "drop"))
    assert (tmp_path / "out/ambiguity.png").is_file() and (tmp_path / "out/ambiguity.svg").is_file()
    studies = [study_ambiguity.Study("drop", (0.0, 0.5), np.ones((2, 3)), np.zeros((2, 3)))]
    drawn = study_ambiguity.figure_of({"one": studies, "two": studies})
    assert len(drawn.axes[0].get_lines()) == 3, "both models, and the line of no change"
