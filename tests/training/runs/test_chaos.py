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
from training.checkpoint.files import Storage, check_checkpoint, list_steps
from training.checkpoint.run_dir import lock_run_dir

WORDS = shlex.split(
    f"--model ProLIP-ViT-test --train-data {SHARDS} --caption-sampling name,keywords --precision fp32 "
    "--device cpu --batch-size 8 --workers 1 --warmup 5 --init-logit-bias -2.8 --log-every-n-steps 1 "
    "--save-every-steps 4 --no-report --save-frequency 0 --keep-checkpoints 3 --shuffle-buffer 20 --ledger "
    "--ema-decay 0.9 --resume auto"
)


def steps_done(run: Path) -> int:
    try:
        return (run / "metrics.jsonl").read_text().count("\n")
    except FileNotFoundError:
        return 0


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


