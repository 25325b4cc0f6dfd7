"""The command on small models, a small corpus and miniatures of HierarCaps and COCO."""

import json
import shutil

import miniatures as mini
import numpy as np
import pytest
from drawn_shards import write_shard
from PIL import Image
from test_hierarcaps import ROWS, URL
from test_hierarimgs import coco  # noqa: F401  # a fixture

from prolip.cli.main import main as prolip_main


def main(words):
    return prolip_main(["hierarchy", *words])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A small random model whose traces differ."""
    return mini.prolip_folder(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def shard(tmp_path_factory):
    """Twelve flat drawings of twelve concepts with keywords of five words."""
    levels = [{"keywords": [f"key{i % 3}", "some more words"], "subgroup": f"sub{i % 4}"} for i in range(12)]
    names = [{"hexcode": str(i), "name": f"thing n{i}", "group": f"group{i % 2}"} for i in range(12)]
    records = [{**one, **more} for one, more in zip(names, levels)]
    path = tmp_path_factory.mktemp("shards") / "flat.tar"
    return str(write_shard(path, "flat", records, 32, lambda record: (20 * int(record["hexcode"]), 0, 99)))


def test_entailment_of_two_models_is_one_table_and_json(model, shard, tmp_path, capsys):
    out = tmp_path / "sub" / "found.json"
    given = ["entailment", "--model", model, "--model", model, "--data", shard, "--intervals", "20"]
    given += ["--output", str(out)]
    assert main(given) == 0
    text = capsys.readouterr().out
    assert "Is text A a kind of text B?" in text and "Is text B true of image A?" in text
    kept = json.loads(out.read_text())
    assert len(kept["models"]) == 2 and kept["models"][0] == kept["models"][1]
    assert {"texts/seen_trace/mean", "images/own/sibling"} <= kept["models"][0]["auc"].keys()
    assert kept["pairs"]["texts"]["used"] == kept["pairs"]["texts"]["found"] > 0


def test_traverse_prints_a_path_and_the_root_of_each_drawing(model, shard, capsys):
    assert main(["traverse", "--model", model, "--data", shard, "--top", "3", "--steps", "9"]) == 0
    lines = capsys.readouterr().out.strip().split("\n")
    assert len([line for line in lines if "[ROOT]" in line]) == 3 and lines[0].startswith(f"{'thing n0':<40}  ")
    assert main(["traverse", "--model", model, "--data", shard, "--top", "2", "--root", "empty"]) == 0
    assert "[ROOT]" not in capsys.readouterr().out
    assert main(["traverse", "--model", model, "--data", shard, "--top", "2", "--inclusion", "own"]) == 0
    assert capsys.readouterr().out.count("[ROOT]") == 2
    assert main(["traverse", "--model", model, "--data", shard, "--top", "0"]) == 2


@pytest.fixture
def captions(tmp_path):
    path, folder = tmp_path / "caps.csv", tmp_path / "val2014"
    path.write_text(ROWS.replace("{url}", URL))
    folder.mkdir()
    for name, colour in (("a.jpg", (9, 99, 200)), ("b.jpg", (90, 200, 20))):
        Image.new("RGB", (40, 30), colour).save(folder / name)
    return path, folder


def test_hierarcaps_prints_both_protocols_apart(model, captions, tmp_path, capsys):
    path, folder = captions
    out = tmp_path / "metrics.json"
    given = ["hierarcaps", "--model", model, "--captions", str(path), "--images", str(folder), "--output", str(out)]
    assert main(given) == 0
    assert "3 rows, 2 images, 10 captions, 4 levels" in capsys.readouterr().out
    included, empty = json.loads(out.read_text()).values()
    assert {name.split("/")[0] for name in included} == {"paper"} and "benchmark/d_corr" in empty
    assert all(np.isfinite(list(empty.values())))
    (folder / "b.jpg").unlink()
    assert main(given) == 2 and "1 of 2 images are not in" in (said := capsys.readouterr().err) and "b.jpg" in said


def test_images_at_levels_are_built_and_drawn(model, coco, captions, tmp_path, capsys, monkeypatch):  # noqa: F811
    drawn = {}
    monkeypatch.setattr("prolip.hierarchy.levels.write", lambda figure, folder, name: drawn.update({name: folder}))
    built = tmp_path / "levels"
    given = ["--instances", str(coco / "instances.json"), "--images", str(coco / "val2017"), "--least", "50"]
    assert main(["hierarimgs", *given, "--output", str(built)]) == 0
    assert "1 images at 4 levels" in capsys.readouterr().out
    shutil.copytree(built / "000000000001", built / "000000000002")
    figures = tmp_path / "figures"
    given = ["levels", "--model", model, "--images", str(built), "--captions", str(captions[0])]
    given += ["--output", str(figures)]
    assert main(given) == 0
    assert "images: 2 chains" in capsys.readouterr().out
    names = ("image_traces", "image_differences", "image_inclusion", "text_traces", "text_inclusion")
    assert drawn == dict.fromkeys(names, str(figures))
    assert main(["levels", "--model", model, "--output", str(figures)]) == 2
    assert "--images" in capsys.readouterr().err


def test_what_cannot_be_is_said_in_one_line(model, shard, tmp_path, capsys):
    place = tmp_path / "file"
    place.touch()
    for given, words in (
        (["levels", "--model", model, "--images", "x", "--output", str(place)], "is a file: give a folder"),
        (["entailment", "--model", model, "--data", "none.tar"], "no shard at none.tar"),
        (["entailment", "--model", "local-dir:nowhere", "--data", shard], "nowhere"),
        (["entailment", "--model", model, "--data", shard, "--intervals", "1"], "--intervals 1: give 2 or more"),
        (["traverse", "--model", "nowhere", "--data", shard, "--top", "0"], "--top 0: give 1 or more"),
        (["levels", "--model", model, "--images", str(tmp_path), "--output", str(tmp_path)], "no images at levels"),
    ):
        assert main(given) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and words in error and error.count("\n") == 1
