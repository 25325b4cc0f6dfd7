"""What a run is made of: from a config to the parts that the loop drives, and what is left behind at the end."""
from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from timm.utils import ModelEmaV3
from torch import nn

from prolip.checkpoint import save_pretrained
from prolip.data.loader import Loader, build_loader
from prolip.methods import METHODS
from prolip.methods.base import Objective
from prolip.model import ProLIP
from prolip.ring import check_equal_batches
from training.checkpointing import Saver, find_checkpoint, load_checkpoint
from training.config import Config, RunConfig, check_precision, rows_per_rank, total_steps
from training.distributed import Agreement, World, seed_everything, share_object, wait_for_all, world
from training.flags import FlagError
from training.found import EMA, figures
from training.host_memory import keep_freed_memory
from training.ledger import Ledger
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
from training.profiling import StepProfiler
from training.runfolder import (
    clear_run_folder,
    keep_until_step,
    lock_run_folder,
    open_run_folder,
    write_json,
    write_status,
)
from training.sharding import whole_model
from training.snapshot import SaveClock, restore
from training.stopping import EXIT_STOPPED, STOP, Stopped
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
    try:
        yield
    except Stopped as stop:
        tell("stopped", exit_code=EXIT_STOPPED, reason=str(stop))
        raise
    except BaseException as error:
        if run.saver is not None:
            run.saver.settle()
        tell("failed", reason=f"{type(error).__name__}: {error}")
        raise
    tell("finished", exit_code=0)


def close(run: Run) -> None:
    """End what is open: profile, watchdog, writer of checkpoints, ledger, the workers of the loader, log."""
    if run.profiler is not None:
        run.profiler.close()
    run.watchdog.close()
    if run.saver is not None:
        run.saver.close()
    if run.ledger is not None:
        run.ledger.close()
    run.loader.close()
    run.log.close()


def default_name(config: Config) -> str:
    """Model, method and time of the start."""
    model = Path(config.model.model.split(":")[-1]).name
    return f"{model}-{config.method}-{time.strftime('%Y%m%d-%H%M%S')}"


def build(
    config: Config, here: World, folder: Path, rows: int, held: contextlib.ExitStack | None = None
) -> Run:
    """Every part of the run, checked before the folder is touched; resumed where the config says so.

    The folder is locked until `held` is closed.
    """
    settings = config.run
    seed_everything(settings.seed, settings.deterministic)
    if here.device.type == "cuda" and not settings.deterministic:
        torch.set_float32_matmul_precision("high")
    tokenizer = build_tokenizer(config)  # before the model: what is missing shows at once
    model, transform, preprocess = build_model(config, here.device)
    loader = open_loader(config, here, rows, model, transform, tokenizer)
    steps = total_steps(config, loader.num_batches, rows * here.world_size)
    objective, ema, optimizer = build_trained(config, here, model)
    validation = build_validation(config, here, objective.similarity, tokenizer, preprocess)
    take_folder(config, here, folder, held or contextlib.ExitStack())
    storage = Storage(settings.checkpoint_dir or str(folder / "checkpoints"))
    address, passed_over = choose_checkpoint(settings.resume, storage, here)
    checkpoint = load_checkpoint(address) if address else None
    if here.is_first:
        write_json(folder / "config.json", config.to_dict())
    begin = checkpoint["step"] if checkpoint else 0
    resume_at = begin if settings.resume else None
    log = RunLog(folder, here.is_first, resume_at=resume_at, wandb_project=settings.wandb_project)
    ledger = open_ledger(folder, here, begin) if settings.ledger else None
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
        log=log,
        # GradScaler meets infinite gradients by design and skips the step; everything else must be finite.
        meter=TermMeter(("grad_norm",) if settings.precision == "amp_fp16" else (), settings.max_nonfinite),
        gate=StepGate(settings.max_nonfinite, here),
        agreement=Agreement(here),
        stop=STOP,
        clock=save_clock(config, rows * here.world_size),
        parts=parts_of(objective),
        utilisation=utilisation_per_rate(config, model, here, rows // settings.accum_freq),
        watchdog=Watchdog(settings.stall_seconds, here.rank),
        profiler=StepProfiler(folder, here.rank, settings.profile, log.say) if profiled(settings, here) else None,
        saver=open_saver(config, storage, folder, log) if here.is_first else None,
        ledger=ledger,
        validation=validation,
        best=open_best(config, folder),
        tokenizer=tokenizer,
    )
    log.say(summary(run))
    for reason in passed_over:
        log.say(f"passed over {reason}")
    if checkpoint:
        go_on(run, address, checkpoint)
    elif settings.resume:
        log.say(f"{storage.url} holds no checkpoint: starting at step 0")
    return run


def open_loader(config: Config, here: World, rows: int, model: ProLIP, transform: Any, tokenizer: Any) -> Loader:
    """This rank's batches of `rows` samples, in the sizes that the model takes."""
    return build_loader(
        dataclasses.replace(config.data, batch_size=rows),
        transform,
        tokenizer,
        rank=here.rank,
        world_size=here.world_size,
        image_size=model.visual.image_size,
        context_length=model.context_length,
        pin_memory=here.device.type == "cuda",
    )


def build_trained(
    config: Config, here: World, model: ProLIP
) -> tuple[Objective, ModelEmaV3 | None, torch.optim.Optimizer]:
    """The model inside its method, its averaged twin, and the optimiser; sharded and compiled where asked for."""
    ranks = {"seed": config.run.seed, "rank": here.rank, "world_size": here.world_size}
    objective = METHODS[config.method][1](model, config.objective, **ranks).to(here.device)
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


def choose_checkpoint(resume: str | None, storage: Storage, here: World) -> tuple[str | None, list[str]]:
    """(address of the checkpoint to go on from, what was passed over): looked for by rank 0, the same on all ranks."""
    answer: tuple[str | None, list[str]] | str = (None, [])
    if resume and here.is_first:
        try:
            answer = find_checkpoint(resume, storage)
        except FlagError as error:
            answer = str(error)
    answer = share_object(answer, here)
    if isinstance(answer, str):
        raise FlagError(answer)
    return answer


def open_saver(config: Config, storage: Storage, folder: Path, log: RunLog) -> Saver:
    """The writer of checkpoints, in a folder without the half files of a process that was killed."""
    for name in storage.sweep():
        log.say(f"removed {storage.path(name)}: a checkpoint that was being written when the run was killed")
    return Saver(
        storage,
        keep=config.run.keep_checkpoints,
        keep_every=config.run.keep_every_steps,
        say=log.say,
        saved=lambda address, step: write_status(folder, "running", step=step, checkpoint=address),
    )


def utilisation_per_rate(config: Config, model: ProLIP, here: World, local_batch: int) -> float | None:
    """What samples/s are to be multiplied by for MFU: FLOPs of a sample / peak FLOP/s of all devices."""
    peak = config.run.peak_tflops * 1e12 if config.run.peak_tflops else None
    if peak is None and here.device.type == "cuda":
        peak = peak_of(torch.cuda.get_device_name(here.device))
    if peak is None:
        return None
    masked_views = getattr(config.objective, "alpha2", 0.0) > 0
    return flops_per_sample(model.config, masked_views, local_batch) / (peak * here.world_size)


def profiled(settings: RunConfig, here: World) -> bool:
    """Whether this rank's steps are traced."""
    return here.is_first and settings.profile > 0


def save_clock(config: Config, global_batch: int) -> SaveClock:
    """The cadence of checkpoints within epochs; samples in steps, rounded up."""
    settings = config.run
    by_samples = -(-settings.save_every_samples // global_batch) if settings.save_every_samples else 0
    cadences = [steps for steps in (settings.save_every_steps or 0, by_samples) if steps]
    return SaveClock(every_steps=min(cadences, default=0), every_minutes=settings.save_every_minutes or 0.0)


def open_ledger(folder: Path, here: World, begin: int) -> Ledger:
    """This rank's ledger; lines of steps that will be done again are dropped, those of ranks that are no more, too."""
    if here.is_first:
        for path in (folder / "ledger").glob("rank_*.jsonl"):
            keep_until_step(path, begin)
    wait_for_all(here)
    return Ledger(folder, here.rank)


def build_validation(
    config: Config, here: World, similarity: str, tokenizer: Any, preprocess: Any
) -> Validation | None:
    """What measures the model on the way; None where nothing is asked for."""
    if not config.val.asked_for:
        return None
    from training.validation import check_metric, open_validation

    validation = open_validation(config.val, config.run.precision, similarity, tokenizer, preprocess, here)
    if config.val.best_metric:
        check_metric(config.val.best_metric, validation, averaged=bool(config.optim.ema_decay))
    return validation


def open_best(config: Config, folder: Path) -> Best | None:
    """What keeps the best model; made when the folder is taken, or it would go on from a run that is overwritten."""
    if not config.val.best_metric:
        return None
    from training.validation import Best

    return Best(folder / "best", config.val.best_metric, config.val.best_lowest)


def take_folder(config: Config, here: World, folder: Path, held: contextlib.ExitStack) -> None:
    """Make the run folder and lock it, on rank 0, for as long as `held`; every rank refuses one that is taken."""
    refusal = None
    if here.is_first:
        try:
            open_run_folder(folder, config.run.overwrite, bool(config.run.resume))
            held.enter_context(lock_run_folder(folder))
            if config.run.overwrite:
                clear_run_folder(folder)
        except FlagError as error:
            refusal = str(error)
    refusal = share_object(refusal, here)
    if refusal:
        raise FlagError(refusal)


def go_on(run: Run, address: str | None, state: dict[str, Any]) -> None:
    """Restore a run from a checkpoint and say which."""
    restore(run, state)
    run.log.say(f"going on from {address} at step {run.at.step}")
    if run.at.step >= run.total_steps:
        raise FlagError(
            f"{address} is at step {run.at.step} of {run.total_steps}: the run has ended; "
            "give a larger --epochs or --max-steps to train longer"
        )


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
    model = whole_model(run.objective.model, run.world)
    ema = None if run.ema is None else whole_model(run.ema.module, run.world)
    if run.world.is_first and model is not None:
        if run.found:
            leave_figures(run)
        if run.saver is not None:
            run.saver.settle(final=True)
        save_pretrained(model, run.folder / "model", tokenizer=run.tokenizer)
        if ema is not None:
            save_pretrained(ema, run.folder / "model_ema", tokenizer=run.tokenizer)
        run.log.say(f"done in {duration(seconds)}: model in {run.folder / 'model'}")
    wait_for_all(run.world)


def leave_figures(run: Run) -> None:
    """The last evaluation: a table for the person, eval.json, and folders with embeddings for the report."""
    from prolip.evaluation.corpus import format_table

    for prefix, found in run.found.items():
        if found.corpus is not None:
            folder = "eval_ema" if prefix == EMA else "eval"
            found.corpus.save(run.folder / folder)
            run.log.say(f"{folder}: {format_table(found.corpus)}")
    write_json(run.folder / "eval.json", {"step": run.at.step, **figures(run.found)})
