"""Two ranks that are killed and stopped again and again end where undisturbed ones end: a further method, in shards."""

from __future__ import annotations

import json
import os
import shlex
import signal
from pathlib import Path

import near_method
import torch
from safetensors.torch import load_file
from training_runs import status, steps_done

from drawings import SHARDS
from forked import until
from prolip.methods import FURTHER
from training.checkpoint.files import Storage, check_checkpoint, list_steps

STEPS = 12
WORDS = shlex.split(
    f"--model ProLIP-ViT-test --train-data {SHARDS} --caption-sampling name,keywords --precision fp32 "
    "--device cpu --batch-size 8 --workers 1 --warmup 5 --init-logit-bias -2.8 --log-every-n-steps 1 "
    "--save-every-steps 3 --no-report --save-frequency 0 --keep-checkpoints 3 --shuffle-buffer 20 --ledger "
    f"--ema-decay 0.9 --resume auto --method near --fsdp --max-steps {STEPS}"
)
PLACE = str(Path(near_method.__file__).parent)
KNOWN = f"import os, sys; sys.path.append({PLACE!r}); os.environ[{FURTHER!r}] = 'near_method'"


def ledgers(run: Path) -> list[list[dict]]:
    files = [(run / f"ledger/rank_{rank}.jsonl").read_text().splitlines() for rank in range(2)]
    return [[json.loads(line) for line in lines] for lines in files]


def state_left(run: Path) -> str:
    storage = Storage(str(run / "checkpoints"))
    for step in list_steps(storage):
        check_checkpoint(storage.path(f"step_{step}.pt"))
    return status(run)["state"]


def test_ranks_that_are_killed_and_stopped_end_where_undisturbed_ones_end(forked, tmp_path):
    """The test avoids torchrun's slow starts: kill -9 of one rank, then of a worker of the other, and USR1."""
    words, run = [*WORDS, "--output", tmp_path, "--name"], tmp_path / "run"
    assert forked.run(*words, "whole", ranks=2, before=KNOWN) == 0, forked.err[-3000:]
    ends = {"rank": (-9, "running"), "worker": (2, "failed"), "stop": (75, "stopped"), "": (0, "finished")}
    for how, (code, state) in ends.items():
        wanted = steps_done(run) + 2
        forked.start(*words, "run", ranks=2, before=KNOWN)
        if how:
            until(lambda wanted=wanted: steps_done(run) >= wanted)
            number = signal.SIGUSR1 if how == "stop" else signal.SIGKILL
            os.kill(forked.workers(1)[0] if how == "worker" else forked.pid, number)
        assert forked.end() == code, forked.err[-3000:]
        assert state_left(run) == state
        if how == "worker":
            assert forked.err.count("error (rank 1): a worker of the data loader") == 1
            assert forked.err.count("was killed by signal: Killed, most likely by the kernel") == 1
            assert forked.err.count("error: another rank ended (") == 1
    for part in ("model", "model_ema"):
        want, got = (load_file(folder / part / "model.safetensors") for folder in (tmp_path / "whole", run))
        assert want.keys() == got.keys() >= {"near.weight", "text.head.shift.weight"}
        assert all(torch.equal(value, got[name]) for name, value in want.items()), part
    assert want["near.weight"].unique().numel() > 1  # trained
    assert ledgers(run) == ledgers(tmp_path / "whole")
    assert [[row["step"] for row in rows] for rows in ledgers(run)] == 2 * [list(range(1, STEPS + 1))]
