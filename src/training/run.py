"""A run: built from its config, trained by the loop, and its results written at the end."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Iterator
from functools import partial
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import torch

from prolip.data.loader import Loader, build_loader
from prolip.factory import create_model_from_pretrained
from prolip.flops import flops_per_sample, peak_of
from prolip.methods import find_method
from prolip.methods.base import Context, Objective
from prolip.models.checkpoint import save_pretrained
from prolip.utils.console import EXIT_INTERRUPTED
from prolip.utils.fields import AUTO
from prolip.utils.secrecy import redacted
from training import model as parts
from training import parallel as ranks
from training.checkpoint.files import Storage, read_checkpoint
from training.checkpoint.resume import open_records, resume
from training.checkpoint.run_dir import claim, write_json, write_status
from training.config import Config
from training.defaults import rows_per_rank, settle, settle_model, settle_workers, total_steps
from training.health.errors import LossMeter, NonFiniteGuard, explain
from training.health.log import ChanceWatch, RunLog, duration
from training.health.signals import EXIT_STOPPED, STOP, WAY_ON, Stopped, Watchdog
from training.hooks import set_bias
from training.loop import train
from training.optim import build_averages, build_optimizer, params_by_tower, stages_of
from training.parallel import World, shard_model, whole_model
from training.state import Clock, DataState, EvalState, Health, Run, RunOutputs, TrainState


def run(config: Config) -> Path:
    """Train a model as the config specifies; returns the run's folder."""
    with ranks.process_group(config.run.device) as world, contextlib.ExitStack() as held:
        parts.check_precision("--precision", config.run.precision, world.device)
        parts.check_precision("--val-precision", config.val.val_precision, world.device)
        if world.device.type == "cpu":
            ranks.keep_freed_memory()
        config = settle_model(config, world)
        rows = rows_per_rank(config, world.world_size)
        ranks.check_equal_batches(rows, world)
        model = Path(config.model.model.split(":")[-1]).name
        name = config.run.name or f"{model}-{config.method}-{time.strftime('%Y%m%d-%H%M%S')}"
        folder = Path(config.run.output) / ranks.share_object(name, world)
        config = settle_workers(config, world, rows, folder)
        state = build(config, world, folder, rows, held)
        try:
            with status_written(state):
                start = time.perf_counter()
                with parts.attention_for(config.run.precision, world.device):
                    train(state)
                finish(state, time.perf_counter() - start)
        finally:
            close(state)
    if config.run.report and world.is_first:  # after the barrier: the other ranks may end
        from prolip.corpora.emoji.report.page import end_with_report

        state.outputs.log.say(end_with_report(folder))
    return folder


@contextlib.contextmanager
def status_written(run: Run) -> Iterator[None]:
    """Keep status.json up to date during and after the context, for the scripts around a run."""
    outputs, stop = run.outputs, run.health.stop

    def write(state: str, **facts: Any) -> None:
        if run.world.is_first:
            last = outputs.saver.last if outputs.saver else None
            write_status(outputs.folder, state, step=run.at.step, total_steps=run.total_steps, checkpoint=last, **facts)

    write("running")  # from now on with every checkpoint
    stop.ended = False
    stop.last_words = lambda: write("failed", exit_code=EXIT_INTERRUPTED, reason="interrupted immediately")
    try:
        yield
        write("finished", exit_code=0)
    except Stopped as stopped:
        with contextlib.suppress(OSError):  # a full disk must not hide the command that resumes
            write("stopped", exit_code=EXIT_STOPPED, reason=str(stopped))
        raise
    except BaseException as error:
        if outputs.saver is not None:
            outputs.saver.settle()
            outputs.saver.close()  # first: every write sets the status to `running`
        with contextlib.suppress(OSError):  # nor the original error
            write("failed", reason=explain(error) or f"{type(error).__name__}: {error}")
        raise
    finally:
        stop.ended, stop.last_words = True, lambda: None


def close(run: Run) -> None:
    """Close log, loader, ledger, checkpoint writer, watchdog and profiler, even if one of them fails."""
    outputs, health = run.outputs, run.health
    with contextlib.ExitStack() as ends:
        for part in (outputs.log, run.data.loader, outputs.ledger, outputs.saver, health.watchdog, health.profiler):
            if part is not None:
                ends.callback(part.close)  # the last one first


@contextlib.contextmanager
def messages_of(part: str) -> Iterator[BufferingHandler]:
    """Collect what the logger of this name says in the block, at INFO and above."""
    (log := logging.getLogger(part)).setLevel(logging.INFO)
    log.addHandler(listener := BufferingHandler(capacity=10_000))
    log.propagate = False  # the caller prints them
    try:
        yield listener
    finally:
        log.removeHandler(listener)
        log.setLevel(logging.NOTSET)
        log.propagate = True


def build(config: Config, world: World, folder: Path, rows: int, held: contextlib.ExitStack | None = None) -> Run:
    """Build and check every part of the run, resume on request, and lock the folder until `held` is closed."""
    settings = config.run
    ranks.seed_everything(settings.seed, settings.deterministic)
    if world.device.type == "cuda" and settings.precision == "fp32" and not settings.deterministic:
        torch.set_float32_matmul_precision("high")  # TF32 for the towers; not needed under autocast
    tokenizer = parts.build_tokenizer(config)  # first: a missing file shows immediately
    with messages_of("prolip.models.checkpoint") as listener:
        model, transform, preprocess = parts.build_model(config, world.device)
    statistics = parts.settle_statistics(config, world, model)
    loader = open_loader(config, world, rows, model, transform, tokenizer)
    rows = loader.config.batch_size
    global_batch, start = rows * world.world_size, config.model.init_logit_bias
    config = settle(config, loader.num_batches, rows, world.world_size)
    steps = total_steps(config, loader.num_batches, global_batch)
    trained = build_trained(config, world, model, (steps, loader.num_batches), tokenizer)
    draws = trained.objective.context.draws
    evals = build_evals(config, world, loader, trained.averages, tokenizer, preprocess)
    storage = Storage(settings.checkpoint_dir or str(folder / "checkpoints"), beside=folder)
    claimed = partial(claim, settings, folder, storage, held or contextlib.ExitStack())
    address, passed_over = ranks.from_first(claimed, world)
    checkpoint = read_checkpoint(address, world) if address else None
    trained.network = parts.distribute(trained.objective, world, settings)
    by_samples = settings.save_every_samples and -(-settings.save_every_samples // global_batch)
    every_steps = min(filter(None, (settings.save_every_steps, by_samples)), default=0)
    saves, lines = (
        Clock(every_steps=every_steps, every_seconds=60 * (settings.save_every_minutes or 0)),
        Clock(every_seconds=settings.log_every_seconds or 0),
    )
    run = Run(
        config=config,
        world=world,
        trained=trained,
        data=DataState(
            loader,
            parts.build_augment(config, model, world.device, draws),
            parts.build_token_augment(config, model, tokenizer, world.device, draws),
            global_batch,
        ),
        health=build_health(config, world, trained.objective, (rows, steps)),
        evals=evals,
        outputs=RunOutputs(folder, RunLog(folder, world.is_first), tokenizer, preprocess, saves, lines),
    )
    if config.model.init_logit_bias != start and config.model.init_logit_bias is not None:
        set_bias(run, config.model.init_logit_bias)
    say = run.outputs.log.say
    notes = [f"  note       {line}" for line in (statistics, *trained.objective.notes(global_batch)) if line]
    notes += [f"  weights    {record.getMessage()}" for record in listener.buffer]
    say("\n".join([summary(run), *notes]))
    if loader.noise is not None:
        say(f"noise: {loader.noise}")
    for reason in passed_over:
        say(f"skipped {reason}")
    if address and checkpoint:
        resume(run, address, checkpoint)
    elif settings.resume:
        say(f"{storage.url} holds no checkpoint: starting at step 0")
    open_records(run, storage)
    return run


def open_loader(config: Config, world: World, rows: int, model: Any, transform: Any, tokenizer: Any) -> Loader:
    """Build this rank's loader of batches of `rows` samples."""
    loader = build_loader(
        dataclasses.replace(config.data, batch_size=rows),
        transform,
        tokenizer,
        rank=world.rank,
        world_size=world.world_size,
        image_size=model.image_size,
        context_length=model.context_length,
        once=partial(ranks.from_first, world=world),
    )
    loader.pin = world.device.type == "cuda"
    loader.gather = partial(ranks.gathered, world=world)  # fault limits apply to all ranks together
    _ = loader.noise  # read now, so that errors appear before the first step
    return loader


def build_trained(config: Config, world: World, model: Any, length: tuple[int, int], tokenizer: Any) -> TrainState:
    """Build method, averaged models and optimiser, sharded and compiled on request. length: steps of run and epoch."""
    settings, method, (steps, per_epoch) = config.run, find_method(config.method).objective, length
    teacher = None
    if address := method.needs(config.objective).teacher:
        with torch.random.fork_rng(devices=[]):  # keeps the run's random numbers
            teacher = create_model_from_pretrained(address, device=world.device, return_transform=False)
        teacher.eval().requires_grad_(False)
    context = Context(
        seed=settings.seed,
        rank=world.rank,
        world_size=world.world_size,
        total_steps=steps,
        tokenizer=tokenizer,
        teacher=teacher,
    )
    context.draws.version = settings.draws
    objective = method(model, config.objective, context).to(world.device)
    averages = build_averages(model, config.optim, per_epoch, steps, foreach=not settings.fsdp)
    if settings.fsdp:
        for network in (model, *(average.module for average in averages.values())):
            shard_model(network, world, parts.DTYPES.get(settings.precision))
    optimizer = build_optimizer(objective, config.optim)
    if config.model.torchcompile:
        for tower in model.towers().values():  # in place: names stay; shapes are few
            tower.compile(dynamic=False)
    return TrainState(
        objective=objective,
        network=objective,
        parts=params_by_tower(objective),
        optimizer=optimizer,
        scaler=torch.amp.GradScaler(world.device.type, enabled=settings.precision == "amp_fp16"),
        gate=NonFiniteGuard(settings.max_nonfinite, world.device),
        averages=averages,
        config=config.optim,
        total_steps=steps,
        stages=stages_of(config.optim, per_epoch, steps),
        accum_freq=settings.accum_freq,
        autocast=parts.autocast_for(settings.precision, world.device),
    )


def build_evals(config: Config, world: World, loader: Loader, averages: Any, tokenizer: Any, preprocess: Any) -> Any:
    """Open the test sets for the model and its averaged models."""
    if not config.evaluates:
        return EvalState()
    from training.evaluate import open_validation

    validation = open_validation(config, tokenizer, preprocess, world, loader, averages)
    return EvalState(validation=validation)


def build_health(config: Config, world: World, objective: Objective, length: tuple[int, int]) -> Health:
    """Build the health monitor of a run. length: samples per step on this rank, and steps."""
    settings, utilisation, (rows, steps) = config.run, None, length
    peak = settings.peak_tflops * 1e12 if settings.peak_tflops else None
    if peak is None and world.device.type == "cuda":
        peak = peak_of(torch.cuda.get_device_name(world.device))
    if peak is not None:
        model, micro = objective.model, rows // settings.accum_freq
        passes = objective.encoder_passes(objective.config, micro, model)
        try:
            utilisation = flops_per_sample(model, passes, micro) / (peak * world.world_size)
        except NotImplementedError as error:
            if world.is_first:
                print(f"the log has no mfu: {error}", flush=True)
    # GradScaler produces infinite gradients by design and skips the step; all other terms must be finite
    meter = LossMeter(("grad_norm",) if settings.precision == "amp_fp16" else (), settings.max_nonfinite)
    dog, chance = Watchdog(settings.stall_seconds, world.rank), ChanceWatch(rows, world.world_size, steps)
    return Health(meter, STOP, ranks.StopConsensus(world), dog, chance, utilisation)


def summary(run: Run) -> str:
    """Describe the run for its log."""
    config, world, loader, model = run.config, run.world, run.data.loader, run.trained.objective.model
    optim, global_batch = config.optim, run.data.global_batch
    sizes: dict[str, tuple[int, int]] = {}
    for name, parameter in model.named_parameters():
        part = name.split(".")[0] if "." in name else "logit"
        every, own = sizes.get(part, (0, 0))
        sizes[part] = every + parameter.numel(), own + parameter.numel() * parameter.requires_grad
    counts = [f"{part} {n:,}" + (f" ({own:,} trained)" if own != n else "") for part, (n, own) in sizes.items()]
    split = f"{world.world_size} ranks x {config.run.accum_freq} micro-batches"
    held = f" ({len(loader.held_out):,} more held out)" if loader.held_out is not None else ""
    filled = " to fill its last batch" if loader.num_samples > loader.dataset_samples else ""
    clipping = f"gradients clipped at {optim.grad_clip_norm:g}" if optim.grad_clip_norm else "no clipping"
    bias = "from the first batch" if config.model.init_logit_bias == AUTO else f"{model.logit_bias.item():.4g}"
    facts = {
        "model": f"{config.model.model}, {sum(own for own, _ in sizes.values()):,} parameters: {', '.join(counts)}",
        "method": f"{config.method} {dataclasses.asdict(config.objective) or ''}".strip(),
        "batch": f"{global_batch} = {split} x {global_batch // world.world_size // config.run.accum_freq}",
        "data": f"{redacted(config.data.train_data) or 'synthetic'}: {loader.dataset_samples:,} samples{held}, "
        f"an epoch reads {loader.num_samples:,}{filled}, {config.data.workers} loader processes per rank",
        "length": f"{run.total_steps:,} steps = {run.total_steps / loader.num_batches:.1f} epochs "
        f"of {loader.num_batches:,} steps",
        "optimiser": f"{optim.opt}, lr {optim.lr:g} {optim.lr_scheduler}, {optim.warmup} steps of warm-up, "
        f"weight decay {optim.wd:g}, beta2 {optim.beta2:g}, {clipping}",
        "logit": f"scale {model.logit_scale.exp().item():.4g}, bias {bias}",
        **{
            f"{tower} backbone": f"frozen for {stage.frozen:,} steps, then {stage.warmup:,} of warm-up"
            for tower, stage in run.trained.stages.items()
        },
        "precision": f"{config.run.precision} on {world.device}" + (", compiled" if config.model.torchcompile else ""),
        "folder": str(run.outputs.folder),
    }
    width = max(map(len, facts))
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in facts.items())


def finish(run: Run, seconds: float) -> None:
    """Write the trained model, its averaged models and the last evaluation to the run folder."""
    trained, outputs, world, evals = run.trained, run.outputs, run.world, run.evals
    run.data.loader.close()  # first: a worker killed from now on must not interrupt the write of the model
    with run.health.watchdog.pause():
        models: dict[str, Any] = {"model": trained.objective.model}
        models |= {f"model_{name}": average for name, average in trained.averaged(run.at.step).items()}
        models = {name: whole_model(model, world) for name, model in models.items()}
        if world.is_first:
            folder, say = outputs.folder, outputs.log.say
            try:
                for name, model in models.items():
                    save_pretrained(model, folder / name, tokenizer=outputs.tokenizer)
            except Exception as error:  # safetensors has exceptions of its own
                what = f"the model was not written to {folder} ({error})"
                raise OSError(f"{what}: fix this, then {WAY_ON}") from error
            if evals.results:
                from prolip.corpora.emoji.result import format_corpus

                for prefix, result in evals.results.items():
                    if result.corpus is not None:
                        name = f"eval_{prefix}".rstrip("/_")
                        result.corpus.save(folder / name)
                        say(f"{name}: {format_corpus(result.corpus, brief=True)}")
                        say(f"all metrics: {folder / name / 'metrics.json'}")
                write_json(folder / "eval.json", {"step": evals.step, **evals.metrics})
                shown = {name: examples for name, examples in evals.results[""].examples.items() if examples}
                write_json(folder / "examples.json", shown)
            if outputs.saver is not None:  # last: the model exists even if this fails
                outputs.saver.settle(final=True)
            say(f"trained in {duration(seconds)}: model in {folder / 'model'}")
        ranks.wait_for_all(world)
