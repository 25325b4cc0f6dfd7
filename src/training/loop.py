"""The training step and the epoch loop; no method is known here by name."""
from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from prolip.data.augment import DeviceAugment
from prolip.methods.base import Batch, Objective, Terms, accumulate_backward
from training.checkpointing import save_checkpoint
from training.config import Config
from training.distributed import World, gather_objects, read_random_state, wait_for_all, write_random_state
from training.log import RunLog, Stopwatch, TermMeter, progress_line
from training.optim import learning_rate_factor, set_learning_rate

Autocast = Callable[[], AbstractContextManager]


@dataclass(kw_only=True)
class Position:
    """Where a run stands: optimiser steps taken, whole epochs done, batches taken of the present epoch."""

    step: int = 0
    epoch: int = 0
    batch_in_epoch: int = 0


@dataclass(kw_only=True)
class Run:
    """Everything that a training step touches. `network` is the objective, inside DDP when there are several ranks."""

    config: Config
    world: World
    folder: Path
    objective: Objective
    network: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    autocast: Autocast
    ema: ModelEmaV3 | None
    loader: Any
    augment: DeviceAugment | None
    total_steps: int
    global_batch: int
    log: RunLog
    tokenizer: Any = None
    evaluate: Callable[[nn.Module], Any] | None = None
    results: dict[str, Any] = field(default_factory=dict)
    at: Position = field(default_factory=Position)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What the optimiser moves."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]


def training_step(run: Run, batch: Batch) -> Terms:
    """One optimiser step on the local batch; returns the step's terms on the device. Nothing here waits for it.

    (With fp16 and an optimiser that is not fused, GradScaler looks at one number: whether to skip the step.)
    """
    optim, step = run.config.optim, run.at.step
    set_learning_rate(run.optimizer, optim, learning_rate_factor(step, run.total_steps, optim))
    batch = to_device(batch, run.world.device)
    if run.augment is not None:
        batch["image"] = run.augment(batch["image"], step)
    batch = run.objective.prepare(batch, step)
    terms = accumulate_backward(run.network, batch, run.config.run.accum_freq, run.autocast, run.scaler.scale)
    run.scaler.unscale_(run.optimizer)
    terms["grad_norm"] = clip_gradients(run.parameters, optim.grad_clip_norm)
    run.scaler.step(run.optimizer)
    run.scaler.update()
    run.optimizer.zero_grad(set_to_none=True)
    run.objective.after_step()
    if run.ema is not None:
        run.ema.update(run.objective.model, step + 1)
    return terms


def clip_gradients(parameters: list[nn.Parameter], bound: float | None) -> Tensor:
    """Scale all gradients so that their common L2 norm is at most `bound`; returns the norm before, ()."""
    if bound is not None:
        return nn.utils.clip_grad_norm_(parameters, bound)
    return nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Tensors to the device without waiting; lists stay."""
    return {k: v.to(device, non_blocking=True) if isinstance(v, Tensor) else v for k, v in batch.items()}


def train(run: Run) -> None:
    """From where the run stands to its last step: steps, log, checkpoints, evaluations."""
    watch = Stopwatch()
    started_at = run.at.step
    # GradScaler meets infinite gradients by design and skips the step; everything else must be finite.
    meter = TermMeter(ignored=("grad_norm",) if run.scaler.is_enabled() else ())
    run.network.train()
    while run.at.step < run.total_steps:
        for batch in timed(epoch_batches(run), watch):
            meter.add(training_step(run, batch), run.at.step + 1)
            run.at.step += 1
            run.at.batch_in_epoch += 1
            watch.samples += run.global_batch
            if run.at.step % run.config.run.log_every_n_steps == 0 or run.at.step == run.total_steps:
                report(run, meter, watch, started_at)
            if run.at.step == run.total_steps and run.at.batch_in_epoch < run.loader.num_batches:
                break  # at the end of an epoch, the loader is asked once more: it judges the faults of the whole epoch
        else:
            run.at.epoch += 1
            run.at.batch_in_epoch = 0
        between_epochs(run, meter, watch)


def epoch_batches(run: Run) -> Iterator[Batch]:
    """The rest of the present epoch; batches that were trained on before a resumption are passed over."""
    run.loader.set_epoch(run.at.epoch)
    return islice(iter(run.loader), run.at.batch_in_epoch, None)


def timed(batches: Iterator[Batch], watch: Stopwatch) -> Iterator[Batch]:
    """The same batches; how long each was waited for goes to the watch."""
    while True:
        start = time.perf_counter()
        batch = next(batches, None)
        watch.waited += time.perf_counter() - start
        if batch is None:
            return
        yield batch


def report(run: Run, meter: TermMeter, watch: Stopwatch, started_at: int) -> None:
    """Wait for the device, stop on a non-finite term, then one line for the person and one object for programs."""
    meter.check(run.world)
    at, total = run.at, run.total_steps
    means = meter.read(run.world)
    seconds = watch.elapsed()
    factor = learning_rate_factor(at.step - 1, total, run.config.optim)
    values = means | watch.lap() | {"lr": run.config.optim.lr * factor}
    epoch = at.epoch + at.batch_in_epoch / run.loader.num_batches
    faults = total_faults(gather_objects(dict(run.loader.faults()), run.world))
    left = seconds / (at.step - started_at) * (total - at.step)
    run.log.progress(progress_line(values, at.step, total, epoch, left, faults))
    extra = {"epoch": epoch, "samples": at.step * run.global_batch, "seconds": seconds}
    run.log.metrics(at.step, values | extra | ({"faults": faults} if faults else {}))


def total_faults(counts: list[dict[str, int]]) -> dict[str, int]:
    """Faults by kind over all ranks; how much was read well is left out."""
    total: dict[str, int] = {}
    for kinds in counts:
        for kind, count in kinds.items():
            if kind not in ("samples", "shards") and count:
                total[kind] = total.get(kind, 0) + count
    return total


def between_epochs(run: Run, meter: TermMeter, watch: Stopwatch) -> None:
    """Checkpoint and evaluate when it is time to; neither counts as training time."""
    start, settings = time.perf_counter(), run.config.run
    ended = run.at.step == run.total_steps
    if ended or (settings.save_frequency and run.at.epoch % settings.save_frequency == 0):
        meter.check(run.world)
        save(run)
    if run.evaluate and (ended or (settings.val_frequency and run.at.epoch % settings.val_frequency == 0)):
        evaluate(run)
    watch.pause(time.perf_counter() - start)


def save(run: Run) -> None:
    """A checkpoint of everything that the run needs to go on; rank 0 writes, all ranks give their random state."""
    states = gather_objects(read_random_state(run.world.device), run.world)
    if run.world.is_first:
        state = {
            "step": run.at.step,
            "epoch": run.at.epoch,
            "batch_in_epoch": run.at.batch_in_epoch,
            "global_batch": run.global_batch,
            "total_steps": run.total_steps,
            "objective": run.objective.state_dict(),
            "optimizer": run.optimizer.state_dict(),
            "scaler": run.scaler.state_dict(),
            "ema": None if run.ema is None else run.ema.module.state_dict(),
            "random": states,
            "config": run.config.to_dict(),
        }
        path = save_checkpoint(run.folder, state, run.config.run.keep_checkpoints)
        run.log.say(f"saved {path}")
    wait_for_all(run.world)


def restore(run: Run, state: dict[str, Any]) -> None:
    """Put the run where a checkpoint stands; raises ValueError when the two cannot be the same run."""
    if state["global_batch"] != run.global_batch:
        raise ValueError(
            f"the checkpoint was trained at a global batch of {state['global_batch']}, this run has "
            f"{run.global_batch}: give --global-batch-size {state['global_batch']}"
        )
    if run.ema is not None and state["ema"] is None:
        raise ValueError("the checkpoint holds no averaged weights: leave out --ema-decay, or start without --resume")
    run.objective.load_state_dict(state["objective"])
    run.optimizer.load_state_dict(state["optimizer"])
    run.scaler.load_state_dict(state["scaler"])
    if run.ema is not None:
        run.ema.module.load_state_dict(state["ema"])
    run.at = Position(step=state["step"], epoch=state["epoch"], batch_in_epoch=state["batch_in_epoch"])
    if len(state["random"]) == run.world.world_size:
        write_random_state(state["random"][run.world.rank], run.world.device)
    else:
        run.log.say(f"note: saved by {len(state['random'])} ranks, so dropout draws other random numbers from here on")


def evaluate(run: Run) -> None:
    """Figures on rank 0, of the averaged weights too where there are any; the other ranks wait."""
    if run.world.is_first and run.evaluate is not None:
        run.results = {"eval": run.evaluate(run.objective.model)}
        if run.ema is not None:
            run.results["eval_ema"] = run.evaluate(run.ema.module)
        run.log.metrics(run.at.step, figures(run.results), kind="eval")
        run.network.train()
    wait_for_all(run.world)


def figures(results: dict[str, Any]) -> dict[str, float]:
    """Name -> figure of the model, and ema/name -> figure of the averaged weights."""
    prefixes = {"eval": "", "eval_ema": "ema/"}
    return {prefixes[kind] + name: value for kind, result in results.items() for name, value in result.metrics.items()}
