"""The seventh method, near_method.py, from its flags to the report, while no file of src knows it."""

from __future__ import annotations

import json
import shlex
import signal
from pathlib import Path

import pytest
import torch
from commands import clip_benchmark, datacomp, evaluate, evaluate_corpus
from safetensors.torch import load_file

from drawings import SHARDS, UNSEEN, VALIDATION
from forked import until
from prolip.cli.main import main as command_line
from prolip.methods import FURTHER

HERE = str(Path(__file__).parent)
KNOWN = f"import os, sys, time; sys.path.append({HERE!r}); os.environ['{FURTHER}'] = 'near_method'\n"
SLOW = "honest = training.loop.training_step\ntraining.loop.training_step = lambda *x: (time.sleep(0.2), honest(*x))[1]"
DRAWINGS = ["--data", UNSEEN]
TRAINING = [
    *shlex.split("--method near --near-weight 0.5 --train-data"),
    SHARDS,
    *shlex.split("--workers 0 --model ProLIP-ViT-test --precision fp32 --device cpu --batch-size 8"),
    *shlex.split("--warmup 1 --max-steps 6 --log-every-n-steps 1 --ema-decay 0.5"),
    *VALIDATION,
]
OWN = {"near.weight", *(f"{tower}.head.shift.{part}" for tower in ("visual", "text") for part in ("weight", "bias"))}


@pytest.fixture(scope="module")
def runs(forked, tmp_path_factory) -> Path:
    """Six steps of two ranks, twice: left alone, and killed behind the third."""
    folder = tmp_path_factory.mktemp("runs")
    words = [*TRAINING, "--save-every-steps", "2", "--output", folder, "--name"]
    assert forked.run(*words, "whole", ranks=2, before=KNOWN) == 0, forked.err[-3000:]
    forked.start(*words, "killed", ranks=2, before=KNOWN + SLOW)
    log = folder / "killed/metrics.jsonl"
    until(lambda: log.exists() and log.read_text().count('"train"') > 2)
    forked.send(signal.SIGKILL)
    assert forked.end() == -signal.SIGKILL
    assert forked.run(*words, "killed", "--resume", "latest", ranks=2, before=KNOWN) == 0, forked.err[-3000:]
    return folder


@pytest.fixture(autouse=True)
def known(monkeypatch):
    monkeypatch.setenv(FURTHER, "near_method")


def test_it_trains_on_two_ranks_is_killed_and_goes_on_with_its_head_and_score(runs):
    for part in ("model", "model_ema"):
        whole, killed = (load_file(runs / name / part / "model.safetensors") for name in ("whole", "killed"))
        assert whole.keys() >= OWN and all(killed[key].equal(value) for key, value in whole.items())
    model = json.loads((runs / "whole/model/config.json").read_text())["model_cfg"]
    assert model["method_cfg"] == {"name": "near", "config": {"near_weight": 0.5}}
    assert load_file(runs / "whole/model/model.safetensors")["near.weight"].unique().numel() > 1  # trained


@pytest.mark.slow
def test_shards_and_micro_batches_carry_its_head_and_score(runs, forked, tmp_path):
    words = ["--output", tmp_path, "--name", "shards", "--fsdp", "--accum-freq", "2", "--batch-size", "4"]
    assert forked.run(*TRAINING, *words, ranks=2, before=KNOWN) == 0, forked.err[-3000:]
    for part in ("model", "model_ema"):
        whole, shards = (load_file(run / part / "model.safetensors") for run in (runs / "whole", tmp_path / "shards"))
        assert whole.keys() == shards.keys()
        for key in OWN:
            torch.testing.assert_close(shards[key], whole[key], rtol=1e-3, atol=1e-5)


def test_it_is_evaluated_by_its_own_score_everywhere(runs, tmp_path):
    model = f"local-dir:{runs}/killed/model"
    by_command = evaluate_corpus(["--model", model, *DRAWINGS])
    assert by_command.similarity == "near"
    in_training = json.loads((runs / "killed/eval.json").read_text())
    assert in_training["names/i2t/mAP@R"] == by_command.metrics["names/i2t/mAP@R"]

    command_line(["data", "emoji", *DRAWINGS, "--output", str(tmp_path / "wds_pairs")])
    (task,) = evaluate(
        [
            "--model",
            model,
            *shlex.split(f"--data wds:{tmp_path}/wds_pairs --uncertainty --save-features"),
            str(tmp_path / "kept"),
        ]
    )
    assert task.info["similarity"] == "near" and "refusal/i2t/image/aurc" in task.metrics
    (kept,) = evaluate(["--features", str(tmp_path / "kept"), "--uncertainty"])
    assert kept.metrics == pytest.approx(task.metrics, rel=1e-12, nan_ok=True)  # scored and read off without the model

    words = ["--classes", "subgroup", "--output", str(tmp_path / "data/wds_cars_test")]
    assert command_line(["data", "emoji", *DRAWINGS, *words]) == 0
    datacomp(
        [
            "--model",
            model,
            "--data",
            str(tmp_path / "data"),
            *shlex.split("--tasks cars --device cpu --output"),
            str(tmp_path / "out"),
        ]
    )
    (line,) = map(json.loads, (tmp_path / "out/results.jsonl").read_text().splitlines())
    assert line["metrics"]["acc1"] == by_command.metrics["zero_shot/subgroup/top1"]

    clip_benchmark(
        [
            "eval",
            "--model",
            model,
            *shlex.split("--dataset wds/pairs --output"),
            str(tmp_path / "clip.json"),
            *shlex.split(f"--dataset_root {tmp_path}/wds_{{dataset_cleaned}} --num_workers 0"),
        ]
    )
    theirs = json.loads((tmp_path / "clip.json").read_text())
    assert theirs["similarity"] == "near"
    assert theirs["metrics"]["image_retrieval_recall@5"] == pytest.approx(task.metrics["own/t2i/R@5"])
    assert command_line(["report", str(runs / "killed")]) == 0
    assert "near" in (runs / "killed/report.html").read_text()


def test_its_head_may_begin_with_the_weights_of_another_method(runs, forked, tmp_path):
    """What the checkpoint has none of keeps its initial values; half of it is a mismatch."""
    plain = ["--warmup", "0", "--max-steps", "1", "--output", tmp_path, "--name", "plain"]
    assert forked.run("--method", "siglip", *TRAINING[4:], *plain) == 0, forked.err[-3000:]
    weights = str(tmp_path / "plain/model/model.safetensors")
    more = ["--warmup", "0", "--max-steps", "1", "--output", tmp_path, "--name", "on", "--pretrained", weights]
    assert forked.run(*TRAINING, *more, before=KNOWN) == 0, forked.err[-3000:]
    assert "near.weight" in forked.out + forked.err
