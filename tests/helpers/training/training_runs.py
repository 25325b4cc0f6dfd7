"""Small runs for the tests of training: by the command line, or taken apart step by step."""

from __future__ import annotations

import json
import os
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import training.loop
from drawings import SHARDS
from prolip.embeddings import UnpairedEmbeddings
from prolip.gaussian import Gaussian
from training.checkpoint.files import Storage, list_steps, load_checkpoint
from training.config import build_config
from training.health.signals import STOP
from training.loop import on_device, training_step
from training.main import main
from training.parallel import World
from training.run import build
from training.state import Run

ROOT = Path(__file__).parents[3]
DATA = ["--train-data", SHARDS, "--caption-sampling", "name:2,keywords"]
TINY = [
    *DATA,
    *shlex.split(
        "--model ProLIP-ViT-test --precision fp32 --device cpu --batch-size 32 --workers 0 "
        "--warmup 2 --init-logit-bias -3 --log-every-n-steps 1 --save-frequency 1 "
        "--keep-checkpoints 0 --no-report"
    ),
]
SYNTHETIC = shlex.split(
    "--dataset-type synthetic --train-num-samples 64 --model ProLIP-ViT-test --precision fp32 "
    "--device cpu --batch-size 8 --workers 0 --warmup 1 --log-every-n-steps 1 "
    "--save-frequency 0 --keep-checkpoints 0 --no-report"
)


def start(folder: Path, name: str, *words: str) -> Path:
    assert main([*TINY, "--output", str(folder), "--name", name, *words]) == 0
    return folder / name


def words(folder: Path, name: str, *more: object) -> list[str]:
    return [*SYNTHETIC, "--output", str(folder), "--name", name, *map(str, more)]


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def steps_done(run: Path) -> int:
    log = run / "metrics.jsonl"
    return log.read_text().count("\n") if log.exists() else 0


def status(run: Path) -> dict:
    return json.loads((run / "status.json").read_text()) if (run / "status.json").exists() else {}


def stop_after(steps: int, words: list[str]) -> int:
    """Exit code of a run that receives SIGTERM during that step, counted from its own start; 0: before the first."""
    honest, seen = training.loop.training_step, []

    def step_and_stop(trained, batch, step):
        seen.append(step)
        if len(seen) == steps:
            os.kill(os.getpid(), signal.SIGTERM)
        return honest(trained, batch, step)

    STOP.install()
    try:
        training.loop.training_step = step_and_stop
        if steps == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return main(words)
    finally:
        training.loop.training_step, STOP.number = honest, 0
        STOP.release()


def make(tmp_path: Path, objective: dict | None = None, optim: dict | None = None, world: World | None = None, **run):
    """A run of the tiny model on synthetic images, ready for its first step."""
    world = world or World()
    config = build_config(
        "prolip",
        {
            "model": {"model": "ProLIP-ViT-test", "init_logit_bias": -2.0},
            "data": {"dataset_type": "synthetic", "train_num_samples": 24, "batch_size": 8, "workers": 0},
            "optim": {"warmup": 0, "lr": 1e-3} | (optim or {}),
            "run": {"precision": "fp32", "log_every_n_steps": 1, "max_steps": 3, "device": str(world.device)}
            | {"log_every_seconds": None, "save_every_minutes": None}
            | run,
            "objective": objective or {},
        },
    )
    return build(config, world, tmp_path / "run", rows=8)


def pool(dim: int) -> UnpairedEmbeddings:
    """Return the pool that source-free adaptation reads before training."""
    image, text = (Gaussian(torch.randn(9, dim), torch.zeros(9, dim)) for _ in range(2))
    keys, ids = [f"k{n}" for n in range(9)], torch.ones(9, 6, dtype=torch.int64)
    return UnpairedEmbeddings(keys=keys, image=image, text=text, text_ids=ids, image_novelty={}, text_novelty={})


def batches(run: Run) -> Iterator[Any]:
    run.data.loader.set_epoch(0)
    return iter(run.data.loader)


def one_step(run: Run, batch: Any, step: int) -> dict[str, torch.Tensor]:
    return training_step(run.trained, on_device(run.data, batch, step, run.world.device), step)


def parameters(run: Run) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in run.trained.objective.named_parameters()}


def newest(folder: Path) -> str:
    storage = Storage(str(folder / "checkpoints"))
    return storage.path(f"step_{list_steps(storage)[0]}.pt")


def assert_same_state(left: Path, right: Path) -> None:
    """Every tensor of two checkpoints, bit for bit."""
    a, b = load_checkpoint(left), load_checkpoint(right)
    assert a["swa_steps"] == b["swa_steps"]
    for part in ("objective", "ema", "swa"):
        assert (a[part] is None) == (b[part] is None)
        for name in a[part] or {}:
            assert torch.equal(a[part][name], b[part][name]), (part, name)
    for number, state in a["optimizer"]["state"].items():
        for name, value in state.items():
            other = torch.as_tensor(b["optimizer"]["state"][number][name])  # timm's optimisers count steps in an int
            assert torch.equal(torch.as_tensor(value), other), (number, name)
    assert [group["lr"] for group in a["optimizer"]["param_groups"]] == [
        group["lr"] for group in b["optimizer"]["param_groups"]
    ]
    assert (a["step"], a["epoch"], a["batch_in_epoch"]) == (b["step"], b["epoch"], b["batch_in_epoch"])


def assert_moved_alike(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], start: dict, part: float) -> None:
    """Every tensor ends within `part` of the distance that training moved it, in its norm.

    No bound on single numbers: where a gradient is next to nothing, the order of its sum decides its sign, AdamW makes
    a step of size lr of that, and which order is taken depends on the CPU's kernels and their number of rows.
    """
    assert got.keys() == want.keys()
    for key, value in want.items():
        moved, apart = (value - start[key]).norm(), (got[key] - value).norm()
        assert moved > 0 and apart <= part * moved, f"{key}: {apart:.2e} apart, having moved {moved:.2e}"
