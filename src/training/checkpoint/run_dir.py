"""The folder of a run: its lock, and its files, each of which is written whole."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, Any

from prolip.models.diagnose import json_of
from prolip.utils import console
from prolip.utils.documents import loads
from prolip.utils.flags import FlagError
from prolip.utils.outputs import holder_of, lock, replacing
from prolip.utils.secrecy import scrub

LOCK = ".lock"
#: Files and folders that a run writes.
OURS = (
    "config.json status.json metrics.jsonl eval.json examples.json noise.jsonl report.html figures eval eval_ema "
    "eval_swa tensorboard checkpoints ledger profile model model_ema model_swa best"
)
#: Files of a run before its first checkpoint or line of the log.
BEGUN = f"""{LOCK} .*.tmp config.json status.json metrics.jsonl noise.jsonl tensorboard/events.* .checkpoint-*.tmp/*
checkpoints/.*.tmp checkpoints/{LOCK} ledger/rank_*.jsonl wandb/*""".split()


def open_run_dir(folder: Path, overwrite: bool, resume: bool) -> None:
    """Make the run folder; FlagError if it holds a step of a run that is not to be resumed or overwritten."""
    taken = [folder / name for name in OURS.split() if (folder / name).exists()]
    if taken and not (overwrite or resume or only_begun(folder)):
        raise FlagError(
            f"{folder} already holds a run: give another --name, --resume auto to resume it, "
            "or --overwrite to delete it and start again"
        )
    folder.mkdir(parents=True, exist_ok=True)


def only_begun(folder: Path) -> bool:
    """Whether a folder holds only what a run writes before its first checkpoint and line of the log."""
    found = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    names = (path.relative_to(folder).as_posix() for path in found)
    if read_status(folder).get("checkpoint") or not all(any(fnmatch(x, known) for known in BEGUN) for x in names):
        return False
    log = folder / "metrics.jsonl"
    return not any(path.stat().st_size for path in folder.glob("ledger/*")) and not (log.exists() and any(rows_of(log)))


def clear_run_dir(folder: Path) -> None:
    """Delete the files of a run, and no others."""
    for path in (folder / name for name in OURS.split()):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def lock_run_dir(folder: Path, patience: float = 120.0, say: Callable[[str], None] = print) -> IO[str]:
    """Lock the folder until the returned file is closed; FlagError if another process holds it for `patience` s."""
    deadline, reported = time.monotonic() + patience, False
    while (file := lock(folder / LOCK)) is None:
        holder = holder_of(folder / LOCK)
        if time.monotonic() > deadline:
            remedy = "wait until it ends, stop it, or give another --name"
            raise FlagError(f"{folder} is being written by {holder}: {remedy}")
        if not reported:
            say(f"waiting for {holder}, which is still writing {folder}")
            reported = True
        time.sleep(0.5)
    return file


def write_json(path: Path, values: Any) -> None:
    """Indented JSON, atomically."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def write_status(folder: Path, state: str, **facts: Any) -> None:
    """Write status.json, for scripts that submit runs: running, stopped (on request, can be resumed), finished, failed;
    with lost output streams, without secrets of addresses.
    """
    facts = {name: scrub(fact) if isinstance(fact, str) else fact for name, fact in facts.items()}
    if console.lost:
        facts["lost_output"] = {name: str(error) for name, error in console.lost.items()}
    write_json(folder / "status.json", {"state": state, **facts, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")})


def read_status(folder: Path) -> dict[str, Any]:
    """The content of status.json; empty where it is missing or damaged."""
    return json_of(folder / "status.json")


def mark_crashed(folder: Path) -> None:
    """Write `failed`, without a checkpoint, for a killed run that says `running`; only the lock's holder may."""
    status = read_status(folder)
    if status.get("state") == "running":
        reason = "killed: the process ended without a word"
        write_status(folder, "failed", step=status.get("step"), checkpoint=None, reason=reason)


def rows_of(path: Path) -> Iterator[tuple[bytes, int, str | None]]:
    """(line, step, kind) of a .jsonl file, without a cut last line and lines without a step."""
    with open(path, "rb") as file:
        for line in file:
            try:
                row = loads(line)
                step = int(row["step"])
            except (ValueError, KeyError, TypeError):
                continue
            yield line.rstrip(b"\n"), step, row.get("kind")


def truncate_log(path: Path, step: int, again: str | None = None) -> None:
    """Drop the lines of a .jsonl file after a step, those of kind `again` also at it, and a cut last line."""
    with replacing(path) as temporary, open(temporary, "wb") as kept:
        for line, at, kind in rows_of(path):
            if at < step or (at == step and (again is None or kind != again)):
                kept.write(line + b"\n")


def evaluated_at(path: Path, step: int) -> bool:
    """Whether the log holds the metrics of an evaluation at this step."""
    return path.exists() and any(kind == "eval" and at == step for _, at, kind in rows_of(path))


class Ledger:
    """The keys of all samples that a run was trained on, by step: proof that a restart lost and repeated none.

    ledger/rank_R.jsonl holds {"step": s, "epoch": e, "keys": [...]} per step of this rank. A full disk is reported
    once; the run goes on, and steps are missing.
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
        """Write to the disk, before a checkpoint of the same step."""
        self._try(self.file.flush)

    def close(self) -> None:
        self._try(self.file.close)

    def _try(self, act: Callable[..., object], *words: str) -> None:
        try:
            act(*words)
        except OSError as error:
            if not self.reported:
                self.reported = True
                console.say(f"warning: {self.path} cannot be written, it lacks steps from here on: {error}")
