"""The papers' tables as copied: what one prints twice, in two ways or in two papers, agrees, but where we say so."""

from __future__ import annotations

import json

import pytest

from prolip.evaluation.evaluate import TaskResult
from studies.papers.papers import PRINTED, find_printed, format_printed, main, read_printed

WAYS = ("i2t", "t2i")
KS = (1, 5, 10)
#: Sums of Table I that are not those of their row's six figures.
WRONG_SUMS = {"VSE++ source-free, flickr": (108.1, 111.9), "SCAN, coco": (181.6, 184.3)}


def table(file: str) -> dict[str, dict[str, float]]:
    """Row -> metric -> value."""
    rows = read_printed(file, "", "").rows
    found = {label: {name: float(value) for name, value in values.items()} for label, values in rows}
    assert len(found) == len(rows)
    return found


def recalls(row: dict[str, float], prefix: str) -> list[float]:
    return [row[name] for name in (f"{prefix}{way}/R@{k}" for way in WAYS for k in KS) if name in row]


def test_the_sums_of_source_free_matching_follow_but_for_two():
    wrong = {}
    for data in ("coco", "flickr"):
        for label, row in table(f"source-free-1-{data}.csv").items():
            if abs(sum(recalls(row, "")) - row["rsum"]) > 0.3501:
                wrong[f"{label}, {data}"] = (row["rsum"], pytest.approx(sum(recalls(row, ""))))
    assert wrong == WRONG_SUMS


def result(key: str, **metrics: float) -> TaskResult:
    info = {"model": {"name": "mine", "precision": "fp32"}, "task": "abc", "similarity": "csd", "images": 5000}
    return TaskResult(key, metrics, "x", info)


def test_results_stand_above_the_rows_of_their_own_data_in_their_columns_alone():
    own = result(
        "coco_karpathy_test",
        **{"cxc/i2t/R@1": 0.6, "cxc/t2i/R@1": 0.5, "coco_1k/rsum": 512.3, "coco_5k/i2t/R@1": 0.4, "i2t/PMRP": 0.31},
    )
    lines = format_printed(find_printed(["Table 1, coco", "Table II", "E.5"]), [own]).splitlines()
    assert lines[0].startswith("PCME++ Table 1, coco") and lines[1].split() == ["cxc/R@1", "coco_1k/rsum"]
    assert lines[2].split() == ["coco_karpathy_test", "csd", "55.00", "512.30"]
    assert lines[3].split() == ["ViT-B/32,", "CLIP", "zero-shot", "42.0", "471.9"]
    assert lines.count("") == 1 and lines[-1].split()[-2:] == ["34.1", "44.2"]  # E.5, no Table II: no plain figure
    mine = next(line for line in lines[3:] if line.startswith("coco_karpathy_test"))
    assert mine.split()[2:] == ["31.00", "40.00"]
    assert format_printed(PRINTED, [result("flowers", **{"i2t/R@1": 0.5})]) == ""


def test_results_are_read_from_the_file_of_an_evaluation(tmp_path, capsys):
    own = result("coco_karpathy_test", **{"cxc/i2t/R@1": 0.6, "cxc/t2i/R@1": 0.5, "eccv/R@1": float("nan")})
    for name, found in (("coco", own), ("pairs", result("pairs", **{"i2t/R@1": 0.5}))):
        (tmp_path / f"{name}.json").write_text(json.dumps([found.to_dict()]))
    main(["Table 1, coco", "--results", str(tmp_path / "pairs.json"), str(tmp_path / "coco.json")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["cxc/R@1"] and lines[2].split() == ["coco_karpathy_test", "csd", "55.00"]
    main(["all", "--results", str(tmp_path / "pairs.json")])
    assert capsys.readouterr().out == "no published row has a metric of these test sets\n"
