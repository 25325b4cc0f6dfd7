"""Does a change keep every number? The script trains and evaluates with two commits, and compares bit for bit.

    python scripts/dev/compare_commits.py main~20 main
    python scripts/dev/compare_commits.py main~20 main --model runs/demo/model     evaluate this model instead

It runs the demo's recipe in one process, in two ranks, with every other method, and as a run that the first commit
begins and the second resumes. Then it evaluates one saved model on the corpus, both kinds of its tasks and
clip_benchmark. Losses, parameters and metrics must be equal; else the exit code is 1. Metrics may be summed in another
order: for differences below 1e-14 the largest is printed. Additional output of the second commit is no difference. Each
commit runs its own `src` and `scripts`. If only the second commit has versions of random numbers, it uses version 1, so
that this change hides no other one. The tables RENAMED_... list flags, keys and files with different names.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
#: Current name -> former name. The code below uses the current one; a commit without it gets the former one.
#: To add one, write the new name in the code below, and here the new with the old name, such as
#: {"--similarity": "--score"}, {"aurc": "area"}, {"eval.json": "evaluation.json"} or {"training.main": "training"}.
RENAMED_FLAGS: dict[str, str] = {}
#: Keys of JSON, whole or the part between slashes.
RENAMED_KEYS: dict[str, str] = {}
#: Output files of runs and evaluations, and recipes.
RENAMED_FILES: dict[str, str] = {}
#: Modules that the script runs.
RENAMED_MODULES: dict[str, str] = {}
RECIPE = [
    "--config",
    "scripts/recipes/emoji-demo.yaml",
    "--warmup",
    "5",
    "--log-every-n-steps",
    "1",
    "--save-frequency",
    "0",
    "--ledger",
]
CORPUS = ["--data", "data/emoji/emojione.tar"]
NAMES = ["--names", "data/emoji/noto.tar", "--select", "group=food drink|travel places; subgroup!=time"]
#: Parts of the output that depend on the time and the machine.
PASSING = {
    "samples_per_second",
    "data_wait",
    "memory_gib",
    "seconds",
    "date",
    "machine",
    "software",
    "source",
    "fingerprint",
    "task",
}  # the last two also depend on the code

#: Outputs that may differ in the last digits, and by how much.
METRICS, ROUNDING = {"evaluation", "corpus", "tasks", "clip_benchmark emoji", "clip_benchmark subgroups"}, 1e-14


class Commit:
    """A commit in a folder of its own."""

    def __init__(self, name: str, folder: Path):
        self.name, self.folder = name, folder
        self.flags: list[str] = []
        done = subprocess.run(
            ["git", "-C", ROOT, "worktree", "add", "--quiet", "--detach", folder, name], capture_output=True, text=True
        )
        if done.returncode:
            sys.exit(f"error: cannot check out {name}: {done.stderr.strip()}")

    def run(self, *words: object) -> None:
        """Run a Python command in the commit's folder, with its names. SystemExit if it fails."""
        environment = os.environ | {"PYTHONPATH": str(self.folder / "src"), "OMP_NUM_THREADS": "2"}
        command = [sys.executable, *(self.spelled(str(word)) for word in words)]
        done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True)
        if done.returncode:
            said = f"{' '.join(command[1:])} ended with {done.returncode}:\n{done.stderr[-2000:]}"
            sys.exit(f"error: {self.name}: {said}")

    def spelled(self, word: str) -> str:
        """Return this commit's name of a flag, module or file."""
        if word in RENAMED_FLAGS and not self.defines(word):
            return RENAMED_FLAGS[word]
        if word in RENAMED_MODULES and not self.has_module(word):
            return RENAMED_MODULES[word]
        if word in RENAMED_FILES and not (self.folder / word).exists():
            return RENAMED_FILES[word]
        return word

    def defines(self, flag: str) -> bool:
        """Return whether its source has a flag, as a string or as a field of settings."""
        field = flag.lstrip("-").replace("-", "_")
        pattern = re.compile(rf"""["']{re.escape(flag)}["']|^\s+{re.escape(field)}\s*:""", re.MULTILINE)
        return any(pattern.search(path.read_text(encoding="utf-8")) for path in (self.folder / "src").rglob("*.py"))

    def has_module(self, name: str) -> bool:
        """Return whether its source has a module."""
        path = self.folder / "src" / name.replace(".", "/")
        return path.with_suffix(".py").exists() or (path / "__main__.py").exists()

    @property
    def output(self) -> str:
        """Return its training flag for the folder of all runs."""
        return "--output-dir" if self.defines("--output-dir") else "--output"

    @property
    def has_versions(self) -> bool:
        """Return whether --draws chooses a version of its random numbers."""
        return self.defines("--draws")

    @property
    def has_verbs(self) -> bool:
        """Return whether it has `prolip VERB`."""
        return self.has_module("prolip.cli.eval") or self.has_module("prolip.cli.main")

    def remove(self) -> None:
        subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", self.folder], check=False)


def train(commit: Commit, out: Path, name: str, *words: object, ranks: int = 1) -> Path:
    """Train the demo's recipe, and return the run's folder."""
    module = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", ranks] if ranks > 1 else []
    commit.run(*module, "-m", "training.main", *RECIPE, *commit.flags, commit.output, out, "--name", name, *words)
    return out / name


def lasting(value: Any) -> Any:
    """Return JSON without the parts in PASSING, with current keys."""
    if isinstance(value, dict):
        today = {todays(key): part for key, part in value.items()}
        return {key: lasting(part) for key, part in today.items() if key not in PASSING}
    return [lasting(part) for part in value] if isinstance(value, list) else value


def todays(key: str) -> str:
    """Return the current name of a JSON key."""
    names = {former: today for today, former in RENAMED_KEYS.items()}
    return names.get(key) or "/".join(names.get(part, part) for part in key.split("/"))


def written(folder: Path, name: str) -> Path:
    """Return a file that a commit wrote, under either name."""
    former = RENAMED_FILES.get(name, name)
    return folder / (name if (folder / name).exists() else former)


def of_run(folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield the output of a run that must not change."""
    lines = written(folder, "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    yield "terms", [lasting(x) for x in map(json.loads, lines) if x["kind"] == "train"]
    yield "samples", written(folder, "ledger/rank_0.jsonl").read_bytes()
    yield "evaluation", lasting(json.loads(written(folder, "eval.json").read_text(encoding="utf-8")))
    yield "parameters", written(folder, "model/model.safetensors").read_bytes()


def of_evaluation(commit: Commit, out: Path, model: Path) -> Iterator[tuple[str, Any]]:
    """Yield the results of every evaluation of a model."""
    given = ["--model", f"local-dir:{model}"]
    if commit.has_verbs:
        drawings, sets_of_tasks, benchmark = (["-m", "prolip", "eval", x] for x in ("emoji", "tasks", "clip-benchmark"))
        data, output = "--data", "--output"
    else:  # before the command `prolip`
        drawings, sets_of_tasks = ["-m", "prolip.evaluation.corpus"], ["-m", "prolip.evaluation"]
        benchmark = ["-m", "prolip.evaluation.clip_benchmark"]
        data, output = "--dataset", "--out"
    commit.run(*drawings, *given, *CORPUS, *NAMES, output, out / "corpus")
    yield "corpus", lasting(json.loads(written(out, "corpus/metrics.json").read_text(encoding="utf-8")))
    for task, write in (("emoji", "write_emoji"), ("subgroups", "write_emoji_classes")):
        if commit.has_verbs:
            classes = ["--classes", "subgroup"] if task == "subgroups" else []
            commit.run("-m", "prolip", "data", "emoji", *CORPUS, *NAMES[2:], *classes, "--output", out / f"wds_{task}")
            continue
        made = f"{write}(read({CORPUS[1:]}).select({NAMES[-1]!r}), {str(out / f'wds_{task}')!r})"
        commit.run("-c", f"from prolip.data.emoji import read; from prolip.evaluation.datasets.emoji import *; {made}")
    sets = [f"wds:{out}/wds_emoji", f"wds:{out}/wds_subgroups"]
    commit.run(
        *sets_of_tasks, *given, data, *sets, "--similarity", "csd", "mean", "--uncertainty", output, out / "tasks.json"
    )
    yield "tasks", lasting(json.loads(written(out, "tasks.json").read_text(encoding="utf-8").replace(str(out), "")))
    commit.run(
        *benchmark,
        "eval",
        *given,
        "--dataset",
        "wds/emoji",
        "wds/subgroups",
        "--dataset_root",
        f"{out}/wds_{{dataset_cleaned}}",
        "--num_workers",
        0,
        "--output",
        f"{out}/{{dataset}}.json",
    )
    for task in ("emoji", "subgroups"):
        yield f"clip_benchmark {task}", lasting(json.loads(next(out.rglob(f"*{task}.json")).read_text())["metrics"])


def compare(title: str, before: Iterator[tuple[str, Any]], after: Iterator[tuple[str, Any]]) -> bool:
    """Return whether all parts are equal, and print a line for each."""
    same = True
    for (part, a), (_, b) in zip(before, after, strict=True):
        gone = sorted(a.keys() - b.keys()) if isinstance(a, dict) else []
        if gone:
            same = False
            kinds = ", ".join(sorted({key.split("/")[0] for key in gone}))
            print(f"{title:<34}{part:<26}GONE: {len(gone)} of {len(a)}: {kinds}", flush=True)
            a = {key: value for key, value in a.items() if key in b}
        apart = 0.0 if a == b else largest_difference(a, b) if part in METRICS else float("inf")
        same &= apart < ROUNDING
        verdict = f"same to {apart:.1e}" if apart < ROUNDING else f"DIFFERENT: {first_difference(a, b)}"
        print(f"{title:<34}{part:<26}{'same' if a == b else verdict}", flush=True)
    return same


def largest_difference(a: Any, b: Any) -> float:
    """Return the largest difference between numbers of two values; infinite if anything else differs or is missing."""
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() <= b.keys():
        return max((largest_difference(a[key], b[key]) for key in a), default=0.0)
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return max((largest_difference(x, y) for x, y in zip(a, b)), default=0.0)
    if isinstance(a, float) and isinstance(b, float):
        return 0.0 if a == b or (a != a and b != b) else abs(a - b)
    return 0.0 if a == b else float("inf")


def first_difference(a: Any, b: Any, place: str = "") -> str:
    """Describe the place where two values differ most."""
    if isinstance(a, dict) and isinstance(b, dict):
        key = max(a, key=lambda key: largest_difference(a[key], b[key]) if key in b else float("inf"))
        return first_difference(a[key], b.get(key), f"{place}/{key}")
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        number = max(range(len(a)), key=lambda n: largest_difference(a[n], b[n]))
        return first_difference(a[number], b[number], f"{place}/{number}")
    if isinstance(a, bytes):
        return f"{len(a):,} bytes and {len(b):,}"
    return f"{place}: {str(a)[:80]} and {str(b)[:80]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--model", type=Path, help="a folder with a saved model (default: that of the first run)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        commits = [Commit(name, root / f"code{number}") for number, name in enumerate((options.before, options.after))]
        if commits[1].has_versions and not commits[0].has_versions:
            commits[1].flags = ["--draws", "1"]
        try:
            sys.exit(0 if all(list(compare_all(commits, root, options))) else 1)
        finally:
            for commit in commits:
                commit.remove()


def compare_all(commits: list[Commit], root: Path, options: argparse.Namespace) -> Iterator[bool]:
    """Yield the result of every comparison in turn."""
    before, after = commits
    outs = [root / "runs0", root / "runs1"]
    steps = ["--max-steps", options.steps]

    def both(title: str, make: Callable[[Commit, Path], Path]) -> bool:
        return compare(title, *(of_run(make(commit, out)) for commit, out in zip(commits, outs)))

    yield both("one process", lambda commit, out: train(commit, out, "one", *steps))
    ranks = ["--batch-size", 64, *steps]
    yield both("two ranks", lambda commit, out: train(commit, out, "two", *ranks, ranks=2))

    def by(method: str) -> Callable[[Commit, Path], Path]:
        return lambda commit, out: train(commit, out, method, "--method", method, *steps)

    for method in ("siglip", "clip"):
        yield both(method, by(method))
    half = ["--lr-scheduler", "const", "--max-steps"]
    whole = train(before, outs[0], "whole", *half, options.steps)
    train(before, outs[1], "half", *half, options.steps // 2)
    halves = train(after, outs[1], "half", *half, options.steps, "--resume", "latest")
    yield compare("begun before, resumed after", of_run(whole), of_run(halves))
    model = (options.model or outs[0] / "one/model").resolve()
    yield compare("evaluated", *(of_evaluation(commit, root / f"eval{n}", model) for n, commit in enumerate(commits)))


if __name__ == "__main__":
    main()
