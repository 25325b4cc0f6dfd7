"""Train the variants of a sweep file, each with every seed, and print their metrics as one Markdown table.

    python scripts/sweep.py scripts/sweeps/siglip.yaml --output runs/siglip
    python scripts/sweep.py scripts/sweeps/uncertainty.yaml --output runs/uncertainty --only ppcl default

Finished runs are kept, so the same command resumes an interrupted sweep; it refuses runs whose recipe or flags have
changed. --table only prints. --recompute computes the uncertainty metrics again from the runs' saved embeddings.
--jobs 2 trains two runs at a time, each on half the cores: 1.45 times the samples per second on two cores.
A sweep file: recipe (a config of training.main), seeds, flags (of every run), variants (name -> flags) and columns
(heading -> key of eval.json, or [key, factor]). Cells show the mean and half the spread over seeds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from prolip.utils.outputs import replacing


def read_sweep(path: Path) -> dict[str, Any]:
    """Read a sweep file with all keys. SystemExit naming missing or unknown keys, or invalid values."""
    from prolip.utils.documents import read_yaml

    required = {"recipe", "seeds", "flags", "variants", "columns"}
    try:
        sweep = read_yaml(path)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {path} cannot be read ({error}): give a file such as scripts/sweeps/siglip.yaml")
    keys = set(sweep) if isinstance(sweep, dict) else set()
    if keys != required:
        found = ", ".join(sorted(map(str, keys))) or "no keys"
        sys.exit(f"error: {path} has {found}: give {', '.join(sorted(required))}")
    for key, (is_valid, remedy) in FORMS.items():
        if not is_valid(sweep[key]):
            sys.exit(f"error: {path}: {key} is {str(sweep[key])[:80]!r}: give {remedy}")
    return sweep


def is_text(value: Any) -> bool:
    """Return True for None, or a text of flags that a shell can read."""
    try:
        return value is None or (isinstance(value, str) and shlex.split(value) is not None)
    except ValueError:
        return False


def is_name(value: Any) -> bool:
    """Return True if a value can name a run's folder."""
    return isinstance(value, str) and re.fullmatch(r"\w[\w.+-]*", value) is not None


def is_column(value: Any) -> bool:
    """Return True for a key of eval.json, or [key, factor]."""
    pair = isinstance(value, list) and len(value) == 2 and isinstance(value[1], (int, float))
    return isinstance(value[0] if pair else value, str)


# Key of a sweep file -> check of its value, and the remedy in the message.
FORMS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "recipe": (lambda value: isinstance(value, str), "the path of a config of training.main"),
    "seeds": (
        lambda value: (
            isinstance(value, list)
            and bool(value)
            and all(type(seed) is int for seed in value)
            and len(set(value)) == len(value)
        ),
        "a list of different integers",
    ),
    "flags": (is_text, "flags of training.main as one text with closed quotation marks"),
    "variants": (
        lambda value: isinstance(value, dict) and all(map(is_name, value)) and all(map(is_text, value.values())),
        "name -> flags, with names of letters, digits and . _ + - and closed quotation marks",
    ),
    "columns": (
        lambda value: isinstance(value, dict) and all(map(is_column, value.values())),
        "heading -> key of eval.json, or [key, factor]",
    ),
}


def flags_of(sweep: dict[str, Any], variant: str) -> list[str]:
    """Return the flags of training.main of a variant."""
    return shlex.split(f"{sweep['flags'] or ''} {sweep['variants'][variant] or ''}")


def made_of(sweep: dict[str, Any], variant: str) -> str:
    """Return a variant's flags and recipe as text, saved next to the run."""
    recipe = ROOT / sweep["recipe"]
    if not recipe.is_file():
        sys.exit(f"error: recipe {recipe} does not exist: give a config such as scripts/recipes/emoji-demo.yaml")
    return shlex.join(flags_of(sweep, variant)) + "\n" + recipe.read_text(encoding="utf-8")


def train(sweep: dict[str, Any], variant: str, seed: int, folder: Path, threads: int) -> None:
    """Run training.main on `threads` cores, with its output in the run's log. RuntimeError if it fails."""
    flags = flags_of(sweep, variant)
    command = [
        sys.executable,
        "-m",
        "training.main",
        "--config",
        sweep["recipe"],
        "--seed",
        str(seed),
        "--name",
        folder.name,
        "--output",
        str(folder.parent),
        "--overwrite",
        *flags,
    ]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": str(threads),
    }
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = folder.parent / f"{folder.name}.log"
    with replacing(folder.parent / f"{folder.name}.made-of") as temporary:
        temporary.write_text(made_of(sweep, variant), encoding="utf-8")
    print(f"training {folder.name}", file=sys.stderr, flush=True)
    with log.open("w") as out:
        ended = subprocess.run(command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT, check=False)
    if ended.returncode:
        end = log.read_text(encoding="utf-8")[-2000:]
        raise RuntimeError(f"{folder.name} failed with exit code {ended.returncode}; the end of {log}:\n{end}")


def train_all(sweep: dict[str, Any], variants: list[str], folder: Path, jobs: int) -> None:
    """Train every unfinished run, `jobs` at a time. Report failures after all runs have ended."""
    # seed by seed, so that an interrupted sweep has every variant once before one variant three times
    runs = [(variant, seed, folder / f"{variant}-s{seed}") for seed in sweep["seeds"] for variant in variants]
    threads = max(1, len(os.sched_getaffinity(0)) // jobs)
    done = [run for run in runs if (run[2] / "eval.json").exists()]
    for variant, _, run in done:
        kept = run.parent / f"{run.name}.made-of"
        if kept.exists() and kept.read_text(encoding="utf-8") != made_of(sweep, variant):
            sys.exit(f"error: {run} was trained with another recipe or flags: delete it, or give another --output")
    failures: list[RuntimeError] = []

    def train_one(run: tuple[str, int, Path]) -> None:
        try:
            train(sweep, *run, threads)
        except RuntimeError as error:  # the other runs continue
            failures.append(error)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(train_one, [run for run in runs if run not in done]))
    if failures:
        sys.exit("\n".join(f"error: {failure}" for failure in failures))


def recompute(folder: Path) -> None:
    """Compute the uncertainty metrics from the embeddings in `folder`/eval, and write them to its eval.json."""
    from prolip.corpora.emoji import uncertainty
    from prolip.corpora.emoji.result import load

    found = load(folder / "eval")
    if not found.probabilistic:
        return
    metrics = uncertainty.trace_metrics(found)
    finite = {key: value if math.isfinite(value) else None for key, value in metrics.items()}
    written = json.loads((folder / "eval.json").read_text(encoding="utf-8")) | finite
    with replacing(folder / "eval.json") as temporary:
        temporary.write_text(json.dumps(written, indent=2), encoding="utf-8")


def figures_of(folder: Path) -> dict[str, float]:
    """Read eval.json, and training seconds and mean samples per second from the log, if present.

    SystemExit naming an unreadable file, such as one truncated by a kill.
    """
    from prolip.utils.documents import read_json, shown

    try:
        figures = read_json(folder / "eval.json")
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}: delete {folder} and train again")
    wrong = (
        [f"{shown(value)} for {shown(key)}" for key, value in figures.items() if not is_figure(value)]
        if isinstance(figures, dict)
        else ["another type"]
    )
    if wrong:
        sys.exit(
            f"error: {folder / 'eval.json'} has {wrong[0]}, expected name -> number: delete {folder} and train again"
        )
    last: dict[str, float] = {}
    log = folder / "metrics.jsonl"
    for line in log.read_text(encoding="utf-8").splitlines() if log.exists() else []:
        with contextlib.suppress(ValueError):  # truncated by a kill
            row = json.loads(line)
            timed = isinstance(row, dict) and [row.get(name) for name in ("seconds", "samples")]
            last = row if timed and all(is_figure(value) and value for value in timed) else last
    return figures | (
        {"train_seconds": last["seconds"], "samples_per_second": last["samples"] / last["seconds"]} if last else {}
    )


def is_figure(value: Any) -> bool:
    """Return True for a number, or None instead of a non-finite one."""
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))


def cell(values: list[float]) -> str:
    """Format the mean and, of several values, half the difference of the highest and lowest."""
    digits = 1 if abs(statistics.fmean(values)) >= 10 else 3
    text = f"{statistics.fmean(values):.{digits}f}"
    return text if len(values) == 1 else f"{text} ± {(max(values) - min(values)) / 2:.{digits}f}"


def table(sweep: dict[str, Any], folder: Path) -> Iterator[str]:
    """Yield Markdown lines, one row per variant with at least one finished run."""
    yield "| variant | seeds | " + " | ".join(sweep["columns"]) + " |"
    yield "|---|---|" + "---:|" * len(sweep["columns"])
    for variant in sweep["variants"]:
        runs = [folder / f"{variant}-s{seed}" for seed in sweep["seeds"]]
        done = [figures_of(run) for run in runs if (run / "eval.json").exists()]
        if done:
            cells = [column(done, key) for key in sweep["columns"].values()]
            yield f"| {variant} | {len(done)} | " + " | ".join(cells) + " |"


def column(done: list[dict[str, float]], key: str | list) -> str:
    """Format one cell: `key` of every finished run, times an optional factor; a dash if no run has it."""
    name, factor = (key, 1.0) if isinstance(key, str) else key
    values = [figures[name] * factor for figures in done if figures.get(name) is not None]
    return cell(values) if values else "–"


def main() -> None:
    """Train the missing runs, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path, help="sweep file")
    parser.add_argument("--output", type=Path, required=True, help="folder of the sweep's runs")
    parser.add_argument("--only", nargs="+", metavar="VARIANT", help="train only these variants")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (default: %(default)s)")
    parser.add_argument("--recompute", action="store_true", help="compute uncertainty metrics again from embeddings")
    parser.add_argument("--table", action="store_true", help="only print the table of finished runs")
    options = parser.parse_args()
    sweep, folder = read_sweep(options.sweep), options.output.resolve()
    if options.jobs < 1:
        parser.error(f"--jobs {options.jobs}: give 1 or more")
    unknown = set(options.only or ()) - set(sweep["variants"])
    if unknown:
        parser.error(f"no variant {', '.join(sorted(unknown))}: give {', '.join(sweep['variants'])}")
    if not options.table:
        try:
            train_all(sweep, options.only or list(sweep["variants"]), folder, options.jobs)
        except KeyboardInterrupt:
            sys.exit("interrupted: rerun the command to train the missing runs")
    if options.recompute:
        for found in sorted(folder.glob("*/eval.json")):
            recompute(found.parent)
    print("\n".join(table(sweep, folder)))


if __name__ == "__main__":
    from prolip.utils import console

    console.command(main)
