"""Runs on one's own tables: trained on, validated on, and held out of, by the default flags of data."""

from __future__ import annotations

import csv
import json
import shlex
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from training_runs import TINY, metrics

from drawings import FOLDER
from prolip.cli.main import main as prolip
from prolip.corpora.emoji import corpus as emoji
from prolip.data.reading.named import parse_source
from prolip.data.reading.rows import read_rows
from prolip.data.split import Split
from prolip.measures.chance import chance_remark, is_at_chance
from training.config import build_config, renewed
from training.evaluate import open_validation
from training.main import main, parse
from training.parallel import World

COMMANDS = [  # a table, class folders, Parquet, shards
    "--method likelihood --train-data captions.csv --split 0.2 --name own",
    "--train-data images:drawings --split 0.1 --name classes",
    "--train-data pairs.parquet --split 0.1 --name pairs",
    "--train-data shards --name from-shards",
]
MINE = [*TINY[TINY.index("--model") :], "--batch-size", "8", "--max-steps", "3"]


@pytest.fixture(scope="module")
def tables(tmp_path_factory) -> Path:
    """Drawings as files, which a CSV and JSON lines name, and inside a Parquet table."""
    folder = tmp_path_factory.mktemp("own")
    corpus = emoji.read([FOLDER / "noto.tar"])
    rows = []
    for number, drawing in enumerate(corpus.drawings[:40]):
        (folder / f"{number}.png").write_bytes(drawing.data)
        rows.append({"image": f"{number}.png", "caption": f"{corpus.concepts[drawing.concept].name}, drawn"})
    with open(folder / "a.csv", "w", newline="") as file:
        csv.writer(file).writerows([("image", "caption"), *(row.values() for row in rows)])
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    inside = [{"bytes": (folder / row["image"]).read_bytes(), "path": row["image"]} for row in rows]
    pq.write_table(pa.table({"image": inside, "caption": [row["caption"] for row in rows]}), folder / "a.parquet")
    return folder


def begin(tmp_path, *words) -> Path:
    assert main([*MINE, "--output", str(tmp_path), "--name", "run", *map(str, words)]) == 0
    return tmp_path / "run"


@pytest.fixture(scope="module")
def described(tables, tmp_path_factory) -> Path:
    """A table and its images, class folders, Parquet, and shards of it."""
    folder = tmp_path_factory.mktemp("page")
    for number in range(40):
        place = folder / f"drawings/{number % 2}/{number}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes((tables / f"{number}.png").read_bytes())
    rows = "".join(f"drawings/{number % 2}/{number}.png,drawing {number}\n" for number in range(40))
    (folder / "captions.csv").write_text(f"image,caption\n{rows}")
    (folder / "pairs.parquet").write_bytes((tables / "a.parquet").read_bytes())
    assert prolip(["data", "shards", str(folder / "pairs.parquet"), "--output", str(folder / "shards")]) == 0
    return folder


@pytest.mark.parametrize("command", COMMANDS)
def test_own_data_of_every_form_are_trained_on(described, tmp_path, monkeypatch, command):
    monkeypatch.chdir(described)
    words = shlex.split(command)
    assert main([*words, *MINE, "--workers", "0", "--no-report", "--output", str(tmp_path)]) == 0
    run = tmp_path / words[words.index("--name") + 1]
    assert (run / "model/config.json").exists() and len(metrics(run)) >= 3
    assert ("--split" in words) == (run / "eval.json").exists()


@pytest.mark.parametrize("name", ["a.csv", "a.parquet"])
def test_a_table_is_trained_on_and_what_is_held_out_of_it_is_measured(tables, tmp_path, name, caplog, capsys):
    with caplog.at_level("INFO"):
        run = begin(tmp_path, "--train-data", tables / name, "--split", "0.3")
    assert caplog.text.count("images from column 'image', captions from column 'caption'") == 1  # it is read once
    assert [line["step"] for line in metrics(run) if line["kind"] == "train"] == [1, 2, 3]
    found = json.loads((run / "eval.json").read_text())
    held = sum(Split(0.3).takes(tables / f"{number}.png") for number in range(40))
    assert 3 <= held <= 20 and found["held-out/t2i/queries"] == found["held-out/i2t/queries"] == held
    assert json.loads((run / "config.json").read_text())["data"]["split"] == 0.3
    said, rest, count = capsys.readouterr().out, 40 - held, int(found["held-out/pairs"])
    filled = "" if rest % 8 == 0 else " to fill its last batch"
    assert f": {rest} samples ({held} more held out), an epoch reads {-(-rest // 8) * 8}{filled}, " in said
    own, other = found["held-out/pairs_R@1"], found["held-out/train_pairs_R@1"]
    compared = f"{own:.1%} (chance {1 / count:.1%}), training pairs {other:.1%}"
    assert f"; R@1 of {count} pairs {compared}\n" in said
    at_chance = is_at_chance(round(found["held-out/i2t/R@1"] * held), held, held)
    assert (f"\nstep 3: held-out is {chance_remark(held)}\n" in said) == at_chance


def test_a_folder_of_classes_is_measured_by_the_top_1_of_what_is_held_out(described, tmp_path):
    folder = described / "drawings"
    words = ["--train-data", str(folder), "--split", "0.3"]
    run = begin(tmp_path, *words, "--best-metric", "held-out/acc1")
    rows = read_rows(parse_source(str(folder)), split=Split(0.3))
    loader = SimpleNamespace(held_out=rows, noise=None, source=None)
    (task,) = open_validation(parse([*MINE, *words]), None, None, World(), loader).tasks
    found = list(task.samples())
    expected = {f"{n % 2}/{n}.png": n % 2 for n in range(40) if Split(0.3).takes(folder / f"{n % 2}/{n}.png")}
    assert {sample.key: sample.label for sample in found} == expected and len(found) == len(expected) > 3
    right = json.loads((run / "eval.json").read_text())["held-out/acc1"] * len(found)
    assert right == pytest.approx(round(right)) and (run / "best" / "best.json").exists()


def test_a_run_is_validated_on_a_table(tables, tmp_path):
    words = f"{tables}/a.csv --val-data {tables}/a.jsonl emoji:{FOLDER}/emojione.tar --val-select subgroup=sport"
    run = begin(tmp_path, "--train-data", *words.split(), "--best-metric", "a/i2t/R@1")
    found = json.loads((run / "eval.json").read_text())
    assert found["a/i2t/queries"] == 40 and "names/i2t/R@1" in found and (run / "best" / "best.json").exists()


def test_a_number_as_split_holds_a_share_out_of_every_test_set(tables):
    words = ["--train-data", "synthetic:8", "--val-data", f"csv:{tables}/a.csv", f"shards:{FOLDER}/noto.tar"]
    found = open_validation(parse([*MINE, *words, "--val-split", "0.3"]), None, None, World()).tasks
    assert [sum(1 for _ in task.samples()) for task in found] == [
        sum(Split(0.3).takes(tables / f"{number}.png") for number in range(40)),
        sum(Split(0.3).takes(drawing.data) for drawing in emoji.read([FOLDER / "noto.tar"]).drawings),
    ]


def test_shards_are_held_out_of_as_they_are_read(tmp_path):
    run = begin(tmp_path, "--train-data", f"emoji:{FOLDER}/noto.tar", "--caption-sampling", "name", "--split", "0.3")
    drawings = emoji.read([FOLDER / "noto.tar"]).drawings
    held = sum(Split(0.3).takes(drawing.data) for drawing in drawings)
    assert json.loads((run / "eval.json").read_text())["held-out/i2t/queries"] == held > 0


def test_a_table_with_problems_is_refused_before_a_folder_is_made(tables, tmp_path, capsys):
    bad = tables / "bad.csv"
    bad.write_text("image,caption\n0.png,x\nno.png,y\n1.png,\n" + "2.png,z\n" * 30)
    assert main([*MINE, "--output", str(tmp_path), "--name", "run", "--train-data", str(bad)]) == 2
    said = capsys.readouterr().err
    assert "1 of 33 rows name a missing image: row 3" in said and "1 of 33 rows have no caption: row 4" in said
    assert "--image-root" in said and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("saved", "sources"),
    [
        ({"val_data": "data/x.tar", "val_tasks": ["wds:a"]}, ("emoji:data/x.tar", "wds:a")),
        ({"val_tasks": ["coco:a,b"]}, ("coco:a,b",)),
        ({"val_data": ["csv:a.csv"]}, ("csv:a.csv",)),
        ({"val_data": "csv:a.csv"}, ("csv:a.csv",)),
    ],
)
def test_configurations_of_earlier_versions_are_read(saved, sources):
    assert build_config("prolip", {"val": saved}).val.val_data == sources
    assert renewed(renewed({"val": dict(saved)})) == renewed({"val": dict(saved)})


@pytest.mark.parametrize(
    ("source", "remedy"),
    [
        ("wds:x", "train on its tars, shards:FOLDER/train"),
        ("texts:x", "give one of csv:FILE"),
        ("imagenet:x", "train on images:FOLDER"),
    ],
)
def test_sources_that_are_for_evaluation_are_not_trained_on(tmp_path, capsys, source, remedy):
    assert main([*MINE, "--output", str(tmp_path), "--name", "run", "--train-data", source]) == 2
    assert remedy in capsys.readouterr().err and not (tmp_path / "run").exists()
