"""The training step and the epoch loop; no method is known here by name."""
from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from prolip.data.augment import DeviceTransform
from prolip.methods.base import Batch, Objective, Terms, accumulate_backward
from training.checkpointing import Saver
from training.config import Config
from training.distributed import Agreement, World, gather_objects, wait_for_all
from training.found import EMA, Found, figures
from training.ledger import Ledger
from training.log import RunLog, Stopwatch, peak_memory, progress_line
from training.network import Autocast
from training.norms import gradient_norms, parameter_norms
from training.optim import learning_rate_factor, set_learning_rate
from training.profiling import StepProfiler
from training.sharding import whole_model
from training.snapshot import Position, SaveClock, save
from training.stopping import Stopped, StopSignal
from training.terms import NonFiniteError, StepGate, TermMeter
from training.watchdog import Watchdog

if TYPE_CHECKING:  # evaluations bring scipy and more, which runs without any need not load
    from training.validation import Best, Validation


#: GradScaler halves its scale (2^16 at first) for every step that overflows. Below this it is not the scale's fault.
MIN_LOSS_SCALE = 1e-4


@dataclass(kw_only=True)
class Run:
    """Everything that a training step touches. `network` is the objective, inside DDP when there are several ranks;
    `saver` is rank 0's; `parts` are the trained parameters by tower.
    """

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
    augment: DeviceTransform | None
    total_steps: int
    global_batch: int
    log: RunLog
    meter: TermMeter
    gate: StepGate
    agreement: Agreement
    stop: StopSignal
    clock: SaveClock
    parts: dict[str, list[nn.Parameter]]
    watchdog: Watchdog
    # model FLOPs of a sample over the peak FLOP/s of all devices; None where that is not known
    utilisation: float | None = None
    profiler: StepProfiler | None = None
    saver: Saver | None = None
    ledger: Ledger | None = None
    tokenizer: Any = None
    validation: Validation | None = None
    best: Best | None = None
    # of the last evaluation, by what begins the figures of a model: "" or "ema/"
    found: dict[str, Found] = field(default_factory=dict)
    measured_at: int | None = None
    at: Position = field(default_factory=Position)


def training_step(run: Run, batch: Batch, step: int) -> Terms:
    """Optimiser step `step` (from 0) on the local batch; returns its terms on the device. Nothing here waits for it,
    unless the optimiser is not a fused one: see `move_parameters`.
    """
    optim = run.config.optim
    set_learning_rate(run.optimizer, optim, learning_rate_factor(step, run.total_steps, optim))
    batch = to_device(batch, run.world.device)
    if run.augment is not None:
        batch["image"] = run.augment(batch["image"], step)
    batch = run.objective.prepare(batch, step)
    terms = accumulate_backward(run.network, batch, run.config.run.accum_freq, run.autocast, run.scaler.scale)
    run.scaler.unscale_(run.optimizer)
    terms |= gradient_norms(run.parts, optim.grad_clip_norm)
    move_parameters(run, terms)
    run.optimizer.zero_grad(set_to_none=True)
    run.objective.after_step()
    if run.ema is not None:
        run.ema.update(run.objective.model, step + 1)
    return terms


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Tensors to the device without waiting; lists stay."""
    return {k: v.to(device, non_blocking=True) if isinstance(v, Tensor) else v for k, v in batch.items()}


def move_parameters(run: Run, terms: Terms) -> None:
    """The optimiser's step, held back where a term is not finite. (fp16's GradScaler has a rule of its own for that.)

    Fused optimisers look at the device's flag themselves; for others the host has to look at this one number.
    """
    optimizer: Any = run.optimizer
    if run.scaler.is_enabled():
        run.scaler.step(optimizer)
        run.scaler.update()
        return
    hold = run.gate.hold(terms)
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer.grad_scale, optimizer.found_inf = None, hold
        optimizer.step()
        del optimizer.grad_scale, optimizer.found_inf
    elif not hold.item():
        optimizer.step()


def train(run: Run) -> None:
    """From where the run stands to its last step: steps, log, checkpoints, evaluations. Stopped: it was asked to."""
    watch = Stopwatch(run.at.seconds)
    started_at = run.at.step
    run.network.train()
    if run.at.step and evaluation_due(run):  # the run ended before it, or in it
        evaluate(run, watch)
    while run.at.step < run.total_steps:
        run.loader.set_epoch(run.at.epoch)
        for batch in timed(iter(run.loader), watch):
            run.at.step += 1
            run.at.batch_in_epoch += 1
            run.meter.add(training_step(run, batch, run.at.step - 1), run.at.step, batch["key"])
            run.watchdog.beat(run.at.step)
            if run.profiler is not None:
                run.profiler.step()
            watch.samples += run.global_batch
            if run.ledger is not None:
                run.ledger.write(run.at.step, run.at.epoch, batch["key"])
            if run.at.step % run.config.run.log_every_n_steps == 0 or run.at.step == run.total_steps:
                report(run, watch, started_at)
            if run.at.step < run.total_steps:
                between_steps(run, watch)
                if evaluation_due(run):
                    evaluate(run, watch)
            elif run.at.batch_in_epoch < run.loader.num_batches:
                break  # at the end of an epoch, the loader is asked once more: it judges the faults of the whole epoch
        else:
            run.at.epoch += 1
            run.at.batch_in_epoch = 0
        between_epochs(run, watch)


def between_steps(run: Run, watch: Stopwatch) -> None:
    """Checkpoint where one is due by steps, samples or minutes; stop where any rank was asked to."""
    # what is agreed on was asked for a step ago: by minutes, only for the checkpoint behind the last one
    due = run.clock.saved_step + 1
    stop, by_minutes = run.agreement.exchange(run.stop.number, due if run.clock.by_minutes() else 0)
    if stop:
        end_here(run, watch, stop)
    if (by_minutes == due or run.clock.by_steps(run.at.step)) and not saved_between_epochs(run):
        checked_save(run, watch)


def saved_between_epochs(run: Run) -> bool:
    """Whether the epoch ends at this step, and a checkpoint is taken then: once is enough."""
    every = run.config.run.save_frequency
    return bool(every) and run.at.batch_in_epoch == run.loader.num_batches and (run.at.epoch + 1) % every == 0


def end_here(run: Run, watch: Stopwatch, stop: int) -> None:
    """Raise Stopped behind a checkpoint of the present step; all ranks together. stop: number of the signal."""
    if run.clock.own_step != run.at.step:
        checked_save(run, watch)
    if run.saver is not None:
        with run.watchdog.pause():
            run.saver.settle(final=True)
    raise Stopped(
        f"{signal.Signals(stop).name} at step {run.at.step} of {run.total_steps}, which is saved: "
        f"--name {run.folder.name} --resume latest goes on"
    )


def checked_save(run: Run, watch: Stopwatch) -> None:
    """A checkpoint of finite parameters only; not counted as training time."""
    start = time.perf_counter()
    warn_of_bad_steps(run)
    run.at.seconds = watch.elapsed()
    save(run)
    watch.pause(time.perf_counter() - start)


def warn_of_bad_steps(run: Run) -> None:
    """Look at what was not finite since the last look; NonFiniteError where it is too much."""
    for text in run.meter.check(run.world):
        run.log.say(f"warning: {text}: the parameters were left as they are")
    if run.scaler.is_enabled() and run.scaler.get_scale() < MIN_LOSS_SCALE:
        raise NonFiniteError(
            f"step {run.at.step}: with --precision amp_fp16 no gradient was finite, down to a loss scale of "
            f"{run.scaler.get_scale():.2g}; the parameters were left as they were. Go on from an earlier checkpoint "
            "with --precision amp_bf16 or fp32, or a lower --lr"
        )


def timed(batches: Iterator[Batch], watch: Stopwatch) -> Iterator[Batch]:
    """The same batches; how long each was waited for goes to the watch."""
    while True:
        start = time.perf_counter()
        batch = next(batches, None)
        watch.waited += time.perf_counter() - start
        if batch is None:
            return
        yield batch


def report(run: Run, watch: Stopwatch, started_at: int) -> None:
    """Wait for the device, stop on a non-finite term, then one line for the person and one object for programs."""
    warn_of_bad_steps(run)
    at, total = run.at, run.total_steps
    means = run.meter.read(run.world)
    seconds = watch.elapsed()
    factor = learning_rate_factor(at.step - 1, total, run.config.optim)
    values = means | watch.lap() | {"lr": run.config.optim.lr * factor}
    epoch = at.epoch + at.batch_in_epoch / run.loader.num_batches
    faults = total_faults(gather_objects(dict(run.loader.faults()), run.world))
    left = (seconds - watch.before) / (at.step - started_at) * (total - at.step)
    shown = {name: value for name, value in values.items() if name not in run.objective.details}
    run.log.progress(progress_line(shown, at.step, total, epoch, left, faults, run.objective.statistics))
    extra = {"epoch": epoch, "samples": at.step * run.global_batch, "seconds": seconds}
    if run.utilisation is not None:
        extra["mfu"] = run.utilisation * values["samples_per_second"]
    extra |= {"memory_gib": peak_memory(run.world.device)} | parameter_norms(run.parts)
    if run.scaler.is_enabled():
        extra["loss_scale"] = run.scaler.get_scale()
    if run.meter.bad_steps:
        extra["nonfinite_steps"] = run.meter.bad_steps
    run.log.metrics(at.step, values | extra | ({"faults": faults} if faults else {}))


def total_faults(counts: list[dict[str, int]]) -> dict[str, int]:
    """Faults by kind over all ranks; how much was read well is left out."""
    total: dict[str, int] = {}
    for kinds in counts:
        for kind, count in kinds.items():
            if kind not in ("samples", "shards") and count:
                total[kind] = total.get(kind, 0) + count
    return total


def between_epochs(run: Run, watch: Stopwatch) -> None:
    """Checkpoint and evaluate when it is time to; neither counts as training time."""
    every = run.config.run.save_frequency
    if run.at.step == run.total_steps or (every and run.at.epoch % every == 0):
        checked_save(run, watch)
    if evaluation_due(run):
        evaluate(run, watch)


def evaluation_due(run: Run) -> bool:
    """Whether the model is to be measured where the run stands: at its end, by steps, or between epochs."""
    at, wanted = run.at, run.config.val
    by_steps = bool(wanted.val_every_steps) and at.step % (wanted.val_every_steps or 1) == 0
    by_epochs = bool(wanted.val_frequency) and at.batch_in_epoch == 0 and at.epoch % wanted.val_frequency == 0
    return at.step == run.total_steps or by_steps or by_epochs


def evaluate(run: Run, watch: Stopwatch) -> None:
    """Measure the model by all ranks, its averaged twin too where there is one, unless that was done at this step.

    Stopped, between two test sets, where any rank was asked to: the evaluation is made up for when the run goes on.
    """
    if run.validation is None or run.measured_at == run.at.step:
        return
    start, run.found = time.perf_counter(), {}

    def stop_if_asked() -> None:
        stop = max(gather_objects(run.stop.number, run.world))
        if stop:
            end_here(run, watch, stop)

    models = {"": run.objective.model} | ({EMA: run.ema.module} if run.ema is not None else {})
    with run.watchdog.pause():
        remarks = [measure(run, run.validation, prefix, model, stop_if_asked) for prefix, model in models.items()]
        run.measured_at = run.at.step
        if run.world.is_first:
            tell_figures(run, "".join(remarks))
        run.network.train()
        wait_for_all(run.world)
    watch.pause(time.perf_counter() - start)


def measure(run: Run, validation: Validation, prefix: str, model: Any, between: Callable[[], None]) -> str:
    """One model's figures, and a remark where it is the best so far. A whole copy of one in shards lasts no longer."""
    model = whole_model(model, run.world, everywhere=True)
    with torch.compiler.set_stance("force_eager"):  # every test set has batches of other sizes, each minutes to compile
        run.found[prefix] = validation.measure(model, run.world, between)
    return offer_best(run, prefix, model)


def offer_best(run: Run, prefix: str, model: Any) -> str:
    """Have the model kept in best/ where its figures are the best so far; what there is to say about it, or nothing."""
    if run.best is None or run.best.prefix != prefix or not run.world.is_first:
        return ""
    try:
        return run.best.offer(run.at.step, figures({prefix: run.found[prefix]}), model, run.tokenizer)
    except Exception as error:  # files have exceptions of many kinds
        return f"warning: the best model was NOT kept, the run goes on: {type(error).__name__}: {error}"


def tell_figures(run: Run, remark: str) -> None:
    """The figures to the log, which says with them that the evaluation is done; their headlines to the person."""
    run.log.metrics(run.at.step, figures(run.found), kind="eval")
    for prefix, found in run.found.items():
        if found.headlines:
            run.log.say(f"step {run.at.step}: {prefix}" + f"  {prefix}".join(found.headlines))
    if remark:
        run.log.say(remark)
