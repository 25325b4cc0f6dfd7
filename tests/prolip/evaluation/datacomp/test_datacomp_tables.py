"""The tables in four formats: values, differences, missing tasks, averages that are refused, stars."""

import csv
import io
import json
import re
from dataclasses import replace

import pytest

from prolip.evaluation.suites.datacomp.published import PAPER, find_published
from prolip.evaluation.suites.datacomp.store import Identity
from prolip.evaluation.suites.datacomp.tables import (
    build_report,
    faces_table,
    table_1,
    table_c1,
    to_csv,
    to_json,
    to_latex,
    to_markdown,
)
from prolip.evaluation.suites.datacomp.tasks import AGGREGATES, BY_KEY, COUNTED, TASKS
from prolip.evaluation.task import TaskResult

ME = Identity("local-dir:runs/b16_50%", "f" * 32, "csd", "fp32")
PROLIP = find_published(["ProLIP ViT-B/16, 12.8B"])


def results(without=(), small=()):
    """What the paper's 12.8B model would have left, one point better everywhere."""
    out = {}
    for task in COUNTED:
        if task.key not in without:
            size = 12 if task.key in small else task.size
            metrics = {task.main_metric: (PROLIP[0].values[task.key] + 1) / 100}
            out[task.key] = TaskResult(task.key, metrics, task.main_metric, {"size": size, "classes": task.classes})
    face = TASKS[-1]
    out[face.key] = TaskResult(face.key, {"acc_race_avg": 0.5, "acc_gender_avg": 0.75}, "", {"size": face.size})
    return out


def report(published=PROLIP, **kwargs):
    return build_report({ME: results(**kwargs)}, published)


def cells(grid, label):
    return [cell.value for cell in dict(grid.rows)[label]]


def test_table_1_has_published_rows_ours_and_the_difference():
    grid = table_1(report())
    label = "local-dir:runs/b16_50% (csd)"
    assert grid.header == tuple(AGGREGATES)
    assert [name for name, _ in grid.rows] == [PROLIP[0].label, label, f"{label} minus {PROLIP[0].label}"]
    assert cells(grid, PROLIP[0].label) == [74.6, 63.0, 63.7, 59.6, 63.3]  # as printed
    assert cells(grid, label) == pytest.approx([75.56, 63.96, 64.6462, 60.57, 64.3139], abs=1e-3)
    assert cells(grid, grid.rows[-1][0]) == pytest.approx([0.96, 0.96, 0.9462, 0.97, 1.0139], abs=1e-3)


def test_table_c1_has_all_tasks_in_two_blocks_and_the_average():
    first, second = table_c1(report())
    assert [*first.header, *second.header] == [*(task.name for task in COUNTED), "Average"]
    assert len(first.header) == 20
    assert cells(first, first.rows[-1][0]) == pytest.approx([1.0] * 20)


def test_each_table_has_the_average_that_the_paper_prints_there():
    made = build_report({ME: results()}, find_published(["ProLIP ViT-B/16, 1.28B"]))
    label = "ProLIP ViT-B/16, 1.28B"
    assert cells(table_1(made), label)[-1] == 57.3 and cells(table_c1(made)[1], label)[-1] == 56.90
    ours = made.ours[0].label
    assert cells(table_c1(made)[1], ours)[-1] == cells(table_1(made), ours)[-1]


def test_a_missing_task_is_a_dash_and_its_averages_are_refused():
    made = report(without=["vtab/svhn"])
    label = made.ours[0].label
    assert set(made.ours[0].averages) == {"ImageNet", "IN dist. shifts", "Retrieval"}
    text = to_markdown(made)
    row = next(line for line in text.splitlines() if line.startswith(f"| {label} |"))
    assert row == f"| {label} | 75.6 | 64.0 | – | 60.6 | – |"
    assert f"{label}: no VTAB, 12 of 13 tasks are there; missing: SVHN." in text
    assert f"{label}: no Average, 37 of 38 tasks are there; missing: SVHN." in text
    (change,) = [line for line in text.splitlines() if line.startswith(f"| {label} minus") and line.count("|") == 7]
    assert change.endswith("| +1.0 | +1.0 | – | +1.0 | – |")


def test_a_task_on_other_images_is_marked_and_so_are_its_averages():
    made = report(small=["cars"])
    text = to_markdown(made)
    assert "Stanford Cars on 12 images of 196 classes instead of 8041" not in text  # the classes are all there
    assert r"\* local-dir:runs/b16_50% (csd): Stanford Cars on 12 images instead of 8041 images." in text
    row = next(line for line in text.splitlines() if line.startswith("| local-dir:runs/b16_50% (csd) |"))
    assert row.endswith("| 60.6 | 64.3* |")


def test_fewer_classes_are_said():
    changed = results()
    changed["cars"] = TaskResult("cars", {"acc1": 0.5}, "acc1", {"size": 8041, "classes": 3})
    made = build_report({ME: changed})
    assert any("Stanford Cars on 8041 images of 3 classes instead of 8041 images of 196" in n for n in made.notes)


def test_published_rows_that_do_not_follow_are_said_below_the_tables():
    text = to_markdown(build_report({ME: results()}, PAPER))
    assert "ProLIP ViT-B/16, 1.28B: VTAB is printed as 57.1 (ProLIP Table 1), its values give 57.74" in text
    assert "the values are grouped by metric, not in the header's order (ProLIP Table C.1)" in text


def test_csv_has_a_line_per_row_and_a_column_per_task():
    rows = list(csv.DictReader(io.StringIO(to_csv(report(without=["cars"], small=["mnist"])))))
    assert [row["kind"] for row in rows] == ["ours", "published", "difference"]
    assert len(rows[0]) == 3 + 5 + 38 + 1
    ours, published, change = rows
    assert ours["Stanford Cars"] == "" and ours["Average"] == "" and ours["MNIST"] == "85.4700"
    assert ours["marked"] == "MNIST"
    assert published["ImageNet"] == "74.6000" and published["ImageNet 1k"] == "74.5600"
    assert change["against"] == PROLIP[0].label and change["GeoDE"] == "1.0000"


def test_json_has_null_for_what_is_missing():
    values = json.loads(to_json(report(without=["cars"])))
    ours, published = values["rows"]
    assert ours["tasks"]["cars"] is None and ours["averages"]["Average"] is None
    assert ours["tasks"]["mnist"] == 85.47 and published["averages"]["Average"] == 63.3
    assert ours["faces"]["fairness/utkface"]["acc_gender_avg"] == 0.75
    assert values["differences"][0]["tasks"]["mnist"] == 1.0
    assert any("no Average" in note for note in values["notes"])


def test_latex_has_whole_tables_and_escapes_names():
    text = to_latex(report(without=["cars"]))
    tables = re.findall(r"\\begin\{table\}.*?\\end\{table\}", text, re.S)
    assert len(tables) == 4
    for table in tables:
        columns = re.search(r"\\begin\{tabular\}\{(l(r+))\}", table)[2]
        body = [line for line in table.splitlines() if line.endswith(r"\\")]
        assert len(body) >= 2 and all(line.count(" & ") == len(columns) for line in body)
        assert table.count("{") == table.count("}") + table.count(r"\{") - table.count(r"\}")
    assert r"runs/b16\_50\% (csd)" in text and "b16_50%" not in text.split("\n% ")[0]
    assert "$-$" not in tables[0] and "--" in tables[0]


def test_a_loss_has_its_sign():
    worse = {
        key: TaskResult(key, {"acc1": 0.1}, "acc1", {"size": BY_KEY[key].size, "classes": BY_KEY[key].classes})
        for key in ("imagenet1k",)
    }
    text = to_markdown(build_report({ME: worse}, PROLIP))
    assert "| −64.6 |" in text
    assert "$-$64.6" in to_latex(build_report({ME: worse}, PROLIP))


def test_faces_have_a_table_of_their_own():
    grid = faces_table(report())
    assert [label for label, _ in grid.rows] == ["local-dir:runs/b16_50% (csd), UTKFace"]
    assert [cell.value for cell in grid.rows[0][1]][:3] == [50.0, 75.0, None]


def test_two_models_of_one_name_are_told_apart():
    other = replace(ME, fingerprint="e" * 32)
    made = build_report({ME: results(), other: results(without=["cars"])}, PROLIP)
    assert [row.label for row in made.ours] == [
        "local-dir:runs/b16_50% (csd, fingerprint ffffffff)",
        "local-dir:runs/b16_50% (csd, fingerprint eeeeeeee)",
    ]
    assert all("eeeeeeee" in note for note in made.ours[1].notes) and made.ours[1].notes


def test_rows_of_several_models_stand_together():
    other = Identity("hf-hub:x/y", "e" * 32, "mean", "amp_bf16")
    made = build_report({ME: results(), other: results()}, PROLIP)
    assert [row.label for row in made.ours] == ["local-dir:runs/b16_50% (csd)", "hf-hub:x/y (mean, amp_bf16)"]
    assert len(made.differences) == 2
