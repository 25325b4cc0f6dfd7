"""Whole runs in this process: their files, and a resumed run equals an uninterrupted one."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from training_runs import TINY, assert_same_state, metrics, newest, start, stop_after

import prolip
import training.loop
import training.run
from drawings import VALIDATION
from prolip.models.checkpoint import save_pretrained
from training.checkpoint.files import Storage, list_steps, load_checkpoint
from training.config import build_config
from training.health.signals import EXIT_STOPPED
from training.main import main
from training.model import build_model
from training.parallel import World


def ledger(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "ledger" / "rank_0.jsonl").read_text().splitlines()]


def losses(folder: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in metrics(folder) if row["kind"] == "train"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """Two epochs in one go, with averaged weights and an evaluation at the end."""
    folder = tmp_path_factory.mktemp("runs")
    return start(folder, "whole", "--epochs", "2", "--ema-decay", "0.9", *VALIDATION)


def test_a_run_leaves_model_figures_and_checkpoints(whole):
    wanted = ".lock config.json status.json metrics.jsonl tensorboard checkpoints model model_ema eval eval_ema"
    assert {path.name for path in whole.iterdir()} == {*wanted.split(), "eval.json", "examples.json"}
    steps = len(losses(whole))
    assert {path.name for path in (whole / "checkpoints").iterdir()} == {f"step_{steps // 2}.pt", f"step_{steps}.pt"}
    status = json.loads((whole / "status.json").read_text())
    assert status["state"] == "finished" and status["step"] == status["total_steps"] == steps
    assert status["checkpoint"] == str(whole / "checkpoints" / f"step_{steps}.pt")
    figures = json.loads((whole / "eval.json").read_text())
    assert 0 <= figures["names/i2t/R@5"] <= 1 and 0 <= figures["ema/names/i2t/R@5"] <= 1
    assert [row["kind"] for row in metrics(whole)].count("eval") == 1
    seen = list(losses(whole).values())
    assert list(losses(whole)) == list(range(1, steps + 1)) and sum(seen[-3:]) < sum(seen[:3])


def test_the_saved_model_is_the_trained_one(whole):
    state = load_checkpoint(newest(whole))
    for folder, trained in (
        ("model", {k.removeprefix("model."): v for k, v in state["objective"].items()}),
        ("model_ema", state["ema"]),
    ):
        model = prolip.create_model(f"local-dir:{whole / folder}")
        for name, value in model.state_dict().items():
            assert torch.equal(value, trained[name]), (folder, name)


def test_an_interrupted_run_goes_on_bit_for_bit(whole, monkeypatch):
    """2 epochs == 1 epoch + interruption + resume + 1 epoch: weights, moments, averages, learning rate, log."""
    honest = training.loop.save

    def save_then_stop(run):
        honest(run)
        raise KeyboardInterrupt

    folder = whole.parent
    words = [*TINY, "--output", str(folder), "--name", "parts", "--epochs", "2", "--ema-decay", "0.9"]
    with monkeypatch.context() as patch:
        patch.setattr(training.loop, "save", save_then_stop)
        assert main(words) == 130
    parts = folder / "parts"
    assert [path.name for path in (parts / "checkpoints").iterdir()] == [f"step_{len(losses(whole)) // 2}.pt"]
    assert json.loads((parts / "status.json").read_text())["state"] == "failed"
    with open(parts / "metrics.jsonl", "a") as file:  # steps of an epoch that was lost
        file.write(json.dumps({"kind": "train", "step": 10_000, "loss": 0.0}) + "\n")
    assert main([*words, "--resume", "latest"]) == 0
    assert_same_state(newest(whole), newest(parts))
    assert losses(parts) == losses(whole)


@pytest.mark.parametrize("workers, every", [("1", 5), pytest.param("2", 7, marks=pytest.mark.slow)])
def test_a_run_that_is_stopped_inside_an_epoch_goes_on_bit_for_bit(tmp_path, workers, every):
    """12 steps == stopped and resumed at every so many of them: state, losses and the ledger of samples."""
    words = ["--max-steps", "12", "--ledger", "--workers", workers, "--save-frequency", "0", "--ema-decay", "0.9"]
    whole, parts = start(tmp_path, "whole", *words), tmp_path / "parts"
    again, stops = [*TINY, "--output", str(tmp_path), "--name", "parts", *words], 0
    while True:
        # the signal comes while that step from here is under way
        code, stops = stop_after(every, [*again, "--resume", "auto"]), stops + 1
        if code == 0:
            break
        assert code == EXIT_STOPPED
        status = json.loads((parts / "status.json").read_text())
        assert (status["state"], status["step"], status["exit_code"]) == ("stopped", every * stops, 75)
        again[again.index("--workers", 20) + 1] = "0" if workers == "1" else workers  # one stream is one stream
    assert stops == 12 // every + 1
    assert_same_state(newest(whole), newest(parts))
    assert losses(parts) == losses(whole)
    assert ledger(parts) == ledger(whole) and len(ledger(whole)) == 12


def test_a_resume_with_other_streams_is_refused_inside_an_epoch(tmp_path, capsys):
    command = [*TINY, "--output", str(tmp_path), "--name", "run", "--max-steps", "7"]
    assert stop_after(4, command) == EXIT_STOPPED
    assert main([*command, "--workers", "2", "--resume", "latest"]) == 2
    assert "choose --workers so that ranks x workers is 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, steps",
    [
        (["--save-every-samples", "65"], {3, 6, 7}),  # rounded up to 3 steps of 32
        (["--save-every-minutes", "1e-9"], set(range(1, 8))),
        (["--save-every-steps", "2", "--keep-checkpoints", "2", "--keep-every-steps", "4"], {4, 6, 7}),
        (["--checkpoint-dir", "gs://elsewhere"], set()),
    ],
)
def test_checkpoints_come_as_often_as_asked(tmp_path, words, steps):
    folder = start(tmp_path, "run", "--max-steps", "7", "--save-frequency", "0", *words)
    assert set(list_steps(Storage(str(folder / "checkpoints")))) == steps
    if not steps:
        assert list_steps(Storage("gs://elsewhere")) == [7]


def test_resuming_passes_over_a_damaged_checkpoint_and_says_so(tmp_path, capsys):
    folder = start(tmp_path, "run", "--max-steps", "5", "--save-every-steps", "3", "--save-frequency", "0")
    damaged = folder / "checkpoints" / "step_5.pt"
    damaged.write_bytes(damaged.read_bytes()[:1000])
    start(tmp_path, "run", "--max-steps", "5", "--resume", "latest")
    assert "skipped" in (text := capsys.readouterr().out) and "step_5.pt cannot be loaded" in text
    assert "resuming from" in text and "step_3.pt" in text


def test_a_saved_config_starts_the_same_run_again(tmp_path):
    first = start(tmp_path, "first", "--max-steps", "3", "--seed", "5")
    assert main(["--config", str(first / "config.json"), "--name", "second"]) == 0
    second = tmp_path / "second"
    assert losses(second) == losses(first)
    configs = [json.loads((folder / "config.json").read_text()) for folder in (first, second)]
    assert configs[0].pop("run") == configs[1].pop("run") | {"name": "first"} and configs[0] == configs[1]


@pytest.mark.parametrize(
    "words",
    [
        ["--precision", "amp_bf16", "--grad-checkpointing", "--accum-freq", "2", "--grad-clip-norm", "1"],
        ["--device-augment", "--rotate", "20", "--zoom", "0.8", "1.2", "--hue", "0.1", "--opt", "adamp"],
        ["--known-matches", "--opt", "muon", "--lr", "1e-3", "--lr-scheduler", "wsd", "--layer-decay", "0.7"],
        ["--force-image-size", "40", "--mask-padding", "--init-unc-bias", "-5", "--init-logit-scale", "20"],
    ],
)
def test_options_train(tmp_path, words):
    values = list(losses(start(tmp_path, "run", "--max-steps", "3", *words)).values())
    assert len(values) == 3 and all(0 < value < 100 for value in values)


def test_a_scale_and_bias_that_are_asked_for_hold_against_those_of_trained_weights(tmp_path):
    save_pretrained(prolip.create_model("ProLIP-ViT-test", init_logit_scale=1.0, init_logit_bias=-7.0), tmp_path)
    for flag, wanted in (({"init_logit_scale": 20.0}, (20, -7)), ({"init_logit_bias": -3.0}, (math.e, -3))):
        config = build_config("prolip", {"model": {"model": f"local-dir:{tmp_path}"} | flag})
        model, _, _ = build_model(config, torch.device("cpu"))
        assert (model.logit_scale.exp().item(), model.logit_bias.item()) == pytest.approx(wanted)


def test_a_locked_tower_stays(tmp_path):
    folder = start(tmp_path, "run", "--max-steps", "3", "--lock-text")
    trained = prolip.create_model(f"local-dir:{folder / 'model'}").state_dict()
    torch.manual_seed(0)  # the run's seed
    fresh = prolip.create_model("ProLIP-ViT-test", init_logit_bias=-3.0).state_dict()
    assert all(torch.equal(trained[name], fresh[name]) for name in fresh if name.startswith("text."))
    assert not all(torch.equal(trained[name], fresh[name]) for name in fresh if name.startswith("visual."))


@pytest.mark.slow
def test_compiled_towers_train_alike(tmp_path):
    plain = start(tmp_path, "plain", "--max-steps", "3")
    compiled = start(tmp_path, "compiled", "--max-steps", "3", "--torchcompile")
    assert list(losses(compiled).values()) == pytest.approx(list(losses(plain).values()), rel=1e-4)


def test_a_profile_is_left_of_steps_behind_the_first(tmp_path, capsys):
    folder = start(tmp_path, "run", "--max-steps", "10", "--profile", "1")
    trace = json.loads((folder / "profile" / "rank_0.json").read_text())
    steps = {event["name"] for event in trace["traceEvents"] if event.get("name", "").startswith("ProfilerStep#")}
    assert steps == {"ProfilerStep#8"}
    assert "profile of 1 steps" in (text := capsys.readouterr().out) and "aten::" in text


class Board(list):
    """Replacement of wandb, which needs a service."""

    def init(self, **settings):
        self.append(settings)
        return self

    def log(self, row, step):
        self.append((step, row["train/loss"]))

    def finish(self):
        self.append("ended")


def test_weights_and_biases_get_the_same_figures(tmp_path, monkeypatch):
    board = Board()
    monkeypatch.setitem(sys.modules, "wandb", board)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: board)
    folder = start(tmp_path, "run", "--max-steps", "3", "--wandb-project", "p")
    begun, *rows, ended = board
    assert begun["project"] == "p" and begun["id"] == "run" and ended == "ended"
    assert begun["config"] == json.loads((folder / "config.json").read_text())
    assert rows == list(losses(folder).items())


def test_the_faults_of_an_epoch_are_judged_over_all_ranks(tmp_path, monkeypatch):
    """One broken shard is a large part of the few that one of many ranks reads."""
    seen = []
    monkeypatch.setattr(training.run.ranks, "gathered", lambda x, work, world: seen.append((x, world)) or work([x]))
    start(tmp_path, "faults", "--train-num-samples", "64", "--max-steps", "3")
    ((counts, world),) = seen  # of the epoch of two batches that has ended
    assert world == World() and counts["samples"] == 64
