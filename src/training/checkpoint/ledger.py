"""The keys of all samples that a run was trained on, by step: the proof that a restart lost none and repeated none."""
from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from prolip.utils.console import say


class Ledger:
    """ledger/rank_R.jsonl of a run folder: {"step": s, "epoch": e, "keys": [...]} per step of this rank.

    A disk that is full is reported once; the run goes on, and steps may be missing from there.
    """

    def __init__(self, folder: Path, rank: int):
        self.path = folder / "ledger" / f"rank_{rank}.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = open(self.path, "a", encoding="utf-8", buffering=2**16)  # noqa: SIM115  open as long as the run lasts
        self.reported = False

    def write(self, step: int, epoch: int, keys: Sequence[str]) -> None:
        """Note the samples of a step."""
        with self._kept_going():
            self.file.write(json.dumps({"step": step, "epoch": epoch, "keys": list(keys)}) + "\n")

    def flush(self) -> None:
        """Bring what was noted to the disk: before a checkpoint that would go on behind it."""
        with self._kept_going():
            self.file.flush()

    def close(self) -> None:
        with self._kept_going():
            self.file.close()

    @contextlib.contextmanager
    def _kept_going(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self.reported:
                self.reported = True
                say(f"warning: {self.path} cannot be written, steps will be missing in it, the run goes on: {error}")
