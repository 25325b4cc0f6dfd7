"""Train a recipe on the bundled drawings, evaluate it on a designer never seen, and draw the page of the run.

    make demo                                        ten minutes on two CPU cores: 479 concepts
    .venv/bin/python scripts/demo.py --recipe paper  the same by the loss of the ProLIP paper
    .venv/bin/python scripts/demo.py --recipe full   all 1,644 concepts, 6,000 steps

Typed again, it goes on with a run that broke off, from its last checkpoint if there is one; of a run that has ended it
draws the page alone. --again deletes what is there and starts from the beginning.
"""
from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECIPES = {name: f"scripts/recipes/emoji-{name}.yaml" for name in ("demo", "paper", "full")}
ROOM = 500e6  # bytes: two checkpoints while one takes the other's place, the model, the embeddings


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", choices=RECIPES, default="demo", help="what to train (default: demo)")
    parser.add_argument("--output-dir", default="runs", help="folder of all runs (default: runs)")
    parser.add_argument("--again", action="store_true", help="delete the run that is there, and train anew")
    parser.add_argument("further", nargs="*", help="flags of training.main after --, e.g. -- --seed 1 --max-steps 200")
    return parser.parse_args()


def check_room(folder: Path) -> None:
    """End before the first step where the disk cannot hold the run."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    if free < ROOM:
        sys.exit(
            f"error: {free / 1e6:,.0f} MB are free at {there}, a run wants {ROOM / 1e6:,.0f}: "
            "free some, or name another place with --output-dir"
        )


def train(options: argparse.Namespace, folder: Path) -> None:
    """Train to the end and evaluate; ends the program with training's exit code where it did not."""
    from training.health.preemption import STOP
    from training.main import main as run_training

    print(f"training {options.recipe}: a line every few seconds, the page at the end", flush=True)
    STOP.install()
    code = run_training([
        "--config", RECIPES[options.recipe], "--name", options.recipe, "--output-dir", options.output_dir,
        *(["--overwrite"] if options.again else ["--resume", "auto"]), *options.further,
    ])  # fmt: skip
    STOP.release()
    if code in (75, 130):  # asked to stop, interrupted
        print("the same command goes on from the last checkpoint, or from the start if there is none", file=sys.stderr)
    elif code and (folder / "config.json").exists():
        print(f"--again deletes what is in {folder} and starts from the beginning", file=sys.stderr)
    if code:
        sys.exit(code)


def main() -> None:
    """Training (which ends in the evaluation), then the report."""
    options = parse()
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT / "src"))
    try:
        from training.checkpoint.resuming import is_finished
    except ImportError as error:
        sys.exit(f"error: {error} ({sys.executable}): `make demo` installs all into .venv, then use .venv/bin/python")
    folder, start = ROOT / options.output_dir / options.recipe, time.perf_counter()
    if is_finished(folder) and not options.again:
        if options.further:
            sys.exit(f"error: {folder} holds a run that has ended: --again deletes it, or give another --output-dir")
        print(f"{folder} holds a run that has ended; --again trains it anew")
    else:
        check_room(folder)
        train(options, folder)
    from prolip.report.__main__ import main as report

    page = report([str(folder)])
    print(f"\ndone in {(time.perf_counter() - start) / 60:.1f} minutes. Open {page} in a browser.")
    print(f"The model: prolip.create_model('local-dir:{Path(options.output_dir) / options.recipe / 'model'}')")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "src"))
    from prolip.utils import console

    console.guard()
    try:
        main()
    except KeyboardInterrupt:  # while modules load or the page is drawn; training takes care of its own
        sys.exit(130)
