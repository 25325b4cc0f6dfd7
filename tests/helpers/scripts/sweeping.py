"""Trainings of a sweep in this process, for tests of the scripts that start them."""

from __future__ import annotations

from pathlib import Path

import sweep
from training.main import main as train_main

ROOT = Path(__file__).resolve().parents[3]


def train_here(plan: dict, variant: str, seed: int, folder: Path, threads: int) -> None:
    """Train like sweep.train, without a process of its own, which takes seconds to import."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    (folder.parent / f"{folder.name}.made-of").write_text(sweep.made_of(plan, variant))
    words = ["--config", str(ROOT / plan["recipe"]), "--seed", str(seed), "--name", folder.name]
    words += ["--output", str(folder.parent), "--overwrite", *sweep.flags_of(plan, variant)]
    assert train_main(words) == 0
