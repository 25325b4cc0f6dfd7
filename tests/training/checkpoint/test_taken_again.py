"""The name of a run that came to no step is free; what holds a step, or a file of somebody's, is never taken."""

from __future__ import annotations

import json
import shlex
from contextlib import ExitStack
from pathlib import Path

import pytest
from training_runs import metrics, words

from prolip.utils.flags import FlagError
from training.checkpoint.files import Storage
from training.checkpoint.run_dir import claim, open_run_dir
from training.config import RunConfig
from training.main import main

KILLED = """
seen = 0
def watch(event, found):
    global seen
    if event in ("open", "os.mkdir", "os.rename", "os.remove") and str(found[0]).startswith({folder!r}):
        seen += 1
        if seen == {number}:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(watch)
"""


BEGUN = shlex.split(
    ".lock config.json metrics.jsonl noise.jsonl tensorboard/events.out.tfevents.1 checkpoints/.step_1.pt.host.tmp "
    "ledger/rank_0.jsonl .status.json.host.tmp"
)
KEPT = {
    "checkpoints/step_1.pt": "",
    "checkpoints/superseded_step_1.pt": "",
    "best/best.json": "{}",
    "metrics.jsonl": '{"kind": "train", "step": 1}\n',
    "ledger/rank_1.jsonl": '{"step": 1}\n',
    "status.json": '{"state": "running", "checkpoint": "s3://bucket/step_1.pt"}',
    "model/config.json": "{}",
    "notes.txt": "mine",
    "checkpoints/notes.txt": "mine",
    "profile/rank_0.json": "{}",
    "mine/config.json": "",
    "eval.json": "",
}


@pytest.fixture
def begun(tmp_path) -> Path:
    """Return the files of a refused start."""
    folder = tmp_path / "run"
    for name in BEGUN:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    (folder / "profile").mkdir()
    (folder / "status.json").write_text(json.dumps({"state": "failed", "checkpoint": None}))
    (folder / "metrics.jsonl").write_text('{"kind": "train", "st')  # cut off
    return folder


def test_a_folder_without_a_step_is_taken_again_and_cleared_of_what_a_run_wrote(begun):
    open_run_dir(begun, overwrite=False, resume=False)
    with ExitStack() as held:
        claim(RunConfig(), begun, Storage(str(begun / "checkpoints")), held)
    assert {path.name for path in begun.iterdir()} == {".lock", ".status.json.host.tmp"}


@pytest.mark.parametrize("name", KEPT)
def test_a_folder_with_a_step_or_with_a_file_of_somebodys_is_refused(begun, name):
    (begun / name).parent.mkdir(exist_ok=True)
    (begun / name).write_text(KEPT[name])
    with pytest.raises(FlagError, match="already holds a run"):
        open_run_dir(begun, overwrite=False, resume=False)


def test_a_run_that_was_refused_before_its_first_step_is_typed_again_without_overwrite(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.json").write_text("{}")
    (tmp_path / "run/metrics.jsonl").write_text('{"kind": "train", "st')
    assert main(words(tmp_path, "run", "--max-steps", "2")) == 0
    assert [row["step"] for row in metrics(tmp_path / "run")] == [1, 2]
    assert main(words(tmp_path, "run", "--max-steps", "2")) == 2
    assert "already holds a run: give another --name" in capsys.readouterr().err


@pytest.mark.parametrize("stride", [35, pytest.param(1, marks=pytest.mark.slow)])
def test_a_kill_at_any_moment_leaves_a_folder_that_is_taken_again_or_resumed(tmp_path, forked, stride):
    """Tries follow each other in one folder, each killed later, where it opens, makes, renames or deletes."""
    line, number, code, taken, resumed = words(tmp_path, "run", "--max-steps", 3, "--save-every-steps", 1), 1, -9, 0, 0
    while code:
        before = KILLED.format(folder=str(tmp_path / "run"), number=number)
        code = forked.run(*line, before=before)
        if code == 2 and "already holds a run" in forked.err:
            code, resumed = forked.run(*line, "--resume", "auto", before=before), resumed + 1
            if code == 2 and "the run is finished" in forked.err:
                break
        else:
            taken += 1
        assert code in (0, -9), forked.err[-3000:]
        number += stride
    assert [row["step"] for row in metrics(tmp_path / "run") if row["kind"] == "train"] == [1, 2, 3]
    assert (tmp_path / "run/model/config.json").exists() and taken > 0 and resumed > 0
