"""Taking a run's folder and going on from a checkpoint; nothing that is there changes before all of it is accepted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from prolip.utils.documents import read_json
from prolip.utils.flags import FlagError, flag_of
from prolip.utils.outputs import replacing
from prolip.utils.secrecy import adopt, redacted
from training.checkpoint.files import NAME, Saver, find_checkpoint, list_steps, shards_of
from training.checkpoint.run_folder import (
    Ledger,
    clear_run_folder,
    evaluated_at,
    keep_until_step,
    lock_run_folder,
    note_killed,
    open_run_folder,
    read_status,
    write_json,
    write_status,
)
from training.checkpoint.snapshot import restore
from training.checkpoint.storage import Storage
from training.config import REDACTED, Config, RunConfig
from training.log import StepProfiler
from training.parallel.distributed import PATIENCE, World, from_first, share_object, wait_for_all
from training.state import Run

#: What begins the name of a checkpoint that a run has left behind by going on from an earlier one.
SUPERSEDED = "superseded_"
# Settings that say where a run lies, not what it is.
PLACE = ("run.name", "run.output")

Choice = tuple[str | None, list[str]]


# --- the folder ------------------------------------------------------------------------------------------------------
def take_folder(config: Config, world: World, folder: Path, storage: Storage, held: contextlib.ExitStack) -> Choice:
    """Make and lock the run folder, on rank 0, for as long as `held`, and find the checkpoint to go on from.

    Returns (its address or None, what was passed over), the same on all ranks; every rank refuses what is taken.
    """
    return from_first(partial(claim, config.run, folder, storage, held), world)


def claim(settings: RunConfig, folder: Path, storage: Storage, held: contextlib.ExitStack) -> Choice:
    """`take_folder` for one process; what is not gone on with is deleted, behind all checks."""
    try:
        open_run_folder(folder, settings.overwrite, bool(settings.resume))
        held.enter_context(lock_run_folder(folder))
        note_killed(folder)
        open_run_folder(folder, settings.overwrite, bool(settings.resume))  # one may have begun while this waited
    except OSError as error:
        raise FlagError(f"{folder} cannot be written ({error}): give another --output") from None
    if settings.checkpoint_dir:
        try:  # before the first step, not at the first checkpoint
            storage.write(".probe.tmp", lambda file: file.write(b"probe"))
            with storage.fetched(".probe.tmp"):
                storage.delete(".probe.tmp")
        except Exception as error:  # every store has its own exceptions
            raise FlagError(
                f"--checkpoint-dir {storage.url} cannot be written ({type(error).__name__}: {error}): give a folder or "
                "URL that this machine may write to"
            ) from None
        if storage.local is not None and storage.local.resolve() != folder.resolve():
            held.enter_context(lock_run_folder(storage.local))
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
    if settings.overwrite or not settings.resume:  # what a try has left that came to no step
        clear_run_folder(folder)
    return chosen


def look_for(resume: str, storage: Storage, folder: Path) -> Choice:
    """`find_checkpoint`; FlagError also where the store does not answer, or another run is in the way."""
    try:
        if resume in ("latest", "auto") and not list_steps(storage):
            # to begin anew must not write over a run of which there is much: one that keeps its checkpoints in another
            # place, or has ended
            own = own_place(folder, storage)
            if own.url != storage.url and list_steps(own):
                raise FlagError(
                    f"{storage.url} holds no checkpoint, and the run in {folder} keeps its own in {own.url}: "
                    f"give --checkpoint-dir {own.url}, or --overwrite instead of --resume to begin it again"
                )
            if is_finished(folder):
                raise FlagError(
                    f"{folder} holds a run that has ended, and no checkpoint to go on from: give another "
                    "--name, or --overwrite instead of --resume to begin it again"
                )
        return find_checkpoint(resume, storage)
    except FlagError:
        raise
    except Exception as error:  # every store has its own exceptions
        place = storage.url if resume in ("latest", "auto") else resume
        raise FlagError(
            f"--resume {resume}: {place} cannot be read ({type(error).__name__}: {error}): mend the "
            "address, or the credentials of this environment"
        ) from None


def own_place(folder: Path, storage: Storage) -> Storage:
    """Where the run that the folder holds keeps its checkpoints: `storage` where the address looks the same."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        place = read_json(folder / "config.json")["run"]["checkpoint_dir"]
        if place:
            return storage if place.rstrip("/") == redacted(storage.url) else Storage(place)
    return Storage(str(folder / "checkpoints"))


# --- going on --------------------------------------------------------------------------------------------------------
def go_on(run: Run, address: str, state: dict[str, Any]) -> None:
    """Put a run where a checkpoint stands; FlagError or ValueError where the two are not one run, or it has ended."""
    step, total = state["step"], run.total_steps
    if step > total or (step == total and is_finished(run.kept.folder) and (run.kept.folder / "model").exists()):
        raise FlagError(
            f"{address} is at step {step} of {total}: the run has ended; "
            "give a larger --epochs or --max-steps to train longer"
        )
    saved = same_addresses(run.config, state["config"])
    restore(run, state, shards_of(address))
    say = run.kept.log.say
    say(f"going on from {address} at step {step}")
    if step == total:
        say("all steps are done: what is missing is the last evaluation and the model")
    changed = list(changed_settings(saved, run.config.to_dict()))
    if changed:
        say(f"note: other settings than the checkpoint's, from here on: {'; '.join(changed)}")
    if state.get("memory") and any(change.startswith("objective.") for change in changed):
        say("note: what the method keeps of the whole data is the checkpoint's, found with the checkpoint's settings")
    if state["total_steps"] != total and run.config.optim.lr_scheduler != "const":
        say(
            f"note: the checkpoint's run was to take {state['total_steps']} steps, this one takes {total}, and "
            f"the {run.config.optim.lr_scheduler} schedule is that of {total} from here on"
        )


def same_addresses(config: Config, saved: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint's config without secrets. FlagError where its data had some, and this run's data is not the same.

    The run takes over the salt of the checkpoint's hashes.
    """
    hashes = saved.get(REDACTED, {})
    for tagged in hashes.values():
        adopt(tagged)
    now = config.to_dict().get(REDACTED, {})
    other = [
        flag_of(name.removeprefix("data."))
        for name in hashes
        if name.startswith("data.") and hashes[name] != now.get(name)
    ]
    if other and not config.run.renewed_addresses:
        raise FlagError(
            f"{' and '.join(other)}: not the address of the checkpoint's run, its hash differs: give that "
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
    """Open what the run writes: its config, log, ledger, profile and checkpoints, without what it will do again."""
    settings, kept, begin, world = run.config.run, run.kept, run.at.step, run.world
    going_on, measured = bool(settings.resume), None
    if world.is_first:
        write_json(kept.folder / "config.json", run.config.to_dict())
        if (noise := run.fed.loader.noise) is not None:
            with replacing(kept.folder / "noise.jsonl") as temporary:
                noise.write(temporary)
        # the last metrics are needed once more to end a run: those of the log do not hold all of them
        measured = begin if begin < run.total_steps and evaluated_at(kept.folder / "metrics.jsonl", begin) else None
        # Left among the run's, a damaged checkpoint behind step `begin` would count as one of the newest, for which
        # good ones are deleted, and an earlier course of the run would be what `latest` finds.
        for step in list_steps(storage):
            if step > begin:
                name = f"step_{step}.pt"
                for part in {name, shards_of(name)} & {*storage.names()}:
                    storage.rename(part, SUPERSEDED + part)
                kept.log.say(
                    f"{storage.path(name)} is behind step {begin}, from which the run goes on: now {SUPERSEDED}{name}"
                )
        for name in storage.sweep():
            kept.log.say(f"removed {storage.path(name)}: a checkpoint that was being written when the run was killed")
    if world.is_first or settings.fsdp:
        kept.saver = Saver(
            storage,
            keep=settings.keep_checkpoints,
            keep_every=settings.keep_every_steps,
            say=kept.log.say,
            saved=lambda address, step: write_status(kept.folder, "running", step=step, checkpoint=address),
            group=dist.new_group(backend="gloo", timeout=PATIENCE) if settings.fsdp else None,  # a thread of its own
        )
    run.measured.step = share_object(measured, world)
    again = "eval" if begin == run.total_steps else None
    kept.log.open(begin if going_on else None, again, settings.wandb_project)
    if settings.ledger:
        if world.is_first:  # lines of steps that will be done again are dropped, those of ranks that are no more, too
            for path in (kept.folder / "ledger").glob("rank_*.jsonl"):
                keep_until_step(path, begin)
        wait_for_all(world)
        kept.ledger = Ledger(kept.folder, world.rank)
    if world.is_first and settings.profile:
        run.health.profiler = StepProfiler(kept.folder, settings.profile, kept.log.say)
