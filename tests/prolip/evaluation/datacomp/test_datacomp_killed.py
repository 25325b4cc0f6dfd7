"""Two real processes at one suite: one is killed in the middle, the other ends it, a third finds nothing to do."""
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import miniatures
from datacomp_suite import Oracle, write_suite

from prolip.evaluation.datacomp.__main__ import main
from prolip.evaluation.datacomp.tasks import TASKS

SOURCE = Path(__file__).parents[4] / "src"


def start(arguments):
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-m", "prolip.evaluation.datacomp", *arguments], text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)  # fmt: skip


def finished_tasks(output):
    """The tasks that a process says it has finished, as it says so."""
    return (line for line in output if line.startswith("["))


def test_of_two_processes_one_is_killed_and_the_other_ends_the_suite_once(tmp_path):
    model, out = miniatures.prolip_folder(tmp_path / "model"), tmp_path / "out"
    write_suite(tmp_path / "data", TASKS, Oracle(model))
    arguments = ["--model", model, "--data-dir", str(tmp_path / "data"), "--output", str(out), "--device", "cpu"]
    victim, other = start(arguments), start(arguments)
    try:
        said = finished_tasks(victim.stdout)
        assert next(said)  # a task is on disk, and the next one is being evaluated
        os.kill(victim.pid, signal.SIGKILL)
        text = other.communicate(timeout=120)[0]
        assert other.returncode == 0, text
    finally:
        for process in (victim, other):
            process.kill()
            process.wait()
            process.stdout.close()
    keys = [json.loads(line)["key"] for line in (out / "results.jsonl").read_text().splitlines()]
    assert sorted(keys) == sorted(task.key for task in TASKS)  # each once
    assert len(list(finished_tasks(text.splitlines()))) < len(TASKS)
    before = (out / "results.jsonl").read_bytes()
    main(arguments)
    assert (out / "results.jsonl").read_bytes() == before
