"""The keys of all samples that a run was trained on, by step: the proof that a restart lost none and repeated none."""
from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path


class Ledger:
    """ledger/rank_R.jsonl of a run folder: {"step": s, "epoch": e, "keys": [...]} per step of this rank."""

    def __init__(self, folder: Path, rank: int):
        path = folder / "ledger" / f"rank_{rank}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = open(path, "a", buffering=2**16)  # noqa: SIM115  open as long as the run lasts

    def write(self, step: int, epoch: int, keys: Sequence[str]) -> None:
        """Note the samples of a step."""
        self.file.write(json.dumps({"step": step, "epoch": epoch, "keys": list(keys)}) + "\n")

    def flush(self) -> None:
        """Bring what was noted to the disk: before a checkpoint that would go on behind it."""
        self.file.flush()

    def close(self) -> None:
        self.file.close()
