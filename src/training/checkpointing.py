"""The run folder and its checkpoints: atomic writes, retention, resumption."""
from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from training.flags import FlagError

FORMAT = 1
NAME = re.compile(r"^epoch_(\d+)(?:_step_(\d+))?\.pt$")
OURS = (
    "config.json", "metrics.jsonl", "eval.json", "eval", "eval_ema", "tensorboard", "checkpoints", "model", "model_ema",
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
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)


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


def save_checkpoint(folder: Path, state: dict[str, Any], keep: int) -> Path:
    """Write checkpoints/epoch_N.pt (epoch_N_step_S.pt inside an epoch), then delete all but the newest `keep`."""
    name = f"epoch_{state['epoch']}"
    if state["batch_in_epoch"]:
        name += f"_step_{state['step']}"
    path = folder / "checkpoints" / f"{name}.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda file: torch.save(state | {"format": FORMAT}, file))
    if keep:
        for old in list_checkpoints(folder)[keep:]:
            old.unlink()
    return path


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints of a run folder, newest first."""

    def progress(path: Path) -> tuple[int, int]:
        match = NAME.match(path.name)
        assert match is not None
        return int(match[1]), int(match[2] or 0)

    found = [path for path in (folder / "checkpoints").glob("epoch_*.pt") if NAME.match(path.name)]
    return sorted(found, key=progress, reverse=True)


def find_checkpoint(resume: str, folder: Path) -> tuple[Path, dict[str, Any], list[str]]:
    """(path, state, what was passed over): the file, or the newest checkpoint of this run that can be loaded."""
    if resume != "latest":
        path = Path(resume)
        if not path.is_file():
            raise FlagError(f"--resume {resume}: there is no such file; --resume latest takes the newest of {folder}")
        return path, load_checkpoint(path), []
    passed_over: list[str] = []
    for path in list_checkpoints(folder):
        try:
            return path, load_checkpoint(path), passed_over
        except FlagError as error:
            passed_over.append(str(error))
    listed = "; ".join(passed_over) or f"{folder / 'checkpoints'} holds none"
    raise FlagError(f"--resume latest found no checkpoint that can be loaded ({listed}): start without --resume")


def load_checkpoint(path: Path) -> dict[str, Any]:
    """The state on the CPU; FlagError when the file is cut off or no checkpoint of ours."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a damaged file
        reason = str(error).strip().split("\n")[0]
        raise FlagError(f"{path} cannot be loaded ({type(error).__name__}: {reason[:120]})") from None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise FlagError(f"{path} is no checkpoint of this program (format {FORMAT}): give one of <run>/checkpoints")
    return state
