"""The folder of a run: taking it, and writing files in it that are never half."""

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
OURS = (
    "config.json",
    "status.json",
    "metrics.jsonl",
    "eval.json",
    "eval",
    "eval_ema",
    "eval_swa",
    "tensorboard",
    "checkpoints",
    "ledger",
    "profile",
    "model",
    "model_ema",
    "model_swa",
    "best",
    "noise.jsonl",
    "examples.json",
    "report.html",
    "figures",
)
#: Files of a run that has not come to its first checkpoint or line of the log.
BEGUN = (
    LOCK,
    ".*.tmp",
    "config.json",
    "status.json",
    "metrics.jsonl",
    "noise.jsonl",
    "tensorboard/events.*",
    ".checkpoint-*.tmp/*",
    "checkpoints/.*.tmp",
    f"checkpoints/{LOCK}",
    "ledger/rank_*.jsonl",
    "wandb/*",
)


def open_run_folder(folder: Path, overwrite: bool, resume: bool) -> None:
    """Make the run folder; refuse one that holds a step of a run, unless it is to be resumed or overwritten."""
    taken = [folder / name for name in OURS if (folder / name).exists()]
    if taken and not (overwrite or resume or only_begun(folder)):
        raise FlagError(
            f"{folder} already holds a run: give another --name, --resume auto to go on with it, "
            "or --overwrite to delete it and start again"
        )
    folder.mkdir(parents=True, exist_ok=True)


def only_begun(folder: Path) -> bool:
    """Whether a folder holds no more than a run writes before its first checkpoint and its first line of the log."""
    found = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    names = (path.relative_to(folder).as_posix() for path in found)
    if read_status(folder).get("checkpoint") or not all(any(fnmatch(x, known) for known in BEGUN) for x in names):
        return False
    log = folder / "metrics.jsonl"
    return not any(path.stat().st_size for path in folder.glob("ledger/*")) and not (log.exists() and any(rows_of(log)))


def clear_run_folder(folder: Path) -> None:
    """Delete what a run writes, and leave other files alone."""
    for path in (folder / name for name in OURS):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def lock_run_folder(folder: Path, patience: float = 120.0, say: Callable[[str], None] = print) -> IO[str]:
    """Hold the folder for this process, until the file that is returned is closed or the process ends.

    A try that was cut off may still be saving: it is waited for, up to `patience` seconds. FlagError after that.
    """
    deadline, reported = time.monotonic() + patience, False
    while (file := lock(folder / LOCK)) is None:
        holder = holder_of(folder / LOCK)
        if time.monotonic() > deadline:
            raise FlagError(
                f"{folder} is being written by {holder}: wait until it ends, stop it, or give another --name"
            )
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
    """status.json, for the scripts that submit runs: running, stopped (on request, can go on), finished or failed.

    A run that was killed leaves `running` behind, until the next try: see `note_killed`. Streams of output that died,
    of which nobody may have read, stand there too. Addresses are without secrets.
    """
    facts = {name: scrub(fact) if isinstance(fact, str) else fact for name, fact in facts.items()}
    if console.lost:
        facts["lost_output"] = {name: str(error) for name, error in console.lost.items()}
    write_json(folder / "status.json", {"state": state, **facts, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")})


def read_status(folder: Path) -> dict[str, Any]:
    """What status.json says; nothing where it is missing or damaged."""
    return json_of(folder / "status.json")


def note_killed(folder: Path) -> None:
    """Have status.json no longer say `running` of a try that was killed: for who holds the folder's lock.

    Without a checkpoint, which would be one of that try: scripts take what stands there for new.
    """
    status = read_status(folder)
    if status.get("state") == "running":
        write_status(
            folder,
            "failed",
            step=status.get("step"),
            checkpoint=None,
            reason="killed: the process ended without a word",
        )


def rows_of(path: Path) -> Iterator[tuple[bytes, int, str | None]]:
    """(line, step, kind) of a .jsonl file; a cut last line, and what has no step, is left out."""
    with open(path, "rb") as file:
        for line in file:
            try:
                row = loads(line)
                step = int(row["step"])
            except (ValueError, KeyError, TypeError):
                continue
            yield line.rstrip(b"\n"), step, row.get("kind")


def keep_until_step(path: Path, step: int, again: str | None = None) -> None:
    """Drop the lines of a .jsonl file beyond a step: a resumed run writes them again. A cut last line goes too.

    again: the kind of lines that are dropped at that step itself as well.
    """
    with replacing(path) as temporary, open(temporary, "wb") as kept:
        for line, at, kind in rows_of(path):
            if at < step or (at == step and (again is None or kind != again)):
                kept.write(line + b"\n")


def evaluated_at(path: Path, step: int) -> bool:
    """Whether the log holds the figures of an evaluation at this step."""
    return path.exists() and any(kind == "eval" and at == step for _, at, kind in rows_of(path))


class Ledger:
    """The keys of all samples that a run was trained on, by step: the proof that a restart lost none and repeated none.

    ledger/rank_R.jsonl of a run folder: {"step": s, "epoch": e, "keys": [...]} per step of this rank.

    A disk that is full is reported once; the run goes on, and steps may be missing from there.
    """

    def __init__(self, folder: Path, rank: int):
        self.path = folder / "ledger" / f"rank_{rank}.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = open(self.path, "a", encoding="utf-8", buffering=2**16)  # noqa: SIM115  open as long as the run lasts
        self.reported = False

    def write(self, step: int, epoch: int, keys: Sequence[str]) -> None:
        """Note the samples of a step."""
        self._try(self.file.write, json.dumps({"step": step, "epoch": epoch, "keys": list(keys)}) + "\n")

    def flush(self) -> None:
        """Bring what was noted to the disk: before a checkpoint that would go on behind it."""
        self._try(self.file.flush)

    def close(self) -> None:
        self._try(self.file.close)

    def _try(self, act: Callable[..., object], *words: str) -> None:
        try:
            act(*words)
        except OSError as error:
            if not self.reported:
                self.reported = True
                console.say(
                    f"warning: {self.path} cannot be written, steps will be missing in it, the run goes on: {error}"
                )
