"""The published rows: do the printed averages follow from them, and does the report name those that do not?"""

import csv

import pytest

from prolip.evaluation.evaluate import TaskResult
from prolip.evaluation.suites.datacomp.catalogue import COUNTED
from prolip.evaluation.suites.datacomp.results import Line, ModelIdentity, ResultFolder
from studies.papers.published_datacomp import PAPER, PUBLISHED, main, published_report, reproduce

ROWS = {row.label: row for row in PUBLISHED}
OURS_12_8B = ROWS["ProLIP ViT-B/16, 12.8B"]
OURS_1_28B = ROWS["ProLIP ViT-B/16, 1.28B"]


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: row.label)
def test_every_row_has_all_38_tasks_as_percentages(row):
    assert set(row.values) == {task.key for task in COUNTED}
    assert all(0 <= value <= 100 for value in row.values.values())


@pytest.mark.parametrize("row", [row for row in PUBLISHED if row is not OURS_1_28B], ids=lambda row: row.label)
def test_the_printed_averages_follow_from_the_row_within_rounding(row):
    checks = reproduce(row)
    assert all(check.explained for check in checks)
    assert len(checks) == (6 if row in PAPER else 1)


def test_table_1_of_the_1_28b_model_does_not_follow_from_its_row_and_the_report_says_so():
    failed = {(c.aggregate, c.printed): round(c.recomputed, 2) for c in reproduce(OURS_1_28B) if not c.explained}
    assert failed == {
        ("ImageNet", 67.6): 67.84,
        ("IN dist. shifts", 55.0): 54.79,
        ("VTAB", 57.1): 57.74,
        ("Retrieval", 53.4): 52.19,
        ("Average", 57.3): 56.90,
    }
    assert [c.printed for c in reproduce(OURS_1_28B) if c.explained] == [56.90]  # the average of Table C.1 itself
    text = published_report([OURS_1_28B, OURS_12_8B])
    assert "VTAB is printed as 57.1 (ProLIP Table 1), its values give 57.74" in text
    assert "ProLIP ViT-B/16, 12.8B: all 6 printed averages follow" in text


def test_results_stand_below_published_rows_with_their_differences(tmp_path, capsys):
    store = ResultFolder(tmp_path / "ours")
    for task in COUNTED:  # one point better than the row
        info = {"size": task.size, "classes": task.classes}
        metrics = {task.main_metric: (OURS_12_8B.values[task.key] + 1) / 100}
        result = TaskResult(task.key, metrics, task.main_metric, info)
        store.append(Line(ModelIdentity("local-dir:b16", "f" * 32, "csd", "fp32"), "d", result))
    main([str(tmp_path / "ours"), "--rows", "12.8B", "--output", str(tmp_path / "out")])
    assert "+1.0" in capsys.readouterr().out
    text, label = (tmp_path / "out" / "tables.md").read_text(), "local-dir:b16 (csd)"
    assert f"| {OURS_12_8B.label} | 74.6 | 63.0 | 63.7 | 59.6 | 63.3 |" in text  # as printed
    assert f"| {label} minus {OURS_12_8B.label} | +1.0 | +1.0 | +0.9 | +1.0 | +1.0 |" in text
    assert "the values are grouped by metric, not in the header's order (ProLIP Table C.1)" in text
    lines = list(csv.DictReader((tmp_path / "out" / "tables.csv").read_text().splitlines()))
    assert [line["kind"] for line in lines] == ["published", "ours", "difference"]
    assert {float(lines[2][task.name]) for task in COUNTED} == {1.0} and lines[2]["against"] == OURS_12_8B.label
    main([])
    assert "ProLIP ViT-B/16, 12.8B: all 6 printed averages follow from its 38 values" in capsys.readouterr().out
