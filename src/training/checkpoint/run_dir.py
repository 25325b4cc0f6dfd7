"""The folder of a run, locked by one process before it changes anything, and its files, written atomically."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, Any

from prolip.models.diagnose import json_of
from prolip.utils import console
from prolip.utils.documents import loads, read_json
from prolip.utils.flags import FlagError
from prolip.utils.outputs import holder_of, lock, replacing
from prolip.utils.secrecy import redacted, scrub
from training.checkpoint.files import NAME, Storage, find_checkpoint, list_steps
from training.config import RunConfig

LOCK = ".lock"
SUPERSEDED = "superseded_"  # prefix of later checkpoints of a run that resumed from an earlier one
Choice = tuple[str | None, list[str]]
#: Files and folders that a run writes.
OURS = (
    "config.json status.json metrics.jsonl eval.json examples.json noise.jsonl report.html figures eval eval_ema "
    "eval_swa tensorboard checkpoints ledger profile model model_ema model_swa best"
)
#: Files of a run before its first checkpoint or line of the log.
BEGUN = f"""{LOCK} .*.tmp config.json status.json metrics.jsonl noise.jsonl tensorboard/events.* .checkpoint-*.tmp/*
checkpoints/.*.tmp checkpoints/{LOCK} ledger/rank_*.jsonl wandb/*""".split()


def claim(settings: RunConfig, folder: Path, storage: Storage, held: contextlib.ExitStack) -> Choice:
    """Make the run folder and lock it until `held` is closed; returns (checkpoint to resume from or None, why newer
    ones are skipped). A run to overwrite is deleted once all checks have passed.
    """
    try:
        open_run_dir(folder, settings.overwrite, bool(settings.resume))
        held.enter_context(lock_run_dir(folder))
        status = read_status(folder)
        if status.get("state") == "running":
            reason = "killed: the process ended without a report"
            write_status(folder, "failed", step=status.get("step"), checkpoint=None, reason=reason)
        open_run_dir(folder, settings.overwrite, bool(settings.resume))  # another run may have started during the wait
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
    chosen = find_resumable(settings.resume, storage, folder) if settings.resume else (None, [])
    steps = list_steps(storage)
    place = Storage((chosen[0] or "").rpartition("/")[0] or ".")
    here = [other.local.resolve() if other.local is not None else other.url for other in (place, storage)]
    resumes = chosen[0] is not None and here[0] == here[1]
    overwrites = settings.overwrite and own_place(folder, storage).url == storage.url
    if steps and not (resumes or overwrites):
        what = f"{storage.url} holds the checkpoints of another run, up to step {steps[0]}"
        remedy = "give another --checkpoint-dir (and --name), or resume that run with --resume latest"
        raise FlagError(f"{what}: {remedy}")
    for name in storage.names() if overwrites else ():
        if NAME.match(name.removeprefix(SUPERSEDED).replace(".shards", ".pt")):
            storage.delete(name)
    if settings.overwrite or not settings.resume:  # also a run without a step
        for path in (folder / name for name in OURS.split()):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    return chosen


def find_resumable(resume: str, storage: Storage, folder: Path) -> Choice:
    """Call `find_checkpoint`; FlagError also if the store fails, or another run is in the way."""
    named = resume not in ("latest", "auto")
    try:
        if not named and not list_steps(storage):  # a new start must not overwrite a run with progress
            own, remedy = own_place(folder, storage), "or replace --resume with --overwrite to start it again"
            if own.url != storage.url and list_steps(own):
                where = f"{storage.url} holds no checkpoint: the run in {folder} keeps its checkpoints in {own.url}"
                raise FlagError(f"{where}: give --checkpoint-dir {own.url}, {remedy}")
            if is_finished(folder):
                what = f"{folder} holds a finished run without a checkpoint to resume from"
                raise FlagError(f"{what}: give another --name, {remedy}")
        return find_checkpoint(resume, storage)
    except FlagError:
        raise
    except Exception as error:  # every store has its own exceptions
        why = f"{resume if named else storage.url} cannot be read ({type(error).__name__}: {error})"
        remedy = "fix the address, or the credentials of this environment"
        raise FlagError(f"--resume {resume}: {why}: {remedy}") from None


def own_place(folder: Path, storage: Storage) -> Storage:
    """Return the checkpoint storage of the run in the folder: `storage` if its address looks the same."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        place = read_json(folder / "config.json")["run"]["checkpoint_dir"]
        if place:
            return storage if place.rstrip("/") == redacted(storage.url) else Storage(place)
    return Storage(str(folder / "checkpoints"))


def open_run_dir(folder: Path, overwrite: bool, resume: bool) -> None:
    """Make the run folder; FlagError if it holds steps of a run that is neither resumed nor overwritten."""
    if not (overwrite or resume) and any((folder / name).exists() for name in OURS.split()):
        found = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
        names = [path.relative_to(folder).as_posix() for path in found]
        log = folder / "metrics.jsonl"
        if (
            read_status(folder).get("checkpoint")
            or not all(any(fnmatch(name, known) for known in BEGUN) for name in names)
            or any(path.stat().st_size for path in folder.glob("ledger/*"))
            or (log.exists() and any(rows_of(log)))
        ):
            remedy = "give another --name, --resume auto to resume it, or --overwrite to delete it and start again"
            raise FlagError(f"{folder} already holds a run: {remedy}")
    folder.mkdir(parents=True, exist_ok=True)


def lock_run_dir(folder: Path, patience: float = 120.0, say: Callable[[str], None] = print) -> IO[str]:
    """Lock the folder until the returned file is closed; FlagError if another process holds it for `patience` s."""
    deadline, reported = time.monotonic() + patience, False
    while (file := lock(folder / LOCK)) is None:
        holder = holder_of(folder / LOCK)
        if time.monotonic() > deadline:
            remedy = "wait until it ends, stop it, or give another --name"
            raise FlagError(f"{folder} is in use by {holder}: {remedy}")
        if not reported:
            say(f"waiting for {holder}, which is still writing {folder}")
            reported = True
        time.sleep(0.5)
    return file


def write_json(path: Path, values: Any) -> None:
    """Write indented JSON atomically."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def write_status(folder: Path, state: str, **facts: Any) -> None:
    """Write status.json: running, stopped (on request, can be resumed), finished or failed; without secrets."""
    facts = {name: scrub(fact) if isinstance(fact, str) else fact for name, fact in facts.items()}
    if console.lost:
        facts["lost_output"] = {name: str(error) for name, error in console.lost.items()}
    write_json(folder / "status.json", {"state": state, **facts, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")})


def read_status(folder: Path) -> dict[str, Any]:
    """Return the content of status.json; empty if it is missing or damaged."""
    return json_of(folder / "status.json")


def is_finished(folder: Path) -> bool:
    """Return True if the run in the folder has saved its model."""
    return read_status(folder).get("state") == "finished"


def rows_of(path: Path) -> Iterator[tuple[bytes, int, str | None]]:
    """Yield (line, step, kind) of a .jsonl file; skips a truncated last line and lines without a step."""
    with open(path, "rb") as file:
        for line in file:
            try:
                row = loads(line)
                step = int(row["step"])
            except (ValueError, KeyError, TypeError):
                continue
            yield line.rstrip(b"\n"), step, row.get("kind")


def truncate_log(path: Path, step: int, again: str | None = None) -> None:
    """Drop lines of a .jsonl file after a step (of kind `again`: also at the step), and a truncated last line."""
    with replacing(path) as temporary, open(temporary, "wb") as kept:
        for line, at, kind in rows_of(path):
            if at < step or (at == step and (again is None or kind != again)):
                kept.write(line + b"\n")


class Ledger:
    """The keys of all samples that this rank was trained on: a line {"step": s, "epoch": e, "keys": [...]} per step in
    ledger/rank_R.jsonl. A full disk is reported once; the run continues without the later steps.
    """

    def __init__(self, folder: Path, rank: int):
        self.path = folder / "ledger" / f"rank_{rank}.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = open(self.path, "a", encoding="utf-8", buffering=2**16)  # noqa: SIM115
        self.reported = False

    def write(self, step: int, epoch: int, keys: Sequence[str]) -> None:
        """Add the samples of a step."""
        self._try(self.file.write, json.dumps({"step": step, "epoch": epoch, "keys": list(keys)}) + "\n")

    def flush(self) -> None:
        """Write to disk, before the checkpoint of the same step."""
        self._try(self.file.flush)

    def close(self) -> None:
        self._try(self.file.close)

    def _try(self, act: Callable[..., object], *words: str) -> None:
        try:
            act(*words)
        except OSError as error:
            if not self.reported:
                self.reported = True
                console.say(f"warning: cannot write to {self.path}; later steps are missing from it: {error}")
