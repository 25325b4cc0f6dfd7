"""The study of new designers: its figures by hand, what a draw of concepts holds, its tables."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from prolip.embeddings import Pairs
from studies.uncertainty import new_data as study


def arrays(seed: int = 0) -> study.Arrays:
    """Thirty drawings of ten concepts and twenty texts, each of a concept."""
    g = np.random.default_rng(seed)
    drawings, texts = 30, 20
    out = {
        "concept": np.arange(drawings) % 10,
        "text_concept": np.arange(texts) % 10,
        "size": np.array(10),
        "caption_true": g.random(drawings) < 0.5,
        "answer_true": g.random(drawings) < 0.5,
        "wrong": g.random(drawings) < 0.5,
        "text_expected": 4 * g.random(texts) + 0.5,
        "text_true": g.integers(1, 5, texts),
        "text_level": g.integers(0, 4, texts),
        "text_trace": g.random(texts),
        "text_in_all": g.integers(1, 9, texts),
        "text_inside": g.random(texts) < 0.9,
        "ap_i2t": g.random(drawings),
        "text_ap_t2i": g.random(texts),
    }
    for way in study.WAYS:
        out |= {f"caption_{way}": g.random(drawings), f"answer_{way}": g.random(drawings)}
    return out | {f"by_{sign}": g.random(drawings) for sign in ("trace", "neighbour", "ambiguity")}


def test_the_calibration_error_is_that_of_bins_of_equal_mass():
    p, y = np.linspace(0, 1, 30), np.arange(30) % 3 == 0
    wanted = sum(abs(p[2 * k : 2 * k + 2].mean() - y[2 * k : 2 * k + 2].mean()) for k in range(15)) / 15
    assert study.ece(p[::-1], y[::-1]) == pytest.approx(wanted)
    assert study.ece(np.full(30, 1 / 3), y) == pytest.approx(
        sum(abs(1 / 3 - y[2 * k : 2 * k + 2].mean()) for k in range(15)) / 15
    )


def test_expected_numbers_are_within_a_factor_of_two_of_those_of_texts_that_fit_any():
    x = {
        "text_expected": np.array([1.0, 4.1, 3.0, 9.0]),
        "text_true": np.array([2, 2, 5, 0]),
        "text_level": np.array([0, 0, 1, 1]),
    }
    assert study.within(x) == pytest.approx(2 / 3) and study.within(x, 0) == 0.5 and np.isnan(study.within(x, 2))


def test_a_draw_has_all_of_a_concept_as_often_as_it_was_drawn():
    x = arrays()
    drawn = study.draws_of(x, np.array([3, 3, 7]))
    assert sorted(drawn["concept"]) == [3] * 6 + [7] * 3 and sorted(drawn["text_concept"]) == [3] * 4 + [7] * 2
    assert sorted(drawn["ap_i2t"][drawn["concept"] == 7]) == sorted(x["ap_i2t"][x["concept"] == 7])


def test_tables_have_a_row_of_each_model_and_designer_with_intervals(tmp_path, capsys):
    (tmp_path / "asked").mkdir()
    extra = {"text_held": np.arange(20) % 2 == 0}
    np.savez(tmp_path / "asked/new-held-emojione-s0.npz", **arrays(0), **extra)
    for kind, seed in (("new", 0), ("new", 1), ("old", 0)):
        np.savez(tmp_path / f"asked/{kind}-demo-emojione-s{seed}.npz", **arrays(seed))
    page = tmp_path / "page.md"
    marks = [
        f"<!-- {table}: by scripts/studies/uncertainty/new_data.py -->" for table in (*study.FIGURES, "gains", "labels")
    ]
    page.write_text("\n".join(f"{mark}\n{mark}" for mark in marks))
    study.main(["tables", "--out", str(tmp_path), "--draws", "20", "--write", str(page)])
    lines = page.read_text().splitlines()
    assert sum(line.startswith("| demo | emojione |") for line in lines) == 5
    assert sum(line.startswith("| demo, fitted as before | emojione |") for line in lines) == 3
    assert sum(line.startswith("| without these texts | emojione | 1 | 10 [") for line in lines) == 1
    mean = np.mean([np.mean(arrays(seed)["ap_i2t"]) for seed in (0, 1)])
    row = next(line for line in lines if line.startswith("| demo | emojione |") and f"{mean:.3f}"[1:] in line)
    assert row.count("[") == 2
    new = np.mean([np.mean(arrays(seed)["ap_i2t"]) for seed in (0, 1)])
    gains = lines[lines.index("<!-- gains: by scripts/studies/uncertainty/new_data.py -->") + 3]
    assert f"{new - np.mean(arrays(0)['ap_i2t']):.3f}".replace("0.", ".") in gains and gains.count("[") == 5


def test_labels_are_left_out_as_the_table_says_and_counted_against_all_of_them(tmp_path):
    g = torch.Generator().manual_seed(0)
    kind = torch.arange(20).repeat_interleave(3)
    text = torch.nn.functional.normalize(torch.randn(20, 16, generator=g), dim=1).repeat(2, 1)
    image = torch.nn.functional.normalize(text[kind] + 0.02 * torch.randn(60, 16, generator=g), dim=1)
    rows = torch.arange(60).repeat_interleave(2)
    text_of = torch.stack([kind, 20 + kind], 1).flatten()
    pairs = Pairs(image=image, text=text, image_of=rows, text_of=text_of, scale=20.0)
    assert len(study.with_labels(pairs, "all", 0)[0]) == 120
    assert 60 < len(study.with_labels(pairs, "70%", 0)[0]) < 110
    one, texts = study.with_labels(pairs, "one an image", 0)
    assert one.image_of.tolist() == list(range(60)) and len(one) == 60
    given = set(zip(rows.tolist(), pairs.text_of.tolist()))
    assert {(int(i), int(texts[j])) for i, j in zip(one.image_of, one.text_of)} <= given
    (tmp_path / "pairs").mkdir()
    pairs.save(tmp_path / "pairs/demo-s0.safetensors")
    table = study.by_labels(tmp_path)
    assert [row[:3] for row in table] == [["demo", known, "1"] for known in study.KNOWN]
    assert table[0][3] == table[0][6] == "1.00"  # all is known
    assert float(table[3][3]) < float(table[3][6]) and table[3][5] == "1.00"
