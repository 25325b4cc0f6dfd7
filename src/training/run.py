"""What a run is made of: from a config to the parts that the loop drives, and what is left behind at the end."""
from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from timm.utils import ModelEmaV3
from torch import nn

from prolip.checkpoint import save_pretrained
from prolip.console import EXIT_INTERRUPTED
from prolip.data.loader import Loader, build_loader
from prolip.methods import METHODS
from prolip.methods.base import Objective
from prolip.model import ProLIP
from prolip.ring import check_equal_batches
from training.checkpointing import load_checkpoint
from training.config import Config, check_precision, rows_per_rank, total_steps
from training.distributed import Agreement, World, gather_objects, seed_everything, share_object, wait_for_all, world
from training.errors import explain
from training.found import EMA, figures
from training.host_memory import keep_freed_memory
from training.log import RunLog, count_parameters, describe, duration
from training.loop import Run, train
from training.network import (
    attention_for,
    autocast_for,
    build_augment,
    build_model,
    build_tokenizer,
    compile_towers,
    distribute,
    shard,
)
from training.norms import parts_of
from training.optim import build_optimizer
from training.plan.hardware import peak_of
from training.plan.models import flops_per_sample
from training.resuming import go_on, open_records, take_folder
from training.runfolder import write_json, write_status
from training.sharding import whole_model
from training.snapshot import SaveClock
from training.stopping import EXIT_STOPPED, STOP, WAY_ON, Stopped
from training.storage import Storage
from training.terms import StepGate, TermMeter
from training.watchdog import Watchdog

if TYPE_CHECKING:
    from training.validation import Best, Validation


def run(config: Config) -> Path:
    """A whole run, from nothing to the folder that holds its model; returns the folder."""
    with world(config.run.device) as here, contextlib.ExitStack() as held:
        check_precision(config.run.precision, here.device)
        if here.device.type == "cpu":
            keep_freed_memory()
        rows = rows_per_rank(config, here.world_size)
        check_equal_batches(rows)
        folder = Path(config.run.output_dir) / share_object(config.run.name or default_name(config), here)
        state = build(config, here, folder, rows, held)
        try:
            with telling_status(state):
                start = time.perf_counter()
                with attention_for(config.run.precision, here.device):
                    train(state)
                finish(state, time.perf_counter() - start)
        finally:
            close(state)
    return folder


@contextlib.contextmanager
def telling_status(run: Run) -> Iterator[None]:
    """status.json while and after the context: what the scripts around a run decide by."""

    def tell(state: str, **facts: Any) -> None:
        if run.world.is_first:
            last = run.saver.last if run.saver else None
            write_status(run.folder, state, step=run.at.step, total_steps=run.total_steps, checkpoint=last, **facts)

    tell("running")  # from now on with every checkpoint
    run.stop.ended = False
    run.stop.last_words = lambda: tell("failed", exit_code=EXIT_INTERRUPTED, reason="interrupted, left at once")
    try:
        yield
        tell("finished", exit_code=0)
    except Stopped as stop:
        with contextlib.suppress(OSError):  # a full disk must not hide the way on
            tell("stopped", exit_code=EXIT_STOPPED, reason=str(stop))
        raise
    except BaseException as error:
        if run.saver is not None:
            run.saver.settle()
            run.saver.close()  # an error can come between a write and its being noted, and every write says `running`
        with contextlib.suppress(OSError):  # nor the error that it led to
            tell("failed", reason=explain(error) or f"{type(error).__name__}: {error}")
        raise
    finally:
        run.stop.ended, run.stop.last_words = True, lambda: None


def close(run: Run) -> None:
    """End what is open: log, workers of the loader, ledger, writer of checkpoints, watchdog, profile; all of it, even
    where one of them fails.
    """
    with contextlib.ExitStack() as ends:
        for part in (run.log, run.loader, run.ledger, run.saver, run.watchdog, run.profiler):
            if part is not None:
                ends.callback(part.close)  # the last one first


def default_name(config: Config) -> str:
    """Model, method and time of the start."""
    model = Path(config.model.model.split(":")[-1]).name
    return f"{model}-{config.method}-{time.strftime('%Y%m%d-%H%M%S')}"


def build(
    config: Config, here: World, folder: Path, rows: int, held: contextlib.ExitStack | None = None
) -> Run:
    """Every part of the run, checked before anything in the folder changes; resumed where the config says so.

    The folder is locked until `held` is closed.
    """
    settings = config.run
    seed_everything(settings.seed, settings.deterministic)
    if here.device.type == "cuda" and not settings.deterministic:
        torch.set_float32_matmul_precision("high")
    tokenizer = build_tokenizer(config)  # before the model: what is missing shows at once
    with heard("prolip.checkpoint") as weights:
        model, transform, preprocess = build_model(config, here.device)
    loader = open_loader(config, here, rows, model, transform, tokenizer)
    steps = total_steps(config, loader.num_batches, rows * here.world_size)
    objective, ema, optimizer = build_trained(config, here, model)
    validation = build_validation(config, here, tokenizer, preprocess)
    storage = Storage(settings.checkpoint_dir or str(folder / "checkpoints"))
    address, passed_over = take_folder(config, here, folder, storage, held or contextlib.ExitStack())
    checkpoint = load_checkpoint(address) if address else None
    run = Run(
        config=config,
        world=here,
        folder=folder,
        objective=objective,
        network=distribute(objective, here, settings),
        optimizer=optimizer,
        scaler=torch.amp.GradScaler(here.device.type, enabled=settings.precision == "amp_fp16"),
        autocast=autocast_for(settings.precision, here.device),
        ema=ema,
        loader=loader,
        augment=build_augment(config, model, here),
        total_steps=steps,
        global_batch=rows * here.world_size,
        log=RunLog(folder, here.is_first),
        # GradScaler meets infinite gradients by design and skips the step; everything else must be finite.
        meter=TermMeter(("grad_norm",) if settings.precision == "amp_fp16" else (), settings.max_nonfinite),
        gate=StepGate(settings.max_nonfinite, here),
        agreement=Agreement(here),
        stop=STOP,
        clock=save_clock(config, rows * here.world_size),
        parts=parts_of(objective),
        utilisation=utilisation_per_rate(config, model, here, rows // settings.accum_freq),
        watchdog=Watchdog(settings.stall_seconds, here.rank),
        validation=validation,
        best=open_best(config, folder),
        tokenizer=tokenizer,
    )
    run.log.say("\n".join([summary(run), *(f"  weights    {line}" for line in weights)]))
    for reason in passed_over:
        run.log.say(f"passed over {reason}")
    if address and checkpoint:
        go_on(run, address, checkpoint)
    elif settings.resume:
        run.log.say(f"{storage.url} holds no checkpoint: starting at step 0")
    open_records(run, storage)
    return run


@contextlib.contextmanager
def heard(name: str) -> Iterator[list[str]]:
    """What a part of the library logs while the context lasts, for the run's own log."""
    lines: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    part, listener = logging.getLogger(name), Listener(logging.INFO)
    level = part.level
    part.addHandler(listener)
    part.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        part.setLevel(level)
        part.removeHandler(listener)


def open_loader(config: Config, here: World, rows: int, model: ProLIP, transform: Any, tokenizer: Any) -> Loader:
    """This rank's batches of `rows` samples, in the sizes that the model takes."""
    loader = build_loader(
        dataclasses.replace(config.data, batch_size=rows),
        transform,
        tokenizer,
        rank=here.rank,
        world_size=here.world_size,
        image_size=model.visual.image_size,
        context_length=model.context_length,
        pin_memory=here.device.type == "cuda",
    )
    loader.gather = partial(gather_objects, world=here)  # one broken shard is much of what one of many ranks reads
    return loader


def build_trained(
    config: Config, here: World, model: ProLIP
) -> tuple[Objective, ModelEmaV3 | None, torch.optim.Optimizer]:
    """The model inside its method, its averaged twin, and the optimiser; sharded and compiled where asked for."""
    ranks = {"seed": config.run.seed, "rank": here.rank, "world_size": here.world_size}
    objective = METHODS[config.method].objective(model, config.objective, **ranks).to(here.device)
    ema = build_ema(config, model)
    if config.run.fsdp:
        shard(config, here, [model] if ema is None else [model, ema.module])
    optimizer = build_optimizer(objective, config.optim)
    if config.model.torchcompile:
        compile_towers(model)
    return objective, ema, optimizer


def build_ema(config: Config, model: nn.Module) -> ModelEmaV3 | None:
    """The averaged twin of the model, where one is asked for."""
    if not config.optim.ema_decay:
        return None
    return ModelEmaV3(model, decay=config.optim.ema_decay, use_warmup=True, foreach=not config.run.fsdp)


def utilisation_per_rate(config: Config, model: ProLIP, here: World, local_batch: int) -> float | None:
    """What samples/s are to be multiplied by for MFU: FLOPs of a sample / peak FLOP/s of all devices."""
    peak = config.run.peak_tflops * 1e12 if config.run.peak_tflops else None
    if peak is None and here.device.type == "cuda":
        peak = peak_of(torch.cuda.get_device_name(here.device))
    if peak is None:
        return None
    masked_views = getattr(config.objective, "alpha2", 0.0) > 0
    return flops_per_sample(model.config, masked_views, local_batch) / (peak * here.world_size)


def save_clock(config: Config, global_batch: int) -> SaveClock:
    """The cadence of checkpoints within epochs; samples in steps, rounded up."""
    settings = config.run
    by_samples = -(-settings.save_every_samples // global_batch) if settings.save_every_samples else 0
    cadences = [steps for steps in (settings.save_every_steps or 0, by_samples) if steps]
    return SaveClock(every_steps=min(cadences, default=0), every_minutes=settings.save_every_minutes or 0.0)


def build_validation(
    config: Config, here: World, tokenizer: Any, preprocess: Any
) -> Validation | None:
    """What measures the model on the way; None where nothing is asked for."""
    if not config.val.asked_for:
        return None
    from training.validation import check_metric, open_validation

    validation = open_validation(config.val, config.run.precision, tokenizer, preprocess, here)
    if config.val.best_metric:
        check_metric(config.val.best_metric, validation, averaged=bool(config.optim.ema_decay))
    return validation


def open_best(config: Config, folder: Path) -> Best | None:
    """What keeps the best model; made when the folder is taken, or it would go on from a run that is overwritten."""
    if not config.val.best_metric:
        return None
    from training.validation import Best

    return Best(folder / "best", config.val.best_metric, config.val.best_lowest)


def summary(run: Run) -> str:
    """What will run, for the person who started it."""
    config, world = run.config, run.world
    model: Any = run.objective.model
    sizes = count_parameters(model)
    towers = ", ".join(f"{part} {total:,}" + (f" ({trained:,} trained)" if trained != total else "")
                       for part, (total, trained) in sizes.items())
    per_rank = run.global_batch // world.world_size // config.run.accum_freq
    facts = {
        "model": f"{config.model.model}, {sum(total for total, _ in sizes.values()):,} parameters: {towers}",
        "method": f"{config.method} {dataclasses.asdict(config.objective) or ''}".strip(),
        "batch": f"{run.global_batch} = {world.world_size} ranks x {config.run.accum_freq} micro-batches x {per_rank}",
        "data": f"{config.data.train_data or config.data.dataset_type}: {run.loader.num_samples:,} samples per epoch",
        "length": f"{run.total_steps:,} steps = {run.total_steps / run.loader.num_batches:.1f} epochs "
        f"of {run.loader.num_batches:,} steps",
        "optimiser": f"{config.optim.opt}, lr {config.optim.lr:g} {config.optim.lr_scheduler}, "
        f"{config.optim.warmup} steps of warm-up, weight decay {config.optim.wd:g}",
        "precision": f"{config.run.precision} on {world.device}" + (", compiled" if config.model.torchcompile else ""),
        "folder": str(run.folder),
    }
    return describe(facts)


def finish(run: Run, seconds: float) -> None:
    """Leave the trained model, its averaged twin and the last figures in the run folder."""
    run.loader.close()  # nothing more is read, and a worker that is killed now would be met while the model is written
    with run.watchdog.pause():
        leave_models(run, seconds)
        wait_for_all(run.world)


def leave_models(run: Run, seconds: float) -> None:
    """`finish` without the meeting of the ranks at its end."""
    model = whole_model(run.objective.model, run.world)
    ema = None if run.ema is None else whole_model(run.ema.module, run.world)
    if run.world.is_first and model is not None:
        try:
            save_pretrained(model, run.folder / "model", tokenizer=run.tokenizer)
            if ema is not None:
                save_pretrained(ema, run.folder / "model_ema", tokenizer=run.tokenizer)
        except Exception as error:  # safetensors has exceptions of its own
            raise OSError(f"the model was not written into {run.folder} ({error}): mend that, then {WAY_ON}") from error
        if run.found:
            leave_figures(run)
        if run.saver is not None:  # behind the model, which is there even if this fails
            run.saver.settle(final=True)
        run.log.say(f"done in {duration(seconds)}: model in {run.folder / 'model'}")


def leave_figures(run: Run) -> None:
    """The last evaluation: a table for the person, eval.json, and folders with embeddings for the report."""
    from prolip.evaluation.corpus import format_table

    for prefix, found in run.found.items():
        if found.corpus is not None:
            folder = "eval_ema" if prefix == EMA else "eval"
            found.corpus.save(run.folder / folder)
            run.log.say(f"{folder}: {format_table(found.corpus)}")
    write_json(run.folder / "eval.json", {"step": run.at.step, **figures(run.found)})
