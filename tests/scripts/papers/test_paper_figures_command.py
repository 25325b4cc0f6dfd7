"""The command on small models and a small corpus: all figures there are, each as pixels and as vectors."""

import json

import pytest
import torch
from PIL import Image
from tiny_tars import png, write_tar

from prolip import create_model
from prolip.cli.main import main as prolip
from prolip.models.checkpoint import save_pretrained
from prolip.prompts.bprw import Reweighing
from prolip.prompts.weights import PromptWeights
from studies.papers.figures.index import FIGURES, file_of


def main(words):
    return prolip(["figures", *words])


@pytest.fixture(scope="module")
def points(tmp_path_factory):
    """A small random model of points."""
    made = create_model("ProLIP-ViT-test", method_cfg={"name": "siglip"})
    return f"local-dir:{save_pretrained(made, tmp_path_factory.mktemp('points'))}"


@pytest.fixture(scope="module")
def shard(tmp_path_factory):
    """Fifteen drawings of as many concepts."""
    samples = []
    for i in range(15):
        words = {"hexcode": str(i), "name": f"thing n{i}", "keywords": [f"thing key{i % 3}", "some more words"]}
        record = words | {"subgroup": f"sub{i % 4}", "group": f"thing group{i % 2}", "style": "flat"}
        samples.append((f"flat-{i}", {"png": png(i, 32), "json": json.dumps(record).encode()}))
    return write_tar(tmp_path_factory.mktemp("shards") / "flat.tar", samples)


@pytest.fixture
def weights(tmp_path):
    """Write weights of four prompts in two classes that are subgroups of the drawings, and one that is not."""
    table = torch.tensor([[0.7, 0.1, 0.1, 0.1], [0.1, 0.2, 0.3, 0.4], [0.25] * 4], dtype=torch.float64)
    templates = ("a {c}.", "my {c}.", "{c}", "a drawing of a {c}.")
    made = PromptWeights(("sub1", "sub3", "cars"), templates, table, "m", "f" * 32, Reweighing(5), "data", "d" * 32)
    made.save(tmp_path / "weights.json")
    return str(tmp_path / "weights.json")


def test_every_figure_is_written_as_pixels_and_as_vectors(small_model, shard, weights, tmp_path, capsys):
    out = tmp_path / "figures"
    assert main(["--model", small_model, "--data", shard, "--prompts", weights, "--output", str(out)]) == 0
    lines = capsys.readouterr().out.strip().split("\n")
    assert [line.split()[0] for line in lines] == ["1", "4", "5", "6", "7", "8", "9", "C.1", "C.2", "C.3", "C.4", "C.5"]
    assert {path.name for path in out.iterdir()} == {
        f"{file_of(key)}.{kind}" for key in FIGURES for kind in ("png", "svg")
    }
    with Image.open(out / "figure_4_samples.png") as picture:
        assert min(picture.size) >= 500


def test_points_have_the_figures_that_need_no_variances(points, shard, tmp_path, capsys):
    given = ["--model", points, "--data", shard, "--output", str(tmp_path), "--vector", "pdf"]
    assert main(given) == 0
    lines = capsys.readouterr().out.strip().split("\n")
    assert sum("has no variances" in line for line in lines) == 8 and sum("--prompts" in line for line in lines) == 2
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{file_of(key)}.{kind}" for key in ("1", "9") for kind in ("png", "pdf")
    }
    assert main([*given, "--only", "9", "5"]) == 2
    error = capsys.readouterr().err
    assert "figure 5 cannot be drawn" in error and "no variances" in error and error.count("\n") == 1


def test_what_cannot_be_is_said_in_one_line(small_model, shard, tmp_path, capsys):
    usual = ["--model", small_model, "--data", shard, "--output", str(tmp_path)]
    for given, words in (
        ([*usual[:3], "none.tar", *usual[4:]], "no shard at none.tar"),
        ([*usual, "--only", "C.4"], "it needs --prompts"),
        ([*usual, "--only", "2"], "invalid choice: '2'"),
        ([*usual, "--dpi", "0"], "--dpi 0: give 10 to"),
        ([*usual, "--weights", "none.json"], "use --prompts"),
    ):
        assert main(given) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and words in error and error.count("\n") == 1
