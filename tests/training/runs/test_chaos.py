"""A run of two ranks that is killed and stopped again and again ends where an undisturbed one ends."""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from drawings import SHARDS
from forked import until
from training.checkpoint.files import check_checkpoint, list_steps
from training.checkpoint.run_dir import lock_run_dir
from training.checkpoint.storage import Storage

ROOT = Path(__file__).parents[3]
WORDS = shlex.split(
    f"--model ProLIP-ViT-test --train-data {SHARDS} --caption-sampling name,keywords --precision fp32 "
    "--device cpu --batch-size 8 --workers 1 --warmup 5 --init-logit-bias -2.8 --log-every-n-steps 1 "
    "--save-every-steps 4 --no-report --save-frequency 0 --keep-checkpoints 3 --shuffle-buffer 20 --ledger "
    "--ema-decay 0.9 --resume auto"
)


def launch(folder: Path, name: str, steps: int) -> subprocess.Popen:
    """torchrun of two ranks in a process group of its own, its output in a file."""
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment |= {
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
        # as slurm/train.sbatch: torchrun hands these on to its workers, and waits for them
        "PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
        "PET_SHUTDOWN_TIMEOUT": "60",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += ["-m", "training.main", *WORDS, "--max-steps", str(steps), "--output", str(folder), "--name", name]
    with open(folder / f"{name}.log", "a") as log:
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )


def steps_done(run: Path) -> int:
    try:
        return (run / "metrics.jsonl").read_text().count("\n")
    except FileNotFoundError:
        return 0


def disturb(launcher: subprocess.Popen, how: str) -> None:
    """kill -9 of everything, of one rank, or of the launcher alone, which its ranks must notice; or a stop signal."""
    listed = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(launcher.pid)], capture_output=True, text=True)
    ranks = [int(line.split()[0]) for line in listed.stdout.splitlines() if "training.main" in line]
    if how in ("all", "launcher"):
        os.kill(launcher.pid, signal.SIGKILL)
        for rank in ranks if how == "all" else []:
            os.kill(rank, signal.SIGKILL)
    elif how == "one" and ranks:
        os.kill(ranks[-1], signal.SIGKILL)
    else:
        os.kill(launcher.pid, signal.SIGUSR1 if how == "usr1" else signal.SIGTERM)


def ledgers(run: Path, steps: int) -> list[dict[int, list[str]]]:
    found = []
    for rank in range(2):
        rows = [json.loads(line) for line in (run / "ledger" / f"rank_{rank}.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows] == list(range(1, steps + 1))
        found.append({row["step"]: row["keys"] for row in rows})
    return found


def states_left(run: Path) -> str:
    storage = Storage(str(run / "checkpoints"))
    for step in list_steps(storage):
        check_checkpoint(storage.path(f"step_{step}.pt"))
    return json.loads((run / "status.json").read_text())["state"] if (run / "status.json").exists() else "none"


def assert_same(run: Path, whole: Path, steps: int) -> None:
    for part in ("model", "model_ema"):
        want, got = (load_file(folder / part / "model.safetensors") for folder in (whole, run))
        assert want.keys() == got.keys()
        assert all(torch.equal(value, got[name]) for name, value in want.items()), part
    assert ledgers(run, steps) == ledgers(whole, steps)


def test_ranks_that_are_killed_and_stopped_end_where_undisturbed_ones_end(forked, tmp_path):
    """Without torchrun, whose starts take long: kill -9 of one rank, which the other one notices, and USR1."""
    words = [*WORDS, "--max-steps", 16, "--output", tmp_path, "--name"]
    assert forked.run(*words, "whole", ranks=2) == 0, forked.err[-3000:]
    rng, run = random.Random(0), tmp_path / "run"
    for number, code, state in ((signal.SIGKILL, -9, "failed"), (signal.SIGUSR1, 75, "stopped"), (None, 0, "finished")):
        wanted = steps_done(run) + rng.randint(1, 5)
        forked.start(*words, "run", ranks=2)
        if number is not None:
            until(lambda wanted=wanted: steps_done(run) >= wanted)
            os.kill(forked.pid, number)
        assert forked.end() == code, forked.err[-3000:]
        assert states_left(run) in (state, "running"), state
    assert_same(run, tmp_path / "whole", 16)


@pytest.mark.slow
@pytest.mark.timeout(900)  # up to twelve starts of torchrun
@pytest.mark.parametrize("seed", range(3))
def test_disturbances_leave_no_trace(forked, tmp_path, seed, steps=200):
    """kill -9 of all or of one rank, TERM and USR1, at random steps and also between them and while ranks start."""
    words = [*WORDS, "--max-steps", steps, "--output", tmp_path, "--name", "whole"]
    assert forked.run(*words, ranks=2) == 0, forked.err[-3000:]
    rng, run, states = random.Random(seed), tmp_path / "run", []
    for moment, how in enumerate(2 * ["all", "one", "term", "usr1", "launcher"]):
        launcher = launch(tmp_path, "run", steps)
        if moment == 5:
            time.sleep(rng.uniform(0.5, 4))  # while the ranks are starting
        else:
            wanted = min(steps_done(run), steps - 30) + rng.randint(1, 16)
            until(lambda to=wanted, by=launcher: steps_done(run) >= to or by.poll() is not None, 120)
            time.sleep(rng.uniform(0, 0.03))
        disturb(launcher, how)
        assert launcher.wait(120) != 0
        if how == "launcher":  # the next try waits for its ranks, which stop by themselves
            lock_run_dir(run).close()
        states.append((how, states_left(run)))
    assert all(state == "stopped" for how, state in states if how in ("term", "usr1", "launcher")), states
    final = launch(tmp_path, "run", steps).wait(300)
    assert final == 0, (tmp_path / "run.log").read_text()[-3000:]
    assert_same(run, tmp_path / "whole", steps)
