"""A run resumes by its name: the line that a stopped run prints, settings and workers that a run keeps."""

from __future__ import annotations

import json
import shlex
from functools import partial
from pathlib import Path

import pytest
from training_runs import SYNTHETIC, stop_after

from prolip.cli.main import main as command_line
from prolip.utils.flags import FlagError
from training.defaults import settle_workers
from training.health.signals import EXIT_STOPPED, STOP
from training.main import parse, way_on
from training.parallel import World

STEPS = 80
TRAINING = [*SYNTHETIC, "--max-steps", str(STEPS), "--seed", "5", "--lr", "2e-3", "--method", "siglip"]


def test_the_line_that_a_stopped_run_prints_goes_on_with_it_and_its_settings(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("training_runs.main", lambda words: command_line(["train", *words]))
    assert stop_after(3, [*TRAINING, "--max-steps", "5", "--name", "my run"]) == EXIT_STOPPED
    line = capsys.readouterr().err.partition("Resume with:\n")[2].strip()
    assert line == "prolip train --name 'my run' --resume latest"
    assert command_line(shlex.split(line)[1:]) == 0
    assert "runs/my run/checkpoints/step_3.pt at step 3" in capsys.readouterr().out
    config = json.loads((tmp_path / "runs/my run/config.json").read_text())
    assert (config["method"], config["run"]["seed"], config["optim"]["lr"]) == ("siglip", 5, 2e-3)


def test_the_only_line_is_that_of_the_program_that_started_the_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(STOP, "install", partial(STOP.install, "make demo"))
    assert stop_after(1, [*TRAINING, "--max-steps", "2", "--name", "it"]) == EXIT_STOPPED
    said = capsys.readouterr().err
    assert said.endswith("Resume with:\n  make demo\n") and "--resume" not in said
    assert STOP.way_on == "resume with: make demo"
    STOP.again = ""


def test_the_line_is_that_of_the_program_and_under_torchrun_of_one_node_or_several(monkeypatch):
    for environment, program in (
        ({}, "python -m training.main"),
        ({"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "2"}, "torchrun --nproc_per_node 2 -m training.main"),
        ({"GROUP_WORLD_SIZE": "2"}, "torchrun (its options, as before) -m training.main"),
    ):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        line = way_on(Path("runs/it"), parse(TRAINING), "training.main")
        assert line == f"{program} --name it --resume latest"


@pytest.fixture
def saved(tmp_path) -> Path:
    """The folder of a run with settings of its own, as far as these."""
    folder = tmp_path / "runs/it"
    folder.mkdir(parents=True)
    config = parse([*TRAINING, "--output", str(folder.parent), "--name", "it"])
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    return folder


@pytest.mark.parametrize("resume", ["latest", "auto"])
def test_resume_takes_the_settings_of_the_named_run_unless_flags_override_them(saved, resume):
    words = ["--resume", resume, "--output", str(saved.parent), "--name", "it"]
    config = parse(words)
    assert (config.method, config.optim.lr, config.run.seed, config.run.max_steps) == ("siglip", 2e-3, 5, STEPS)
    assert config.run.resume == resume and config.data.train_num_samples == 64
    config = parse([*words, "--lr", "0.1", "--epochs", "3"])
    assert (config.optim.lr, config.run.seed, config.run.max_steps, config.run.epochs) == (0.1, 5, None, 3)
    assert parse(["--output", str(saved.parent), "--name", "it"]).method == "prolip"  # no resume, no settings


def test_a_run_whose_folder_was_moved_goes_on_where_it_is(saved, tmp_path):
    saved.rename(tmp_path / "moved")
    config = parse(["--resume", "latest", "--output", str(tmp_path), "--name", "moved"])
    assert (config.run.output, config.run.name, config.method) == (str(tmp_path), "moved", "siglip")


def test_a_mistyped_name_is_refused_with_the_near_ones(saved):
    with pytest.raises(FlagError, match="runs/its holds no run: did you mean it"):
        parse(["--resume", "latest", "--output", str(saved.parent), "--name", "its"])


def default(monkeypatch, cores: int, *words: object):
    monkeypatch.setattr("training.defaults.cores", lambda: cores)
    position = SYNTHETIC.index("--workers")
    return parse([*SYNTHETIC[:position], *SYNTHETIC[position + 2 :], *map(str, words)])


@pytest.mark.parametrize(
    ("cores", "words", "rows", "workers"),
    [
        (3, [], 8, 2),
        (64, ["--batch-size", 96], 96, 8),
        (6, ["--batch-size", 7], 7, 1),
        (8, ["--accum-freq", 2, "--batch-size", 4], 8, 4),
        (8, ["--workers", 0], 8, 0),
    ],
)
def test_workers_are_the_cores_as_far_as_the_batch_divides_and_stand_in_the_config(
    monkeypatch, tmp_path, cores, words, rows, workers
):
    config = settle_workers(default(monkeypatch, cores, *words), World(), rows, tmp_path)
    assert config.data.workers == config.to_dict()["data"]["workers"] == workers


def test_a_run_that_goes_on_keeps_its_workers_on_a_machine_with_other_cores(monkeypatch, saved):
    whole = json.loads((saved / "config.json").read_text())
    whole["data"]["workers"] = 2
    (saved / "config.json").write_text(json.dumps(whole))
    words = ["--output", saved.parent, "--name", "it"]
    assert settle_workers(default(monkeypatch, 8, *words), World(), 8, saved).data.workers == 8
    (saved.parent / "a.yaml").write_text("method: clip")
    again = default(monkeypatch, 8, *words, "--resume", "auto", "--config", saved.parent / "a.yaml")
    assert settle_workers(again, World(), 8, saved).data.workers == 2
