"""Parts of `gpu.py`: a run that is killed and resumed, FSDP2 on one rank, waits of the host in a step."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import statistics
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from gpu_kit import ROOT, Kit, WrongResultError
from torch import Tensor

if TYPE_CHECKING:  # the other imports of the program wait until `gpu.py` has found the device
    from training.state import Run

SHARDS = "data/emoji/{noto,noto-v1,twemoji,fluent-emoji-flat,fluent-emoji}.tar"


# --- a run that is killed ---------------------------------------------------------------------------------------------
def logged(folder: Path) -> dict[int, float]:
    """Return step -> loss of the complete lines of metrics.jsonl. WrongResultError if a step occurs twice."""
    found: dict[int, float] = {}
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError):
            values = json.loads(line)
            if "loss" in values:
                if values["step"] in found:
                    raise WrongResultError(f"metrics.jsonl has step {values['step']} twice")
                found[values["step"]] = values["loss"]
    return found


def newest(folder: Path) -> int:
    """Return the step of the newest checkpoint, 0 if there is none."""
    names = [path.stem.removeprefix("step_") for path in (folder / "checkpoints").glob("step_*.pt")]
    return max(map(int, names), default=0)


def killed_in_the_middle(kit: Kit, command: list[str], folder: Path, steps: int, every: int) -> int:
    """Start a run, kill it after half of its steps between two checkpoints, and return the newest checkpoint's step."""
    process = subprocess.Popen(command, cwd=ROOT)
    end = time.monotonic() + kit.seconds / 2
    try:
        while process.poll() is None and time.monotonic() < end:
            time.sleep(0.02)
            last = max(logged(folder), default=0) if (folder / "metrics.jsonl").exists() else 0
            if last >= steps // 2 and newest(folder) and last % every >= every // 2:
                process.kill()
                break
    finally:
        if process.poll() is None:
            process.kill()
        code = process.wait()
    if code != -9:
        raise RuntimeError(f"the run ended with {code} before it could be killed in the middle")
    if not newest(folder):
        raise RuntimeError(f"the run left no checkpoint within {kit.seconds / 2:.0f} s")
    return newest(folder)


def run(kit: Kit) -> None:
    """Run training.main in bf16 on the bundled drawings, kill it in the middle with SIGKILL, and resume it."""
    steps, every = (16, 4) if kit.rehearse else (200, 20)
    sizes = "--batch-size 16 --workers 0" if kit.rehearse else "--batch-size 128 --workers 4"
    model = "ProLIP-ViT-test" if kit.rehearse else "ProLIP-ViT-XS-16"
    flags = (
        f"--train-data {SHARDS} --caption-sampling name:2,keywords --model {model} --device-augment {sizes} "
        f"--device {kit.device.type} --precision amp_bf16 --max-steps {steps} --warmup {steps // 10} --lr 8e-4 "
        f"--grad-clip-norm 1 --init-logit-bias -5 --save-every-steps {every} --keep-checkpoints 2 "
        "--log-every-n-steps 1 --log-every-seconds none --no-report --name killed"
    )
    command = [sys.executable, "-m", "training.main", *flags.split(), "--output", str(kit.folder)]
    folder = kit.folder / "killed"
    kit.begin(f"{steps} steps, killed after step {steps // 2}: {' '.join(command[1:])}")
    begun = killed_in_the_middle(kit, command, folder, steps, every)
    before = logged(folder)
    kit.begin(f"resumed from step {begun}; it was killed after step {max(before)}")
    start = time.monotonic()
    goes_on = False
    resumed = subprocess.Popen([*command, "--resume", "latest"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    for line in resumed.stdout or ():
        print(line, end="", flush=True)
        goes_on |= "resuming from" in line and line.split()[-1] == str(begun)
    code = resumed.wait()
    kit.check("killed after step, resumed from step", f"{max(before)}, {begun}", "the newest checkpoint", goes_on)
    kit.row("start, and the rest of the steps", f"{time.monotonic() - start:.1f} s")
    after = logged(folder)
    state = json.loads((folder / "status.json").read_text(encoding="utf-8"))
    kit.check(
        "exit status and state of the resumed run",
        f"{code}, {state.get('state')}",
        "0, finished",
        code == 0 and state.get("state") == "finished",
    )
    missing = sorted(set(range(1, steps + 1)) ^ after.keys())
    kit.check(
        "steps in the log",
        f"{len(after)}, missing or more: {missing or 'none'}",
        f"1 to {steps}, each once",
        not missing,
    )
    again = [number for number in before if begun < number and number in after]
    apart = [abs(after[number] / before[number] - 1) for number in again]
    middle = statistics.median(apart) if apart else float("inf")
    kit.check(
        "loss of the steps done twice: median difference",
        f"{middle:.2%} over {len(again)} steps",
        "<= 5%",
        middle <= 0.05,
    )
    first, last = (statistics.mean(part) for part in (list(after.values())[:every], list(after.values())[-every:]))
    kit.check(f"mean loss, first and last {every} steps", f"{first:.4g}, {last:.4g}", "it falls", last < first)
    kit.settle()


# --- FSDP2, waits -----------------------------------------------------------------------------------------------------
def built(kit: Kit, name: str, method: str = "prolip", model: str | None = None, **settings: Any) -> Run:
    """Return a run on synthetic samples, as the program builds it, ready for its first step."""
    from training.config import build_config
    from training.parallel import World
    from training.run import build

    config = build_config(
        method,
        {
            "model": {
                "model": model or ("ProLIP-ViT-test" if kit.rehearse else "ProLIP-ViT-XS-16"),
                "init_logit_bias": -2.0,
            },
            "data": {"dataset_type": "synthetic", "train_num_samples": 64, "batch_size": 8, "workers": 0},
            "optim": {"warmup": 0, "lr": 1e-3, "grad_clip_norm": 1.0},
            "run": {
                "max_steps": 6,
                "device": kit.device.type,
                "log_every_seconds": None,
                "save_every_minutes": None,
                "report": False,
                "name": name,
            }
            | settings,
        },
    )
    return build(config, World(device=kit.device), kit.folder / name, rows=8)


def moved(run: Run, steps: int) -> Iterator[dict[str, Tensor]]:
    """Yield the loss terms of the first steps of a run, stepped as in `loop.train`."""
    from training.loop import on_device, training_step

    run.trained.network.train()
    run.data.loader.set_epoch(0)
    for number, batch in zip(range(steps), run.data.loader):
        yield training_step(run.trained, on_device(run.data, batch, number, run.world.device), number)


@contextlib.contextmanager
def one_rank_mesh() -> Iterator[None]:
    """Let `shard_model` shard over a mesh of this one rank, which it normally refuses."""
    from training import parallel as sharding

    honest, mesh = sharding.shard_model, sharding.init_device_mesh

    def sharded(model: Any, world: Any, dtype: Any = None) -> None:
        honest(model, dataclasses.replace(world, world_size=2), dtype)

    with (
        patch("training.run.shard_model", sharded),
        patch.object(sharding, "init_device_mesh", lambda kind, _: mesh(kind, (1,))),
    ):
        yield


def fsdp(kit: Kit) -> None:
    """Compare a run sharded over one rank with the same run without shards, and read its checkpoint without them."""
    from torch.distributed.tensor import DTensor

    from training.checkpoint.resume import save
    from training.parallel import whole_model
    from training.run import close

    backend = "nccl" if kit.device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        store=dist.HashStore(),
        rank=0,
        world_size=1,
        device_id=kit.device if backend == "nccl" else None,
    )
    for precision, bound in {"fp32": 1e-3, "amp_bf16": 3e-2}.items():
        kit.begin(f"three steps in shards and without, {precision}")
        plain = built(kit, f"plain-{precision}", precision=precision)
        with one_rank_mesh():
            sharded = built(kit, f"sharded-{precision}", precision=precision, fsdp=True)
        shards = sum(isinstance(part, DTensor) for part in sharded.trained.objective.parameters())
        kit.check(f"parameters in shards, {precision}", shards, "some", shards > 0)
        apart = []
        for one, other in zip(moved(plain, 3), moved(sharded, 3)):
            for name in ("loss", "grad_norm"):
                apart.append((other[name] / one[name] - 1).abs())
        worst = torch.stack(apart).max().item()  # keeps NaN
        kit.check(
            f"loss and gradient norm: largest difference, {precision}",
            f"{worst:.1e}",
            f"<= {bound:.0e}",
            worst <= bound,
        )
        sharded.at.step = sharded.at.batch_in_epoch = 3
        save(sharded)
        assert sharded.outputs.saver is not None  # this rank writes shards
        sharded.outputs.saver.settle(final=True)
        weights = whole_model(sharded.trained.objective.model, sharded.world).state_dict()
        for part in (plain, sharded):
            close(part)
        again = built(kit, f"sharded-{precision}", precision=precision, resume="latest")
        same = all(
            torch.equal(weights[name], value) for name, value in again.trained.objective.model.state_dict().items()
        )
        kit.check(
            f"checkpoint of shards, read without, {precision}",
            f"step {again.at.step}, weights {'equal' if same else 'differ'}",
            "step 3, weights equal",
            same and again.at.step == 3,
        )
        close(again)
    dist.destroy_process_group()
    kit.settle()


@contextlib.contextmanager
def waits_noted(kit: Kit) -> Iterator[list[str]]:
    """Yield file and line of each place in the block where the host waits for the device; none on a CPU."""
    found: list[str] = []
    if kit.device.type == "cpu":
        yield found
        return
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as met:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found += [
        f"{Path(one.filename).name}:{one.lineno}" for one in met if "synchronizing CUDA operation" in str(one.message)
    ]


def waits(kit: Kit) -> None:
    """Watch for waits of the host in the third step of every method that trains from random weights."""
    from prolip.methods import METHODS
    from training.health.errors import LossMeter
    from training.loop import on_device, training_step
    from training.run import close

    failed: list[str] = []
    if kit.device.type == "cuda":
        with waits_noted(kit) as found:
            torch.ones(1, device=kit.device).item()
        kit.check("the watch sees an .item()", f"{len(found)} waits", ">= 1", len(found) > 0)
    names = [name for name, method in METHODS.items() if not method.adapts]
    for method in ("prolip", "siglip") if kit.rehearse else names:
        for precision in ("amp_bf16",) if kit.rehearse or method != "prolip" else ("amp_bf16", "fp32", "amp_fp16"):
            kit.begin(f"{method}, {precision}")
            try:
                made, meter = built(kit, f"{method}-{precision}", method, precision=precision), LossMeter()
                list(moved(made, 2))  # the first steps check inputs and create constants
                batch = next(iter(made.data.loader))
                with waits_noted(kit) as found:
                    terms = training_step(made.trained, on_device(made.data, batch, 2, kit.device), 2)
                    meter.add(terms, 3, batch["key"])
                close(made)
            except Exception as error:  # one method failed: the others still count
                traceback.print_exc()
                failed.append(f"{method}, {precision}: {type(error).__name__}: {error}".splitlines()[0])
                kit.row(f"{method}, {precision}", f"FAILED: {failed[-1]}")
                continue
            if kit.device.type == "cpu":
                kit.row(f"{method}, {precision}", "the step ran; a CPU has no waits to see")
            else:
                kit.check(f"waits in a step, {method}, {precision}", ", ".join(found) or 0, "0", not found)
    kit.wrong += failed
    kit.settle()
