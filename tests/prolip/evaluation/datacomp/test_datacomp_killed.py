"""A real process at the suite is stopped, then killed, while another one works on: nothing is lost or done twice."""

import json
import os
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import miniatures
import pytest
from commands import datacomp
from datacomp_suite import Oracle, write_suite

from prolip.evaluation.suites.datacomp import run
from prolip.evaluation.suites.datacomp.store import share_tasks
from prolip.evaluation.suites.datacomp.tasks import TASKS

SOURCE = Path(__file__).parents[4] / "src"


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(run, "share_tasks", partial(share_tasks, poll=0.05))


def tasks_told(output):
    """What a process says of tasks it has finished, as it says it."""
    return (line for line in output if line.startswith("["))


def test_a_killed_process_loses_no_finished_task_and_another_one_takes_up_the_rest(tmp_path, capsys):
    model, out = miniatures.prolip_folder(tmp_path / "model"), tmp_path / "out"
    write_suite(tmp_path / "data", TASKS, Oracle(model))
    arguments = ["--model", model, "--data", str(tmp_path / "data"), "--output", str(out), "--device", "cpu"]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    victim = subprocess.Popen(
        [sys.executable, "-m", "prolip", "eval", "datacomp", *arguments],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
    )
    try:
        assert next(tasks_told(victim.stdout))
        os.kill(victim.pid, signal.SIGSTOP)  # alive and at the next task, whose claim it holds
        before = (out / "results.jsonl").read_text()
        threading.Timer(1.0, victim.kill).start()
        datacomp(arguments)
        assert victim.wait(10) == -signal.SIGKILL
    finally:
        victim.kill()
        victim.wait()
        victim.stdout.close()
    after = (out / "results.jsonl").read_text()
    assert after.startswith(before) and before.count("\n") >= 1
    keys = [json.loads(line)["key"] for line in after.splitlines()]
    assert sorted(keys) == sorted(task.key for task in TASKS)  # each once
    assert len(list(tasks_told(capsys.readouterr().out.splitlines()))) == len(TASKS) - before.count("\n")
    datacomp(arguments)
    assert (out / "results.jsonl").read_text() == after
