"""The seventh method, near_method.py, from its flags to the report, while no file of src knows it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import clip_benchmark, datacomp, evaluate, evaluate_corpus
from safetensors.torch import load_file

import prolip
from drawings import SHARDS, UNSEEN, VALIDATION
from prolip.cli.main import main as command_line
from prolip.methods import FURTHER
from prolip.models.checkpoint import save_pretrained
from training.main import main

DRAWINGS = ["--data", UNSEEN]
TRAINING = [
    *shlex.split("--method near --near-weight 0.5 --train-data"),
    SHARDS,
    *shlex.split("--workers 0 --model ProLIP-ViT-test --precision fp32 --device cpu --batch-size 8"),
    *shlex.split("--warmup 1 --max-steps 4 --log-every-n-steps 1 --ema-decay 0.5"),
]
OWN = {"near.weight", *(f"{tower}.head.shift.{part}" for tower in ("visual", "text") for part in ("weight", "bias"))}


@pytest.fixture(autouse=True, scope="module")
def known() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FURTHER, "near_method")
        yield


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Four steps."""
    folder = tmp_path_factory.mktemp("runs")
    assert main([*TRAINING, *VALIDATION, "--output", str(folder), "--name", "whole"]) == 0
    return folder


def test_it_trains_its_head_and_score_which_are_saved_with_their_average(runs):
    for part in ("model", "model_ema"):
        kept = load_file(runs / "whole" / part / "model.safetensors")
        assert kept.keys() >= OWN and kept["near.weight"].unique().numel() > 1
    model = json.loads((runs / "whole/model/config.json").read_text())["model_cfg"]
    assert model["method_cfg"] == {"name": "near", "config": {"near_weight": 0.5}}


def test_it_is_evaluated_by_its_own_score_everywhere(runs, tmp_path):
    model = f"local-dir:{runs}/whole/model"
    by_command = evaluate_corpus(["--model", model, *DRAWINGS])
    assert by_command.similarity == "near"
    in_training = json.loads((runs / "whole/eval.json").read_text())
    assert in_training["names/i2t/mAP@R"] == by_command.metrics["names/i2t/mAP@R"]

    command_line(["data", "emoji", *DRAWINGS, "--output", str(tmp_path / "wds_pairs")])
    words = f"--model {model} --data wds:{tmp_path}/wds_pairs --uncertainty --save-features {tmp_path}/kept"
    (task,) = evaluate(words.split())
    assert task.info["similarity"] == "near" and "refusal/i2t/image/aurc" in task.metrics
    (kept,) = evaluate(["--features", str(tmp_path / "kept"), "--uncertainty"])
    assert kept.metrics == pytest.approx(task.metrics, rel=1e-12, nan_ok=True)  # scored and read off without the model

    words = ["--classes", "subgroup", "--output", str(tmp_path / "data/wds_cars_test")]
    assert command_line(["data", "emoji", *DRAWINGS, *words]) == 0
    datacomp(f"--model {model} --data {tmp_path}/data --tasks cars --device cpu --output {tmp_path}/out".split())
    (line,) = map(json.loads, (tmp_path / "out/results.jsonl").read_text().splitlines())
    assert line["metrics"]["acc1"] == by_command.metrics["zero_shot/subgroup/top1"]

    words = (
        f"eval --model {model} --dataset wds/pairs --dataset_root {tmp_path}/wds_{{dataset_cleaned}} --num_workers 0"
    )
    clip_benchmark([*words.split(), "--output", tmp_path / "clip.json"])
    theirs = json.loads((tmp_path / "clip.json").read_text())
    assert theirs["similarity"] == "near"
    assert theirs["metrics"]["image_retrieval_recall@5"] == pytest.approx(task.metrics["own/t2i/R@5"])
    assert command_line(["report", str(runs / "whole")]) == 0
    assert "near" in (runs / "whole/report.html").read_text()


def test_its_head_may_begin_with_the_weights_of_another_method(runs, tmp_path, capsys):
    """Parts missing in the checkpoint keep their initial values; half of a part is a mismatch."""
    weights = save_pretrained(prolip.create_model("ProLIP-ViT-test", method_cfg={"name": "siglip"}), tmp_path / "plain")
    more = ["--warmup", "0", "--max-steps", "1", "--output", str(tmp_path), "--name", "on", "--pretrained"]
    assert main([*TRAINING, *more, str(weights / "model.safetensors")]) == 0
    assert "near.weight" in "".join(capsys.readouterr())
