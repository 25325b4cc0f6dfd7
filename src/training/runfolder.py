"""The folder of a run: taking it, and writing files in it that are never half."""
from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from training.flags import FlagError

OURS = (
    "config.json", "status.json", "metrics.jsonl", "eval.json", "eval", "eval_ema", "tensorboard", "checkpoints",
    "ledger", "model", "model_ema",
)  # fmt: skip


def open_run_folder(folder: Path, overwrite: bool, resume: bool) -> None:
    """Make the run folder; refuse one that holds a run, unless it is to be resumed or overwritten.

    Overwriting deletes what a run writes and leaves other files alone.
    """
    taken = [folder / name for name in OURS if (folder / name).exists()]
    if taken and not (overwrite or resume):
        raise FlagError(
            f"{folder} already holds a run: give another --name, --resume latest to go on with it, "
            "or --overwrite to delete it and start again"
        )
    if overwrite:
        for path in taken:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    folder.mkdir(parents=True, exist_ok=True)


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Have `write` fill a temporary file, flush it to the disk, then rename: `path` is old or new, never half."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_json(path: Path, values: Any) -> None:
    """Indented JSON, atomically."""
    write_atomically(path, lambda file: file.write_text(json.dumps(values, indent=2) + "\n"))


def write_status(folder: Path, state: str, **facts: Any) -> None:
    """status.json, for the scripts that submit runs: running, stopped (on request, can go on), finished or failed.

    A run that was killed leaves `running` behind.
    """
    write_json(folder / "status.json", {"state": state, **facts, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")})


def keep_until_step(path: Path, step: int) -> None:
    """Drop the lines of a .jsonl file beyond a step: a resumed run writes them again. A cut last line goes too."""
    kept = []
    for line in path.read_text().splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            continue
    path.write_text("".join(line + "\n" for line in kept))
