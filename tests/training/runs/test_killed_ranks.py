"""Many real processes with few open files: a rank is killed, the run goes on, and ends where one process ends."""

from __future__ import annotations

import os
import shlex
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from training_runs import assert_moved_alike, metrics, newest

import prolip
from drawings import SHARDS
from forked import Forked, until

STEPS = 20
TRAINING = shlex.split(
    f"--model ProLIP-ViT-test --train-data {SHARDS} --caption-sampling name,keywords --precision fp32 "
    f"--device cpu --max-steps {STEPS} --warmup 2 --lr 1e-3 --init-logit-bias -2.8 --alpha1 0.1 --alpha2 "
    "0.5 --beta 0.01 --mask-fraction 0.5 --grad-clip-norm 5 --shuffle-buffer 20 --save-frequency 0 "
    "--save-every-steps 5 --log-every-n-steps 1 --no-report"
)
FEW_FILES = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))"


def words(folder: Path, name: str, ranks: int, workers: int, *more: str) -> list[str]:
    """The same global batches of 48, whatever the number of ranks: streams of data are ranks x workers."""
    place = ["--output", str(folder), "--name", name, "--batch-size", str(48 // ranks), "--workers", str(workers)]
    return [*TRAINING, *place, *more]


def killed_and_resumed(forked: Forked, folder: Path, ranks: int, after: int) -> None:
    """kill -9 of one rank behind that step; torchrun would end the others, and the same command goes on."""
    again = words(folder, "killed", ranks, 0, "--resume", "auto")
    forked.start(*again, ranks=ranks, before=FEW_FILES)
    until(lambda: (folder / f"killed/checkpoints/step_{after}.pt").exists(), 300)
    os.kill(forked.pids[ranks // 2], signal.SIGKILL)
    time.sleep(1)
    forked.send(signal.SIGTERM)
    time.sleep(1)
    forked.send(signal.SIGKILL)
    assert forked.end() != 0
    done = len(metrics(folder / "killed"))
    assert after <= done < STEPS
    assert forked.run(*again, ranks=ranks, before=FEW_FILES) == 0, forked.err[-3000:]
    assert f"going on from {folder}/killed/checkpoints/step_" in forked.out


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [8, 24])
def test_many_ranks_with_256_open_files_end_where_one_process_ends(tmp_path, forked, ranks):
    """A rank that is killed costs no bit; against one process, sums of gradients come in another order."""
    assert forked.run(*words(tmp_path, "one", 1, ranks)) == 0, forked.err[-3000:]
    assert forked.run(*words(tmp_path, "whole", ranks, 0), ranks=ranks, before=FEW_FILES) == 0, forked.err[-3000:]
    killed_and_resumed(forked, tmp_path, ranks, after=5)
    for one, other in zip(metrics(tmp_path / "one"), metrics(tmp_path / "whole"), strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5), one["step"]
    states = {name: load_file(tmp_path / name / "model/model.safetensors") for name in ("one", "whole", "killed")}
    for name, value in states["whole"].items():
        assert torch.equal(value, states["killed"][name]), name
    torch.manual_seed(0)
    start = prolip.create_model("ProLIP-ViT-test", init_logit_bias=-2.8).state_dict()
    # the bias of keys has no gradient but rounding, by which it moves
    assert_moved_alike(states["whole"], states["one"], start, part=0.1)
    saved = [torch.load(newest(tmp_path / name), weights_only=True) for name in ("whole", "killed")]
    moments = [state["optimizer"]["state"] for state in saved]
    assert all(torch.equal(moments[0][n][k], moments[1][n][k]) for n in moments[0] for k in moments[0][n])
