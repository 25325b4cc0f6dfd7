"""Train a recipe on the bundled drawings, evaluate it on an unseen designer, and write the page of the run.

    make demo                   ten minutes on two CPU cores: 479 concepts
    prolip demo --recipe paper  the same with the loss of the ProLIP paper
    prolip demo --recipe full   all 1,644 concepts, 6,000 steps
    prolip demo -- --max-steps 480  a quarter of the time, half of the accuracy

The same command resumes an interrupted run from its last checkpoint, if any, and only rewrites the page of a finished
run. --overwrite deletes the run and starts again.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOM = 500e6  # bytes: two checkpoints during a replacement, the model, the embeddings


def check_room(folder: Path) -> None:
    """Raise OSError if the disk has no room for the run."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    if free < ROOM:
        raise OSError(
            f"{free / 1e6:,.0f} MB are free at {there}, but a run needs {ROOM / 1e6:,.0f}: "
            "free some, or give another folder as --output"
        )


def typed(recipe: str, output: str, more: Sequence[str], overwrite: bool = False) -> str:
    """Return the command that resumes the demo, or starts it again, as its user types it."""
    words = [*(["--recipe", recipe] if recipe != "demo" else []), *(["--output", output] if output != "runs" else [])]
    words += ["--overwrite"] if overwrite else []
    words += ["--", *more] if more else []
    return shlex.join(["prolip", "demo", *words]) if words or "MAKELEVEL" not in os.environ else "make demo"


def train(recipe: str, output: str, overwrite: bool, more: Sequence[str]) -> int:
    """Train and evaluate. Return the exit code of training."""
    from training.health.signals import STOP
    from training.main import main as run_training

    print(f"training {recipe}: prints a line every few seconds, and writes a page at the end", flush=True)
    STOP.install(typed(recipe, output, more))
    code = run_training(
        [
            "--config",
            f"scripts/recipes/emoji-{recipe}.yaml",
            "--name",
            recipe,
            "--output",
            output,
            *(["--overwrite"] if overwrite else ["--resume", "auto"]),
            *more,
        ]
    )
    STOP.release()
    if code not in (0, 75, 130) and (ROOT / output / recipe / "config.json").exists():
        print(f"--overwrite deletes {ROOT / output / recipe} and starts again", file=sys.stderr)
    return code


def run(recipe: str, output: str = "runs", overwrite: bool = False, more: Sequence[str] = ()) -> int:
    """Train, evaluate and write the report. Return the exit code. more: flags of training."""
    from prolip.utils.threads import share_busy_cores

    os.chdir(ROOT)
    share_busy_cores()
    try:
        from training.checkpoint.run_dir import is_finished, read_status
    except ImportError as error:
        raise ImportError(f"{error} ({sys.executable}): `make demo` installs everything into .venv") from error
    folder, start = ROOT / output / recipe, time.perf_counter()
    since = ""
    if is_finished(folder) and not overwrite:
        if more:
            raise ValueError(f"{folder} holds a finished run: give --overwrite to delete it, or another --output")
        steps = f"{read_status(folder).get('total_steps', 0):,} steps"
        print(f"{folder} holds a finished run of {steps}. To train again: {typed(recipe, output, (), overwrite=True)}")
        from prolip.corpora.emoji.report.page import end_with_report

        print(end_with_report(folder))
    else:
        check_room(folder)
        if read_status(folder).get("checkpoint") and not overwrite:
            since = " since it was resumed"
        if code := train(recipe, output, overwrite, more):
            return code
    took = f"{(time.perf_counter() - start) / 60:.1f} minutes{since}"
    print(f"\ndone in {took}. Open {folder / 'report.html'} in a browser.")
    print(f"The model: prolip.create_model('local-dir:{Path(output) / recipe / 'model'}')")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "src"))
    from prolip.cli.main import main
    from prolip.utils import console

    console.command(lambda: main(["demo", *sys.argv[1:]]))
