"""The tables in four formats: values, differences, missing tasks, averages that are left out, stars."""

import csv
import io
import json
import re
from dataclasses import replace

import pytest

from prolip.evaluation.evaluate import TaskResult
from prolip.evaluation.suites.datacomp import report as tables
from prolip.evaluation.suites.datacomp.catalogue import AGGREGATES, COUNTED, TASKS
from prolip.evaluation.suites.datacomp.results import ModelIdentity

ME = ModelIdentity("local-dir:runs/b16_50%", "f" * 32, "csd", "fp32")
LABEL = "local-dir:runs/b16_50% (csd)"


def results(without=(), small=()):
    """Main metrics of 0.25, 0.26 and so on; a face set."""
    out = {}
    for number, task in enumerate(COUNTED):
        if task.key not in without:
            info = {"size": 12 if task.key in small else task.size, "classes": task.classes}
            out[task.key] = TaskResult(task.key, {task.main_metric: 0.25 + number / 100}, task.main_metric, info)
    face = TASKS[-1]
    out[face.key] = TaskResult(face.key, {"acc_race_avg": 0.5, "acc_gender_avg": 0.75}, "", {"size": face.size})
    return out


def report(**kwargs):
    return tables.our_rows({ME: results(**kwargs)})


VALUES = {task.key: 25.0 + number for number, task in enumerate(COUNTED)}


def mean(name):
    return sum(VALUES[key] for key in AGGREGATES[name]) / len(AGGREGATES[name])


def test_table_1_has_the_averages_table_c1_all_tasks_in_two_blocks_and_faces_their_own():
    averages, first, second, faces = tables.grids(report())
    assert averages.header == tuple(AGGREGATES)
    assert averages.rows == ((LABEL, tuple(f"{mean(name):.1f}" for name in AGGREGATES)),)
    assert [*first.header, *second.header] == [*(task.name for task in COUNTED), "Average"]
    cells = [*first.rows[0][1], *second.rows[0][1]]
    assert cells == [f"{x:.2f}" for x in (*VALUES.values(), mean("Average"))] and len(first.header) == 20
    ((label, cells),) = faces.rows
    assert label == f"{LABEL}, UTKFace" and cells[:3] == ("50.00", "75.00", "–")


def test_averages_without_a_task_are_left_out_and_with_one_on_other_images_marked():
    made = report(without=["vtab/svhn"])
    assert set(made[0].averages) == {"ImageNet", "IN dist. shifts", "Retrieval"}
    text = tables.to_markdown(made)
    row = next(line for line in text.splitlines() if line.startswith(f"| {LABEL} |"))
    shown = [f"{mean(name):.1f}" for name in ("ImageNet", "IN dist. shifts", "Retrieval")]
    assert row == f"| {LABEL} | {shown[0]} | {shown[1]} | – | {shown[2]} | – |"
    for name, there in (("VTAB", "12 of 13"), ("Average", "37 of 38")):
        assert f"{LABEL}: no {name}, {there} tasks are available; missing: SVHN." in text
    text = tables.to_markdown(report(small=["cars"]))
    assert rf"\* {LABEL}: Stanford Cars on 12 images instead of 8041 images." in text
    row = next(line for line in text.splitlines() if line.startswith(f"| {LABEL} |"))
    assert row.endswith(f"| {mean('Retrieval'):.1f} | {mean('Average'):.1f}* |")
    changed = results() | {"cars": TaskResult("cars", {"acc1": 0.5}, "acc1", {"size": 8041, "classes": 3})}
    notes = tables.notes_of(tables.our_rows({ME: changed}))
    assert any("Stanford Cars on 8041 images of 3 classes instead of 8041 images of 196" in note for note in notes)


def test_every_format_has_every_task_differences_and_nothing_for_what_is_missing():
    change = tables.SuiteRow("a", {"mnist": -3.25}, {"Average": 0.5, "ImageNet": -64.6}, "difference", against="b|c")
    made = [*report(without=["cars"], small=["mnist"]), change]
    assert r"| a minus b\|c | −64.6 | – | – | – | +0.5 |" in tables.to_markdown(made)
    row, changed = csv.DictReader(io.StringIO(tables.to_csv(made)))
    assert len(row) == 3 + 5 + 38 + 1 and row["marked"] == "MNIST"
    assert row["Stanford Cars"] == "" and row["Average"] == "" and row["MNIST"] == f"{VALUES['mnist']:.4f}"
    assert (row["kind"], changed["kind"], changed["against"]) == ("ours", "difference", "b|c")
    values = json.loads(tables.to_json(made))
    (ours,), (differences,) = values["rows"], values["differences"]
    assert ours["tasks"]["cars"] is None and ours["averages"]["Average"] is None
    assert ours["tasks"]["mnist"] == VALUES["mnist"] and ours["averages"]["Retrieval"] == mean("Retrieval")
    assert ours["faces"]["fairness/utkface"]["acc_gender_avg"] == 0.75 and differences["tasks"]["mnist"] == -3.25
    assert any("no Average" in note for note in values["notes"])
    text = tables.to_latex(made)
    floats = re.findall(r"\\begin\{table\}.*?\\end\{table\}", text, re.S)
    for table in floats:
        columns = re.search(r"\\begin\{tabular\}\{(l(r+))\}", table)[2]
        body = [line for line in table.splitlines() if line.endswith(r"\\")]
        assert len(body) >= 2 and all(line.count(" & ") == len(columns) for line in body)
        assert table.count("{") == table.count("}") + table.count(r"\{") - table.count(r"\}")
    assert r"runs/b16\_50\% (csd)" in text and "b16_50%" not in text.split("\n% ")[0]
    assert len(floats) == 4 and "--" in floats[0] and "–" not in floats[0] and "$-$64.6" in text


@pytest.mark.parametrize(
    "other, labels",
    [
        (replace(ME, fingerprint="e" * 32), [f"{LABEL[:-1]}, fingerprint {x * 8})" for x in "fe"]),
        (ModelIdentity("hf-hub:x/y", "e" * 32, "mean", "amp_bf16"), [LABEL, "hf-hub:x/y (mean, amp_bf16)"]),
    ],
)
def test_models_stand_together_and_those_of_one_name_are_told_apart(other, labels):
    made = tables.our_rows({ME: results(), other: results(without=["cars"])})
    assert [row.label for row in made] == labels
    assert made[1].notes and all(note.startswith((labels[1], f"* {labels[1]}")) for note in made[1].notes)
