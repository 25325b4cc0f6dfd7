"""The advice of a refused or ended run is correct: typing it gives a run that ends successfully."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path

import pytest
from training_runs import words

from training.checkpoint.files import Storage, list_steps
from training.checkpoint.run_dir import write_status
from training.health.errors import explain
from training.main import main

STEPS = 3

@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A run that has ended, with two checkpoints."""
    folder = tmp_path_factory.mktemp("finished")
    assert main(words(folder, "run", "--max-steps", STEPS, "--save-every-steps", 2)) == 0
    return folder / "run"


def test_checkpoints_elsewhere_are_gone_on_from_and_without_them_a_log_is_not_written_over(tmp_path, finished, capsys):
    again, run = words(tmp_path, "run", "--max-steps", STEPS + 2, "--resume", "auto"), tmp_path / "run"
    shutil.copytree(finished, run)
    before, place = (run / "metrics.jsonl").read_bytes(), shutil.move(run / "checkpoints", tmp_path / "c")
    assert main(again) == 2 and "without a checkpoint to resume from" in capsys.readouterr().err
    assert (run / "metrics.jsonl").read_bytes() == before
    config = json.loads((run / "config.json").read_text())
    config["run"]["checkpoint_dir"] = str(place)
    (run / "config.json").write_text(json.dumps(config))
    write_status(run, "stopped")
    assert main(again) == 0
    assert (run / "metrics.jsonl").read_bytes().startswith(before) and (place / f"step_{STEPS + 2}.pt").exists()


SYSTEM = {
    "DataLoader worker (pid 7) is killed by signal: Killed. ": "(process 7) was killed by signal: Killed, most",
    "DataLoader worker (pid(s) 7, 8) exited unexpectedly": "(process 7, 8) ended without a message, most likely by",
    "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that": "Bus error, most likely because /dev/shm",
    "Too many open files. Communication with the workers is no longer possible": "`ulimit -n`",
    "unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)": "--shm-size",
    "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried": "this process is out of memory",
    "[gloo/transport/tcp/pair.cc:545] Read error [::1]:9: Connection reset by peer": "another rank ended",
    "[gloo/transport/tcp/pair.cc:5] writev [::1]:9: Broken pipe": "another rank ended",
    "[gloo] Connection closed by peer [::1]:1": "another rank ended",
}


@pytest.mark.parametrize("text", SYSTEM)
def test_what_the_system_does_to_a_run_is_reported_in_a_line(text):
    line = explain(RuntimeError(text))
    assert line is not None and SYSTEM[text] in line and "\n" not in line


def test_the_signal_that_ended_a_worker_is_found_behind_what_torch_met_next():
    try:
        try:
            raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")
        except RuntimeError as first:
            raise RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly") from first
    except RuntimeError as error:
        assert "killed by signal: Killed" in (explain(error) or "")
