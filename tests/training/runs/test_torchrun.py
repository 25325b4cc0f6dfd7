"""Two ranks train as one process with twice the batch, and fail together; once under a real torchrun."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from training_runs import assert_moved_alike, metrics

import prolip
from drawings import SHARDS, VALIDATION
from forked import Forked
from prolip.models.checkpoint import save_pretrained
from training.health.signals import EXIT_STOPPED

ROOT = Path(__file__).parents[3]
STEPS = 10
# Heavier inclusion and VIB terms than the paper's, so that masked views show in the gradients.
TRAINING = shlex.split(
    f"--model ProLIP-ViT-test --train-data {SHARDS} --caption-sampling name,keywords --precision fp32 "
    f"--device cpu --max-steps {STEPS} --warmup 2 --lr 1e-3 --init-logit-bias -2.8 --alpha1 0.1 --alpha2 "
    "0.5 --beta 0.01 --grad-clip-norm 5 --mask-fraction 0.25 --log-every-n-steps 1 --shuffle-buffer 50 "
    "--ema-decay 0.9 --lr-scheduler const --no-report"
)


ONE, DDP = (1, "--batch-size", "16", "--workers", "2"), (2, "--batch-size", "8", "--workers", "1")
FSDP = (*DDP, "--fsdp")
# Both ranks as under torchrun; each receives a signal during the fourth step.
STOPPED = """
import time
def step(trained, batch, step, honest=training.loop.training_step):
    time.sleep(0.2)  # ranks agree on a stop every quarter of a second
    if step == 3:
        os.kill(os.getpid(), signal.SIGTERM)
    return honest(trained, batch, step)
training.loop.training_step, os.environ["TORCHELASTIC_RUN_ID"] = step, "x"
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory, forked) -> Path:
    """Train on the same global batches of 16: one process; two ranks with two micro-batches each; two ranks that are
    stopped, and resume with the line that they print.
    """
    folder = tmp_path_factory.mktemp("runs")
    parts = (2, "--batch-size", "4", "--workers", "1", "--accum-freq", "2", *VALIDATION)
    for name, (ranks, *words) in (("one", ONE), ("parts", parts)):
        train(forked, ranks, *words, "--output", folder, "--name", name)
    (folder / "parts.out").write_text(forked.out)
    two = [*TRAINING, *DDP[1:], "--output", folder, "--name", "two"]
    assert forked.run(*two, ranks=2, before=STOPPED) == EXIT_STOPPED, forked.err[-3000:]
    shutil.copytree(folder / "two", folder / "stopped")
    line = forked.err.partition("Resume with:\n")[2].strip()
    assert line == f"torchrun --nproc_per_node 2 -m training.main --name two --resume latest --output {folder}"
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment |= {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "PET_STANDALONE": "1"}  # a port of its own
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    done = subprocess.run(["bash", "-c", line], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and "two/checkpoints/step_" in done.stdout, done.stderr
    return folder


def train(forked: Forked, ranks: int, *words: object) -> None:
    assert forked.run(*TRAINING, *words, ranks=ranks) == 0, forked.err[-3000:]


def rows(folder: Path, kind: str = "train") -> list[dict]:
    return [row for row in metrics(folder) if row["kind"] == kind]


TERMS = shlex.split(
    "loss ppcl inclusion_image_text inclusion_image inclusion_text vib_image vib_text scale bias trace_image "
    "trace_text trace_masked_image trace_masked_text grad_norm lr"
)


def trained(run: Path, part: str = "model") -> dict[str, torch.Tensor]:
    """The parameters of a run, but the key biases of attention.

    A key bias adds one number to all logits of a query, which softmax cancels: its gradient is rounding noise, and
    AdamW turns noise into steps of size lr. It has no effect on the model.
    """
    state = load_file(run / part / "model.safetensors")
    for key, value in state.items():
        if key.endswith("in_proj_bias"):
            query, _, values = value.chunk(3)
            state[key] = torch.cat([query, values])
    return state


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> dict[str, torch.Tensor]:
    """Return the initial weights of all runs."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("start")
    save_pretrained(prolip.create_model("ProLIP-ViT-test", init_logit_bias=-2.8), folder / "model")
    return trained(folder)


@pytest.mark.rounding
@pytest.mark.parametrize("name", ["two", "parts"])
def test_ranks_and_micro_batches_train_as_one_process(runs, start, name):
    """Every term of every step to 1e-5, the gradient's norm to 1e-4: float32 sums in another order, through AdamW."""
    want, got = rows(runs / "one"), rows(runs / name)
    assert [row["step"] for row in got] == [row["step"] for row in want] == list(range(1, STEPS + 1))
    for a, b in zip(want, got):
        for term in TERMS:
            rel = 1e-4 if term == "grad_norm" else 1e-5
            assert b[term] == pytest.approx(a[term], rel=rel), (a["step"], term)
    assert_moved_alike(trained(runs / name), trained(runs / "one"), start, part=5e-3)


def test_only_the_first_rank_speaks_and_writes(runs):
    assert (runs / "parts.out").read_text().count(f"step {STEPS}/{STEPS}") == 1
    assert len(rows(runs / "parts", kind="eval")) == 1
    assert (runs / "parts/eval.json").exists() and (runs / "parts/model_ema").exists()


def test_two_ranks_stop_together_at_a_loss_that_is_not_finite(forked, runs):
    words = [*TRAINING, "--batch-size", "8", "--workers", "0", "--opt", "sgd", "--lr", "1e30"]
    assert forked.run(*words, "--output", runs, "--name", "burst", ranks=2) == 2
    assert forked.err.count("the run stops before this reaches the parameters") == 1
    assert not (runs / "burst" / "checkpoints").exists()
    assert json.loads((runs / "burst" / "status.json").read_text())["state"] == "failed"


# Five steps the first way, then the others the second, from a checkpoint inside an epoch; None: ranks were stopped.
CHANGES = {"shards-ddp": (FSDP, DDP), "ddp-shards": (None, FSDP), "one-two": (ONE, DDP), "two-one": (DDP, ONE)}
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("shards-ddp", "one-two", "two-one")]


@pytest.mark.rounding
@pytest.mark.parametrize("name", ["ddp-shards", *SLOW])
def test_runs_go_on_with_other_ranks_or_in_shards_as_one_process_would(forked, runs, tmp_path, start, name):
    """FSDP2, DDP and one process take over from each other: all is as in one process."""
    for way, steps, again in zip(CHANGES[name], ("5", "10"), ([], ["--resume", "latest"])):
        if way is None:
            shutil.copytree(runs / "stopped", tmp_path / name)
        else:
            ranks, *words = way
            train(forked, ranks, *words, "--output", tmp_path, "--name", name, "--max-steps", steps, *again)
    for a, b in zip(rows(runs / "one"), rows(tmp_path / name), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5), (name, a["step"])
        assert all(b[term] == pytest.approx(a[term], rel=1e-4) for term in ("grad_norm", "grad_norm_text"))
    for part in ("model", "model_ema"):
        assert_moved_alike(trained(tmp_path / name, part), trained(runs / "one", part), start, part=5e-3)


SLOW_STORE = """
import datetime, time
import torch.distributed as dist
from training.checkpoint.files import Storage
begin, write = dist.init_process_group, Storage.write

def impatient(*args, **settings):
    begin(*args, **settings, timeout=datetime.timedelta(seconds=3))

def slow(self, name, fill):
    write(self, name, fill)
    time.sleep(4 if name == "step_1.pt" else 0)

dist.init_process_group, Storage.write = impatient, slow
"""


def test_a_store_that_is_slower_than_a_collective_may_be_does_not_end_the_run(tmp_path, forked):
    """Rank 0 waits at its second checkpoint for the first; the others wait for it, not in training's own group."""
    ranks, *words = DDP
    short = ["--max-steps", "3", "--save-every-steps", "1", "--output", tmp_path, "--name", "slow"]
    assert forked.run(*TRAINING, *words, *short, ranks=ranks, before=SLOW_STORE) == 0, forked.err[-3000:]
    assert len(list((tmp_path / "slow/checkpoints").glob("*.pt"))) == 2
