"""The demo from end to end, with a toy model and two steps; interrupted, repeated, and where it cannot run."""

import json
from pathlib import Path

import pytest

import demo
from prolip.cli.main import main
from training.checkpoint.run_dir import is_finished
from training.health.signals import STOP

ROOT = Path(__file__).resolve().parents[2]

SELECT = ["--select", "subgroup=game", "--val-select", "subgroup=game"]
TOY = [*SELECT, "--model", "ProLIP-ViT-test", "--warmup", "1", "--batch-size", "16", "--workers", "0"]


def test_the_demo_leaves_model_figures_and_page(tmp_path, forked):
    assert forked.script(ROOT / "scripts/demo.py", "--output", tmp_path, "--", *TOY, "--max-steps", "2") == 0, (
        forked.err
    )
    run = tmp_path / "demo"
    for name in ("config.json", "metrics.jsonl", "eval.json", "model/model.safetensors", "report.html"):
        assert (run / name).stat().st_size > 0
    assert f"Open {run / 'report.html'}" in forked.out and is_finished(run)


@pytest.fixture
def typed(tmp_path, monkeypatch):
    """Type the demo's command with stand-ins for training and page; returns what they were given, in order."""
    given: list[list[str]] = []

    def command(*words: str, code: int = 0) -> list[list[str]]:
        given.clear()
        monkeypatch.setattr("training.main.main", lambda flags: given.append(flags) or code)
        drawn = lambda folder: given.append([str(folder)]) or folder / "report.html"  # noqa: E731
        monkeypatch.setattr("prolip.corpora.emoji.report.page.make_report", drawn)
        monkeypatch.setattr(STOP, "again", "")
        monkeypatch.setattr(STOP, "install", lambda again: setattr(STOP, "again", again))
        monkeypatch.chdir(ROOT)
        assert main(["demo", "--output", str(tmp_path), *words]) == code
        return given

    return command


def leave(run: Path, state: str, **facts: str | int) -> None:
    """A run folder in this state."""
    run.mkdir(exist_ok=True)
    (run / "config.json").write_text("{}")
    (run / "status.json").write_text(json.dumps({"state": state, **facts}))


@pytest.mark.parametrize("state", [None, "stopped", "failed"])
def test_what_has_not_ended_is_gone_on_with(state, typed, tmp_path):
    if state:
        leave(tmp_path / "demo", state)
    (flags,) = typed("--", "--seed", "3")
    assert flags[-4:] == ["--resume", "auto", "--seed", "3"] and "--overwrite" not in flags
    assert "--overwrite" in typed("--overwrite")[0]


def test_a_run_that_has_ended_is_not_trained_again_unless_that_is_asked_for(typed, tmp_path, capsys):
    leave(tmp_path / "demo", "finished", total_steps=1480)
    assert typed() == [[str(tmp_path / "demo")]]
    told = f"holds a finished run of 1,480 steps. To train again: prolip demo --output {tmp_path} --overwrite\n"
    assert told in capsys.readouterr().out
    assert typed("--", "--seed", "1", code=2) == []
    assert "holds a finished run: give --overwrite to delete it, or another --output" in capsys.readouterr().err
    (flags,) = typed("--overwrite", "--", "--seed", "1")
    assert flags[-3:] == ["--overwrite", "--seed", "1"] and "--resume" not in flags


def test_training_that_fails_is_followed_by_what_to_type_and_no_page(typed, tmp_path, capsys):
    leave(tmp_path / "demo", "stopped")
    assert len(typed(code=2)) == 1 and "--overwrite deletes" in capsys.readouterr().err


def test_a_stopped_demo_says_once_how_its_user_resumes_it(typed, tmp_path, monkeypatch, capsys):
    leave(tmp_path / "demo", "stopped")
    monkeypatch.setenv("MAKELEVEL", "1")
    assert len(typed("--", "--seed", "3", code=75)) == 1 and capsys.readouterr().err == ""
    assert STOP.again == f"prolip demo --output {tmp_path} -- --seed 3"
    assert demo.typed("paper", "runs", []) == "prolip demo --recipe paper"
    assert demo.typed("demo", "runs", []) == "make demo"
    monkeypatch.delenv("MAKELEVEL")
    assert demo.typed("demo", "runs", []) == "prolip demo"


def test_a_resumed_demo_says_that_its_minutes_are_those_since_then(typed, tmp_path, capsys):
    leave(tmp_path / "demo", "stopped", checkpoint="step_3.pt")
    typed()
    assert "done in 0.0 minutes since it was resumed. Open" in capsys.readouterr().out
    typed("--overwrite")
    assert "done in 0.0 minutes. Open" in capsys.readouterr().out


def test_the_demo_says_that_it_needs_a_clone(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("prolip.cli.command.__file__", str(tmp_path / "lib/prolip/cli/command.py"))
    monkeypatch.chdir(tmp_path)
    assert main(["demo"]) == 2
    assert capsys.readouterr().err.startswith("error: the demo needs the bundled drawings: run prolip demo in a clone")
