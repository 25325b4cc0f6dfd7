"""The training step and the epoch loop, independent of the method."""

from __future__ import annotations

import resource
import signal
import time
from collections import Counter
from functools import partial
from typing import Any

import torch
from torch import Tensor

from prolip.embeddings import LEAST
from prolip.methods.accumulate import accumulate_backward
from prolip.methods.base import RECALL, Batch, Terms
from prolip.utils.fields import AUTO
from training.checkpoint.resume import save
from training.checkpoint.run_dir import write_json
from training.health.errors import NonFiniteError
from training.health.log import Stopwatch, progress_line
from training.health.signals import Stopped
from training.hooks import balanced_bias, fit_at_end, look_at_data, samples_to_fit, set_bias
from training.optim import gradient_norms, learning_rate_factor, parameter_norms, set_learning_rate
from training.parallel import collect_objects, largest, seed_step, wait_for_all, whole_model
from training.state import AVERAGES, DataState, Run, TrainState

#: GradScaler halves its scale (2^16 at first) at every step that overflows. Below this the scale is not the cause.
MIN_LOSS_SCALE = 1e-4
MOST_STEPS_A_LINE = 100  # of the log by default


def training_step(trained: TrainState, batch: Batch, step: int) -> Terms:
    """Optimiser step `step` (from 0) on the local batch; returns its terms on the device.

    The update is skipped if a gradient is not finite (fp16: by GradScaler's rule). With a fused optimiser, the host
    does not wait.
    """
    frozen = [tower for tower, stage in trained.stages.items() if step < stage.frozen]
    backbones = {tower: stage.factor(step) for tower, stage in trained.stages.items()}
    factor = learning_rate_factor(step, trained.total_steps, trained.config)
    set_learning_rate(trained.optimizer, trained.config, factor, backbones)

    batch = trained.objective.prepare(batch, step)
    terms = accumulate_backward(trained.network, batch, trained.accum_freq, trained.autocast, trained.scaler.scale)
    for group in trained.optimizer.param_groups:
        for parameter in group["params"] if group["backbone"] in frozen else ():
            parameter.grad = None  # excluded from clipping, decay and moments
    trained.scaler.unscale_(trained.optimizer)
    terms |= gradient_norms(trained.parts, trained.config.grad_clip_norm)
    optimizer: Any = trained.optimizer
    if trained.scaler.is_enabled():
        trained.scaler.step(optimizer)
        trained.scaler.update()
    else:
        hold = trained.gate.hold(terms["grad_norm"])
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            optimizer.grad_scale, optimizer.found_inf = None, hold
            optimizer.step()
            del optimizer.grad_scale, optimizer.found_inf
        elif not hold.item():
            optimizer.step()
    trained.optimizer.zero_grad(set_to_none=True)
    trained.objective.after_step()
    for average in trained.averages.values():
        average.update(trained.objective.model, step + 1)
    return terms


def on_device(data: DataState, batch: Batch, step: int, device: torch.device) -> Batch:
    """Copy the batch of step `step` to the device and augment it there; lists stay, and the host does not wait."""
    batch = {k: v.to(device, non_blocking=True) if isinstance(v, Tensor) else v for k, v in batch.items()}
    for name, augment in (("image", data.augment), ("text", data.token_augment)):
        if augment is not None:
            batch[name] = augment(batch[name], step)
    return batch


def train(run: Run) -> None:
    """Train, log, save and evaluate from the run's position to its last step; raises Stopped on request."""
    at, loader, watch = run.at, run.data.loader, Stopwatch(run.at.seconds)
    started_at, save_every = at.step, run.config.run.save_frequency
    log_every = run.config.run.log_every_n_steps or min(MOST_STEPS_A_LINE, max(1, run.total_steps // 10))
    run.health.chance.seen = at.step
    run.trained.network.train()
    if at.step < run.total_steps:
        most, held = samples_to_fit(run), loader.dataset_samples
        if most and (least := min(most, held)) < LEAST:
            few = f"{least} samples are too few for the fit at the end, which needs {LEAST} pairs"
            run.outputs.log.say(f"warning: {few}; the model will have no variances")
    elif not at.closed:  # stopped during the fit at the end
        fit_at_end(run, partial(end_here, run, watch))
        checked_save(run, watch)
    if at.step:  # an evaluation may have been interrupted
        evaluate_when_due(run, watch)
    while at.step < run.total_steps:
        look_at_data(run)
        loader.set_epoch(at.epoch)
        batches = iter(loader)
        while (batch := watch.waiting(partial(next, batches, None))) is not None:
            at.step += 1
            at.batch_in_epoch += 1
            take_step(run, batch, watch)
            if at.step % log_every == 0 or at.step == run.total_steps:
                report(run, watch, started_at)
            if at.step < run.total_steps:
                between_steps(run, watch, started_at)
                evaluate_when_due(run, watch)
            elif at.batch_in_epoch < loader.num_batches:
                break  # otherwise one more call: the loader checks the faults of the whole epoch
        else:
            at.epoch += 1
            at.batch_in_epoch = 0
        if at.step == run.total_steps:
            fit_at_end(run, partial(end_here, run, watch))  # before the last checkpoint, which then holds the fit
        if at.step == run.total_steps or (save_every and at.epoch % save_every == 0):
            checked_save(run, watch)
        evaluate_when_due(run, watch)


def take_step(run: Run, batch: Batch, watch: Stopwatch) -> None:
    """Take the current step and record it."""
    at, health, outputs = run.at, run.health, run.outputs
    batch = on_device(run.data, batch, at.step - 1, run.world.device)
    if run.config.model.init_logit_bias == AUTO:
        before, value = run.trained.objective.model.logit_bias.item(), balanced_bias(run, batch)
        set_bias(run, value)
        outputs.log.say(f"bias {value:.4g} balances the loss of the first batch; it was {before:.4g} before")
        if run.world.is_first:
            write_json(outputs.folder / "config.json", run.config.to_dict())
    if run.trained.seeded:
        seed_step(run.config.run.seed, at.step - 1, run.world)
    health.meter.add(training_step(run.trained, batch, at.step - 1), at.step, batch["key"])
    health.watchdog.beat(at.step)
    if health.profiler is not None:
        health.profiler.step()
    if outputs.ledger is not None:
        outputs.ledger.write(at.step, at.epoch, batch["key"])
    watch.samples += run.data.global_batch


def report(run: Run, watch: Stopwatch, started_at: int) -> None:
    """Wait for the device, raise for a non-finite term, then write a log line and an object of metrics."""
    warn_of_bad_steps(run)
    at, total, trained, health = run.at, run.total_steps, run.trained, run.health
    means = health.meter.read(run.world)
    seconds = watch.elapsed()
    factor = learning_rate_factor(at.step - 1, total, trained.config)
    values = means | watch.lap() | {"lr": trained.config.lr * factor}
    epoch = at.epoch + at.batch_in_epoch / run.data.loader.num_batches
    counts = sum(map(Counter, collect_objects(dict(run.data.loader.faults()), run.world)), Counter[str]())
    faults = {kind: count for kind, count in counts.items() if kind not in ("samples", "shards")}
    left = (seconds - watch.before) / (at.step - started_at) * (total - at.step)
    shown = {name: value for name, value in values.items() if name not in trained.objective.details}
    statistics, chance = trained.objective.statistics, health.chance
    place = at.step, total, epoch
    run.outputs.log.say(progress_line(shown, place, left, faults, statistics, chance.candidates))
    if RECALL in values and (warning := chance.judge(at.step, values[RECALL])):
        run.outputs.log.say(warning)
    extra = {"epoch": epoch, "samples": at.step * run.data.global_batch, "seconds": seconds}
    if health.utilisation is not None:
        extra["mfu"] = health.utilisation * values["samples_per_second"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # KiB on Linux
    if run.world.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(run.world.device) / 2**30
    extra |= {"memory_gib": peak} | parameter_norms(trained.parts)
    if trained.scaler.is_enabled():
        extra["loss_scale"] = trained.scaler.get_scale()
    if health.meter.bad_steps:
        extra["nonfinite_steps"] = health.meter.bad_steps
    run.outputs.log.metrics(at.step, values | extra | ({"faults": faults} if faults else {}))
    run.outputs.lines.restart(at.step)


def warn_of_bad_steps(run: Run) -> None:
    """Report non-finite steps since the last call; NonFiniteError if there are too many."""
    for text in run.health.meter.check(run.world):
        left = "the parameters did not change" if "grad_norm" in text else "its gradients were finite"
        run.outputs.log.say(f"warning: {text}: {left}")
    scaler = run.trained.scaler
    if scaler.is_enabled() and scaler.get_scale() < MIN_LOSS_SCALE:
        raise NonFiniteError(
            f"step {run.at.step}: with --precision amp_fp16 no gradient was finite, even at loss scale "
            f"{scaler.get_scale():.2g}; the parameters did not change. Resume from an earlier checkpoint with "
            "--precision amp_bf16 or fp32, or a lower --lr"
        )


def between_steps(run: Run, watch: Stopwatch, started_at: int) -> None:
    """Log and save when due by time, steps or samples; stop if any rank received a signal."""
    saves, lines, health = run.outputs.saves, run.outputs.lines, run.health
    stop, save_asked, line_asked = health.consensus.exchange(health.stop.number, saves.asks(), lines.asks())
    if lines.due(run.at.step, line_asked):
        report(run, watch, started_at)
    if stop:
        end_here(run, watch, stop)
    every, ends = run.config.run.save_frequency, run.at.batch_in_epoch == run.data.loader.num_batches
    saved_anyway = bool(every) and ends and (run.at.epoch + 1) % every == 0
    if saves.due(run.at.step, save_asked) and not saved_anyway:
        checked_save(run, watch)


def end_here(run: Run, watch: Stopwatch, stop: int) -> None:
    """Save the current step and raise Stopped; on all ranks together. stop: number of the signal."""
    if run.outputs.saved_step != run.at.step:
        checked_save(run, watch)
    if run.outputs.saver is not None:
        with run.health.watchdog.pause():
            run.outputs.saver.settle(final=True)
    wait_for_all(run.world)  # torchrun kills the others when one ends
    where = f"{signal.Signals(stop).name} at step {run.at.step} of {run.total_steps}"
    raise Stopped(f"{where}, saved", run.outputs.folder)


def checked_save(run: Run, watch: Stopwatch) -> None:
    """Save a checkpoint if the parameters are finite; excludes the time from training time."""
    start = time.perf_counter()
    warn_of_bad_steps(run)
    run.at.seconds = watch.elapsed()
    save(run)
    watch.pause(time.perf_counter() - start)


def evaluate_when_due(run: Run, watch: Stopwatch) -> None:
    """Evaluate the model and its averaged models if due and not yet done at this step. Stopped may be raised between
    two test sets; the resumed run evaluates again.
    """
    evals, world, log, step, val = run.evals, run.world, run.outputs.log, run.at.step, run.config.val
    by_steps = val.val_every_steps and step % val.val_every_steps == 0
    by_epochs = val.val_frequency and run.at.batch_in_epoch == 0 and run.at.epoch % val.val_frequency == 0
    due = step == run.total_steps or by_steps or by_epochs
    if evals.validation is None or evals.step == step or not due:
        return
    start, evals.results = time.perf_counter(), {}
    models: dict[str, Any] = {"": run.trained.objective.model}
    models |= {f"{name}/": model for name, model in run.trained.averaged(step).items()}
    with run.health.watchdog.pause():
        remarks = [evaluate(run, watch, prefix, model) for prefix, model in models.items()]
        evals.step = step
        if world.is_first:
            log.metrics(step, evals.metrics, kind="eval")  # marks the evaluation as done
            for prefix, result in evals.results.items():
                for line in result.headlines:
                    log.say(f"step {step}: {prefix}{line}")
            for remark in filter(None, remarks):
                log.say(remark)
        run.trained.network.train()
        wait_for_all(world)
    watch.pause(time.perf_counter() - start)


def evaluate(run: Run, watch: Stopwatch, prefix: str, model: Any) -> str:
    """Evaluate one model and save it if it is the best so far; returns a remark."""
    evals, world, step = run.evals, run.world, run.at.step
    assert evals.validation is not None

    def stop_if_asked() -> None:
        (stop,) = largest(world, run.health.stop.number)
        if stop:
            end_here(run, watch, stop)

    model = whole_model(model, world, everywhere=True)
    with torch.compiler.set_stance("force_eager"):  # compiling for each other batch size takes minutes
        last = step == run.total_steps and not prefix
        found = evals.results[prefix] = evals.validation.measure(model, world, stop_if_asked, last)
    metric, outputs = run.config.val.best_metric or "", run.outputs
    twin, slash, _ = metric.partition("/")
    if not metric or prefix != (twin + slash if twin in AVERAGES else "") or not world.is_first:
        return ""
    from training.evaluate import keep_best  # slow: loads scipy and more

    try:
        own = {prefix + name: value for name, value in found.metrics.items()}
        return keep_best(outputs.folder / "best", run.config.val, step, own, model, outputs.tokenizer)
    except Exception as error:  # files have exceptions of many kinds
        return f"warning: the best model was NOT saved; the run continues: {type(error).__name__}: {error}"
