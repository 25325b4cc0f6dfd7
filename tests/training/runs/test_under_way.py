"""Work that a stop or a kill interrupted is repeated: evaluations, the end of the run, its log."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from PIL import Image
from training_runs import metrics, stop_after, words

import training.evaluate
from drawings import VALIDATION
from training.checkpoint import run_dir
from training.checkpoint.files import CheckpointWriter
from training.health.signals import EXIT_STOPPED
from training.main import main


def evaluations(folder: Path) -> list[int]:
    return [row["step"] for row in metrics(folder) if row["kind"] == "eval"]


@pytest.mark.parametrize("where", ["evaluation", "model"])
def test_a_run_that_is_killed_behind_its_last_step_is_brought_to_its_end(tmp_path, monkeypatch, where):
    """The kill hits its last evaluation, or the writing of its model: the model is missing, but all steps are done."""

    def killed(*things, **more):
        raise KeyboardInterrupt

    target = {"evaluation": "training.evaluate.Validation.measure", "model": "training.run.save_pretrained"}[where]
    command = words(tmp_path, "run", "--max-steps", 3, *VALIDATION, "--resume", "auto")
    with monkeypatch.context() as patch:
        patch.setattr(target, killed)
        assert main(command) == 130
    run = tmp_path / "run"
    assert not (run / "model" / "model.safetensors").exists()
    assert main(command) == 0
    assert (run / "model" / "model.safetensors").exists() and json.loads((run / "eval.json").read_text())["step"] == 3
    assert evaluations(run) == [3] and [row["step"] for row in metrics(run) if row["kind"] == "train"] == [1, 2, 3]
    assert main(command) == 2  # it has ended now


def test_an_evaluation_that_a_stop_or_a_kill_came_before_is_made_up_for(tmp_path, monkeypatch):
    """Due at step 2, at which the run is stopped; at step 4 of the next try, in which it is killed; then once each."""
    command = words(tmp_path, "run", "--max-steps", 6, "--val-every-steps", 2, "--save-every-steps", 1, *VALIDATION)
    assert stop_after(2, command) == EXIT_STOPPED
    assert evaluations(tmp_path / "run") == []
    honest = training.evaluate.Validation.measure

    def killed_at_4(self, *things):
        if len(list((tmp_path / "run" / "checkpoints").glob("step_4.pt"))):
            raise KeyboardInterrupt
        return honest(self, *things)

    with monkeypatch.context() as patch:
        patch.setattr(training.evaluate.Validation, "measure", killed_at_4)
        submit = CheckpointWriter.submit
        patch.setattr(CheckpointWriter, "submit", lambda self, state: (submit(self, state), self.settle()))
        assert main([*command, "--resume", "latest"]) == 130
    assert evaluations(tmp_path / "run") == [2]
    assert main([*command, "--resume", "latest"]) == 0
    assert evaluations(tmp_path / "run") == [2, 4, 6]  # each one once


def test_a_stop_is_heard_between_the_test_sets_of_an_evaluation(tmp_path, monkeypatch):
    """The run ends after a checkpoint of the current step, and does the evaluation when it resumes."""
    root = tmp_path / "classes"
    for number, name in enumerate(("red", "blue")):
        (root / name).mkdir(parents=True)
        Image.new("RGB", (32, 32), name).save(root / name / f"{number}.png")
    sets = ["--imagenet-val", root, "--val-data", f"imagenet:{root}/"]
    command = words(tmp_path, "run", "--max-steps", 4, "--val-every-steps", 2, *sets, "--resume", "auto")
    honest, measured = training.evaluate.evaluate_over_ranks, []

    def evaluate(task, *more):
        measured.append(task.name)
        if len(measured) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return honest(task, *more)

    monkeypatch.setattr(training.evaluate, "evaluate_over_ranks", evaluate)
    assert stop_after(99, command) == EXIT_STOPPED
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["step"]) == ("stopped", 2) and measured == ["imagenet"]
    assert evaluations(tmp_path / "run") == []
    assert main(command) == 0
    assert evaluations(tmp_path / "run") == [2, 4] and len(measured) == 5


def test_seconds_of_training_go_on(tmp_path, monkeypatch, capsys):
    """The remaining time is estimated from the steps of this process only."""
    monkeypatch.setattr("training.health.log.Stopwatch.elapsed", lambda watch: watch.before + 100.0)
    command = words(tmp_path, "run", "--max-steps", 4)
    assert stop_after(2, command) == EXIT_STOPPED
    assert main([*command, "--resume", "latest"]) == 0
    assert [row["seconds"] for row in metrics(tmp_path / "run")] == [100, 100, 200, 200]
    third = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("step 3/4"))
    assert third.endswith("ETA 1:40")


def test_a_log_is_whole_while_it_is_shortened_and_what_is_no_line_of_it_is_no_hindrance(tmp_path, monkeypatch):
    """Killed in the middle: the file has all its lines, or those that are to stay."""
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step, "kind": "train"}) + "\n" for step in range(2000)))
    before, honest = path.read_bytes(), run_dir.rows_of

    def killed(path):
        for number, row in enumerate(honest(path)):
            if number == 1500:
                raise KeyboardInterrupt
            yield row

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(run_dir, "rows_of", killed)
        run_dir.truncate_log(path, 1900)
    assert path.read_bytes() == before
    run_dir.truncate_log(path, 1900)
    assert path.read_bytes() == b"".join(before.splitlines(keepends=True)[:1901])
    path.write_bytes(b'{"step": 1, "kind": "eval"}\n\xff\x00garbage\n[1]\n{"step": null}\n{"step": 2}\n{"step": 3, "k')
    run_dir.truncate_log(path, 1)
    assert path.read_bytes() == b'{"step": 1, "kind": "eval"}\n'
    run_dir.truncate_log(path, 1, again="eval")
    assert path.read_bytes() == b""
