"""Train a recipe on the bundled drawings, evaluate it on a designer never seen, and draw the page of the run.

    make demo                                       ten minutes on two CPU cores: 479 concepts
    .venv/bin/python scripts/demo.py --recipe full  all 1,644 concepts, 6,000 steps
"""
from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECIPES = {"demo": "scripts/recipes/emoji-demo.yaml", "full": "scripts/recipes/emoji-full.yaml"}


def run(module: str, *arguments: str) -> None:
    """`python -m module arguments` from the repository's root; its failure is ours, its own message stands above."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    ended = subprocess.run([sys.executable, "-m", module, *arguments], cwd=ROOT, env=environment, check=False)
    if ended.returncode:
        sys.exit(ended.returncode)


def main() -> None:
    """Training (which ends in the evaluation), then the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", choices=RECIPES, default="demo", help="what to train (default: demo)")
    parser.add_argument("--output-dir", default="runs", help="folder of all runs (default: runs)")
    parser.add_argument("further", nargs="*", help="flags of training.main after --, e.g. -- --seed 1 --max-steps 200")
    options = parser.parse_args()
    folder = ROOT / options.output_dir / options.recipe
    start = time.perf_counter()
    print(f"training {options.recipe}: a line every few seconds, the page at the end", flush=True)
    run(
        "training.main", "--config", RECIPES[options.recipe], "--name", options.recipe,
        "--output-dir", options.output_dir, "--overwrite", *options.further,
    )  # fmt: skip
    run("prolip.report", str(folder))
    minutes = (time.perf_counter() - start) / 60
    print(f"\ndone in {minutes:.1f} minutes. Open {folder / 'report.html'} in a browser.")
    print(f"The model: prolip.create_model('local-dir:{Path(options.output_dir) / options.recipe / 'model'}')")


if __name__ == "__main__":
    main()
