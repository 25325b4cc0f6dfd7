"""Acquires a run's folder and resumes from a checkpoint; no file changes before all checks have passed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from prolip.utils.documents import read_json
from prolip.utils.flags import FlagError, flag_of
from prolip.utils.outputs import replacing
from prolip.utils.secrecy import adopt, redacted
from training.checkpoint import run_dir
from training.checkpoint.reader import NAME, find_checkpoint, list_steps, shards_of
from training.checkpoint.run_dir import lock_run_dir, open_run_dir, read_status, write_json
from training.checkpoint.state_dict import restore
from training.checkpoint.storage import Storage
from training.checkpoint.writer import CheckpointWriter
from training.config import REDACTED, Config, RunConfig
from training.log import StepProfiler
from training.parallel.distributed import PATIENCE, World, from_first, share_object, wait_for_all
from training.state import Run

#: Prefix of later checkpoints of a run that resumed from an earlier one.
SUPERSEDED = "superseded_"
#: Settings of a run's place, which may change.
PLACE = ("run.name", "run.output")

Choice = tuple[str | None, list[str]]


# --- the folder ------------------------------------------------------------------------------------------------------
def acquire_run_dir(config: Config, world: World, folder: Path, storage: Storage, held: contextlib.ExitStack) -> Choice:
    """Make and lock the run folder, on rank 0, until `held` is closed, and find the checkpoint to resume from.

    Returns (its address or None, why newer ones are skipped) on all ranks; FlagError on all of them.
    """
    return from_first(partial(claim, config.run, folder, storage, held), world)


def claim(settings: RunConfig, folder: Path, storage: Storage, held: contextlib.ExitStack) -> Choice:
    """`acquire_run_dir` for one process; deletes a run to be overwritten once all checks have passed."""
    try:
        open_run_dir(folder, settings.overwrite, bool(settings.resume))
        held.enter_context(lock_run_dir(folder))
        run_dir.mark_crashed(folder)
        open_run_dir(folder, settings.overwrite, bool(settings.resume))  # one may have begun while this waited
    except OSError as error:
        raise FlagError(f"{folder} cannot be written ({error}): give another --output") from None
    if settings.checkpoint_dir:
        try:  # before the first step, not at the first checkpoint
            storage.write(".probe.tmp", lambda file: file.write(b"probe"))
            with storage.fetched(".probe.tmp"):
                storage.delete(".probe.tmp")
        except Exception as error:  # every store has its own exceptions
            why = f"({type(error).__name__}: {error}): give a folder or URL that this machine may write to"
            raise FlagError(f"--checkpoint-dir {storage.url} cannot be written {why}") from None
        if storage.local is not None and storage.local.resolve() != folder.resolve():
            held.enter_context(lock_run_dir(storage.local))
    chosen = look_for(settings.resume, storage, folder) if settings.resume else (None, [])
    steps = list_steps(storage)
    goes_on = chosen[0] is not None and storage.holds(chosen[0])
    begun_anew = settings.overwrite and own_place(folder, storage).url == storage.url
    if steps and not (goes_on or begun_anew):
        raise FlagError(
            f"{storage.url} holds the checkpoints of another run, up to step {steps[0]}: give another --checkpoint-dir "
            "(and --name), or go on with that run by --resume latest"
        )
    if begun_anew:
        for name in storage.names():
            if NAME.match(name.removeprefix(SUPERSEDED).replace(".shards", ".pt")):
                storage.delete(name)
    if settings.overwrite or not settings.resume:  # also a start that reached no step
        run_dir.clear_run_dir(folder)
    return chosen


def look_for(resume: str, storage: Storage, folder: Path) -> Choice:
    """`find_checkpoint`; FlagError also where the store does not answer, or another run is in the way."""
    named = resume not in ("latest", "auto")
    try:
        if not named and not list_steps(storage):  # starting anew must not overwrite a run with progress
            own, remedy = own_place(folder, storage), "or --overwrite instead of --resume to begin it again"
            if own.url != storage.url and list_steps(own):
                where = f"{storage.url} holds no checkpoint, and the run in {folder} keeps its own in {own.url}"
                raise FlagError(f"{where}: give --checkpoint-dir {own.url}, {remedy}")
            if is_finished(folder):
                what = f"{folder} holds a run that has ended, and no checkpoint to resume from"
                raise FlagError(f"{what}: give another --name, {remedy}")
        return find_checkpoint(resume, storage)
    except FlagError:
        raise
    except Exception as error:  # every store has its own exceptions
        why = f"{resume if named else storage.url} cannot be read ({type(error).__name__}: {error})"
        remedy = "mend the address, or the credentials of this environment"
        raise FlagError(f"--resume {resume}: {why}: {remedy}") from None


def own_place(folder: Path, storage: Storage) -> Storage:
    """Where the run in the folder keeps its checkpoints: `storage` where the address looks the same."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        place = read_json(folder / "config.json")["run"]["checkpoint_dir"]
        if place:
            return storage if place.rstrip("/") == redacted(storage.url) else Storage(place)
    return Storage(str(folder / "checkpoints"))


# --- the checkpoint --------------------------------------------------------------------------------------------------
def resume(run: Run, address: str, state: dict[str, Any]) -> None:
    """Restore a run from a checkpoint; FlagError or ValueError where it is of another run, or of one that has ended."""
    step, total = state["step"], run.total_steps
    if step > total or (step == total and is_finished(run.outputs.folder) and (run.outputs.folder / "model").exists()):
        remedy = "give a larger --epochs or --max-steps to train longer"
        raise FlagError(f"{address} is at step {step} of {total}: the run has ended; {remedy}")
    saved = same_addresses(run.config, state["config"])
    restore(run, state, shards_of(address))
    say = run.outputs.log.say
    say(f"going on from {address} at step {step}")
    if step == total:
        say("all steps are done: what is missing is the last evaluation and the model")
    changed = list(changed_settings(saved, run.config.to_dict()))
    if changed:
        say(f"note: other settings than the checkpoint's, from here on: {'; '.join(changed)}")
    if state.get("memory") and any(change.startswith("objective.") for change in changed):
        say("note: what the method keeps of the whole data is the checkpoint's, found with the checkpoint's settings")
    scheduler, before = run.config.optim.lr_scheduler, state["total_steps"]
    if before != total and scheduler != "const":
        say(f"note: the run was to take {before} steps; the {scheduler} schedule is that of {total} from here on")


def same_addresses(config: Config, saved: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint's config without secrets, of whose hashes the run adopts the salt; FlagError for other data."""
    hashes = saved.get(REDACTED, {})
    for tagged in hashes.values():
        adopt(tagged)
    now = config.to_dict().get(REDACTED, {})
    differing = [name for name in hashes if name.startswith("data.") and hashes[name] != now.get(name)]
    if differing and not config.run.renewed_addresses:
        flags = " and ".join(flag_of(name.removeprefix("data.")) for name in differing)
        raise FlagError(
            f"{flags}: not the address of the checkpoint's run, its hash differs: give that "
            "one again; if only login, signature or command is new, add --renewed-addresses"
        )
    return redacted(saved)


def is_finished(folder: Path) -> bool:
    """Whether the run in the folder has left its model."""
    return read_status(folder).get("state") == "finished"


def changed_settings(saved: Mapping[str, Any], now: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """`section.setting: old -> new` of what both configs have and do not agree on."""
    for name in saved:
        path = above + name
        if name not in now or path in (*PLACE, REDACTED):
            continue
        old, new = saved[name], now[name]
        if isinstance(old, dict) and isinstance(new, dict) and not above:
            yield from changed_settings(old, new, f"{path}.")
        elif old != new:
            yield f"{path}: {old} -> {new}"


# --- what is written from here on ------------------------------------------------------------------------------------
def open_records(run: Run, storage: Storage) -> None:
    """Open config, log, ledger, profile and checkpoints of the run, without the steps that it will do again."""
    settings, outputs, begin, world = run.config.run, run.outputs, run.at.step, run.world
    evaluated = None
    if world.is_first:
        write_json(outputs.folder / "config.json", run.config.to_dict())
        if (noise := run.data.loader.noise) is not None:
            with replacing(outputs.folder / "noise.jsonl") as temporary:
                noise.write(temporary)
        # a run that only has to end evaluates again: the log does not hold all of its metrics
        if begin < run.total_steps and run_dir.evaluated_at(outputs.folder / "metrics.jsonl", begin):
            evaluated = begin
        set_aside(storage, begin, outputs.log.say)
        for name in storage.sweep():
            outputs.log.say(f"removed {storage.path(name)}: a checkpoint that a killed run was writing")
    if world.is_first or settings.fsdp:
        outputs.saver = CheckpointWriter(
            storage,
            keep=settings.keep_checkpoints,
            keep_every=settings.keep_every_steps,
            say=outputs.log.say,
            saved=lambda address, step: run_dir.write_status(outputs.folder, "running", step=step, checkpoint=address),
            group=dist.new_group(backend="gloo", timeout=PATIENCE) if settings.fsdp else None,  # for its thread
        )
    run.evals.step = share_object(evaluated, world)
    again = "eval" if begin == run.total_steps else None
    outputs.log.open(begin if settings.resume else None, again, settings.wandb_project)
    if settings.ledger:
        if world.is_first:  # also of ranks that are no more
            for path in (outputs.folder / "ledger").glob("rank_*.jsonl"):
                run_dir.truncate_log(path, begin)
        wait_for_all(world)
        outputs.ledger = run_dir.Ledger(outputs.folder, world.rank)
    if world.is_first and settings.profile:
        run.health.profiler = StepProfiler(outputs.folder, settings.profile, outputs.log.say)


def set_aside(storage: Storage, step: int, say: Callable[[str], None]) -> None:
    """Rename the checkpoints after a step: `latest` must not find them, nor retention count them as the newest."""
    for later in (found for found in list_steps(storage) if found > step):
        name = f"step_{later}.pt"
        for part in {name, shards_of(name)} & {*storage.names()}:
            storage.rename(part, SUPERSEDED + part)
        say(f"{storage.path(name)} is later than step {step}, from which the run resumes: now {SUPERSEDED}{name}")
