"""Own data as test sets: tables, folders and shards state the same, and give the same metrics."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from commands import evaluate, run

import own_data
from prolip.data.faults import FaultCounter
from prolip.data.split import Split
from prolip.evaluation.datasets.base import Share
from prolip.evaluation.datasets.registry import held_out, open_dataset
from prolip.evaluation.evaluate import evaluate_dataset
from prolip.prompts.weights import PromptWeights


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return own_data.write(tmp_path_factory.mktemp("own"))


def contents(dataset, *share):
    return [(sample.content, sample.captions, sample.label) for sample in dataset.samples(*share)]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "bytes", "shards", "classes"])
def test_every_form_gives_the_metrics_of_the_csv(made, kind, ours):
    for task in ("classification",) if kind == "classes" else ("retrieval", "classification"):
        table, other = (open_dataset(made[name], task=task) for name in ("csv", kind))
        assert table.kind == other.kind == task and table.classnames == other.classnames
        assert contents(table) == contents(other) or kind == "classes"  # which are in the order of their folders
        first, second = (evaluate_dataset(dataset, ours) for dataset in (table, other))
        assert first.metrics == second.metrics and first.info["images"] == 12
    assert other.classnames == own_data.CLASSES


def test_an_image_has_the_captions_of_all_its_rows_and_is_in_one_share_and_bare_paths_are_recognised(made):
    dataset = open_dataset(made["csv"].removeprefix("csv:"))
    assert dataset.kind == "retrieval" and dataset.size == 12 and dataset.name == "own"
    found = list(dataset.samples())
    assert [sample.key for sample in found] == [f"photos/{number:02d}.png" for number in range(12)]
    assert [list(sample.captions) for sample in found] == [own_data.captions(number) for number in range(12)]
    assert open_dataset(made["shards"].removeprefix("shards:")).info["shards"] == 2
    assert open_dataset(made["classes"].removeprefix("images:")).kind == "classification"
    for kind in ("csv", "shards"):
        dataset = open_dataset(made[kind])
        parts = [row for number in range(3) for row in contents(dataset, Share(number, 3))]
        assert sorted(parts) == sorted(contents(dataset))


def test_texts_beside_images_make_retrieval_of_a_folder(made, tmp_path):
    shutil.copytree(made["classes"].removeprefix("images:"), tmp_path / "f")
    for path in (tmp_path / "f").rglob("*.png"):
        path.with_suffix(".txt").write_text(f"the image {path.stem}")
    dataset = open_dataset(f"images:{tmp_path}/f")
    assert dataset.kind == "retrieval" and next(dataset.samples()).captions == ("the image 00",)
    assert open_dataset(f"images:{tmp_path}/f", task="classification").classnames == own_data.CLASSES


def test_a_share_holds_out_the_same_images_of_every_form_but_not_of_matches_by_place(made):
    parts = {kind: contents(open_dataset(made[kind], "0.5")) for kind in ("csv", "bytes", "shards")}
    assert parts["csv"] == parts["bytes"] == parts["shards"]
    every = contents(open_dataset(made["csv"]))
    assert 0 < len(parts["csv"]) < 12 and set(parts["csv"]) < set(every)
    dataset = open_dataset(made["csv"], "0.5")
    assert dataset.name == "own_0.5" and dataset.fingerprint != open_dataset(made["csv"]).fingerprint
    assert len(contents(open_dataset(made["classes"], "0.5"))) == len(parts["csv"])
    dataset = replace(open_dataset(made["csv"]), relevance=frozenset({("a", 0)}))
    with pytest.raises(ValueError, match="lists its matches by place"):
        held_out(dataset, Split(0.5))


def test_numbers_are_lines_of_the_class_names_beside_the_table(tmp_path):
    own_data.write(tmp_path / "d")
    rows = [row | {"label": str(own_data.CLASSES.index(row["label"]) + 1)} for row in own_data.records()]
    table = own_data.write_csv(tmp_path / "d/numbers.csv", rows)
    assert open_dataset(f"csv:{table}", task="classification").classnames == ("1", "2", "3")
    (tmp_path / "d/classnames.txt").write_text("\n".join(("snow", *own_data.CLASSES)))
    dataset = open_dataset(f"csv:{table}", task="classification")
    assert dataset.classnames == ("snow", *own_data.CLASSES)
    assert [sample.label for sample in dataset.samples()][:4] == [1, 2, 3, 1]


def test_what_data_lack_is_named_or_counted(made, tmp_path):
    table = own_data.write_csv(tmp_path / "own.csv", own_data.records())
    with pytest.raises(ValueError, match=r"24 of 24 rows name a missing image: rows 2, 3"):
        open_dataset(f"csv:{table}")
    rows = [row | ({"caption": ""} if "03" in row["image"] else {}) for row in own_data.records()]
    own_data.write_csv(table, rows)
    photos = shutil.copytree(Path(made["csv"].removeprefix("csv:")).parent / "photos", tmp_path / "photos")
    with pytest.raises(ValueError, match="2 of 24 rows have no caption: rows 5, 17"):
        open_dataset(f"csv:{table}")
    damage = FaultCounter()
    assert len(contents(open_dataset(f"csv:{table}", damage=damage))) == 11 and damage.kinds == {"missing text": 1}
    for path in photos.iterdir():
        path.with_suffix(".json").write_text("{}")
    for task, lacking in (("retrieval", "captions"), (None, "captions and no classes"), ("classification", "classes")):
        with pytest.raises(ValueError, match=f"has no {lacking}: give classes in"):
            open_dataset(f"images:{photos}", task=task)


def test_a_folder_with_classes_fits_prompts_and_is_drawn_from(made, tmp_path, folder):
    words = ("--data", made["classes"], "--rule", "bprw", "--model", folder, "--output", tmp_path / "weights.json")
    run("prompts", "fit", *words)
    assert PromptWeights.load(tmp_path / "weights.json").classnames == own_data.CLASSES
    run("data", "few-shot", "--data", made["classes"], "--shots", 2, "--train-on", "all", "--output", tmp_path / "few")
    assert open_dataset(f"wds:{tmp_path}/few/all").classnames == own_data.CLASSES


def test_the_command_evaluates_sets_of_one_name_and_a_share(made, folder):
    results = evaluate(["--data", made["csv"], made["jsonl"], made["shards"], "--model", folder])
    assert [result.key for result in results] == [made["csv"], made["jsonl"], "tars"]
    (result,) = evaluate(["--data", made["csv"], "--split", "0.5", "--model", folder])
    assert result.key == "own_0.5" and 0 < result.info["images"] < 12
