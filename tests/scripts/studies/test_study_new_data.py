"""The study of new designers: its figures by hand, what a draw of concepts holds, its tables."""

from __future__ import annotations

import numpy as np

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
