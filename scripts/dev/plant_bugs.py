"""Do the default tests find a bug? Plant plausible bugs in a copy of HEAD, one at a time, and run the tests.

    python scripts/dev/plant_bugs.py                              the bugs of planted_bugs.txt
    python scripts/dev/plant_bugs.py --drawn 20 --since COMMIT    drawn from the lines changed since a commit
    python scripts/dev/plant_bugs.py --only 3 17                  some of them, by number

The tests of the module's own folder run first and, if they pass, all default tests. Drawing needs `pip install
cosmic-ray`, whose operators change the code. Exit code 1 if the text of a listed bug is no longer in the source.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
TESTS = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--numprocesses", "2", "--dist", "loadfile"]


class Bug(NamedTuple):
    """A plausible mistake: text of a module, and its replacement."""

    area: str
    path: str
    name: str
    old: str
    new: str


def read_bugs() -> list[Bug]:
    """Read the bugs of planted_bugs.txt."""
    text = (ROOT / "scripts/dev/planted_bugs.txt").read_text(encoding="utf-8")
    return [Bug(*found) for found in re.findall(r"^(\w+) (src/\S+): (.+)\n-(.+)\n\+(.*)$", text, re.M)]


def main(words: list[str] | None = None) -> int:
    """Plant, test and report, as described above."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", type=int, help="numbers of bugs")
    parser.add_argument("--drawn", type=int, default=0, help="plant N drawn bugs instead of the listed ones")
    parser.add_argument("--since", default="HEAD~1", help="commit; draw bugs in lines changed since")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--list", action="store_true", help="show the bugs and test nothing")
    args = parser.parse_args(words)
    bugs = draw(args.drawn, args.since, args.seed) if args.drawn else read_bugs()
    files = {path: path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py")}
    if gone := [bug.name for bug in bugs if files.get(ROOT / bug.path, "").count(bug.old) != 1]:
        print("error: the text of these bugs must occur once in the source: " + "; ".join(gone), file=sys.stderr)
        return 1
    chosen = {n: bug for n, bug in enumerate(bugs, 1) if not args.only or n in args.only}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        subprocess.run(["git", "-C", ROOT, "worktree", "add", "-q", "--detach", copy, "HEAD"], check=True)
        try:
            failed = sum(report(n, bug, copy, args.list) for n, bug in chosen.items())
        finally:
            subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", copy], check=False)
    if not args.list:
        print(f"{failed} of {len(chosen)} bugs fail the default tests")
    return 0


def report(number: int, bug: Bug, copy: Path, only_list: bool) -> bool:
    """Plant one bug, print the result of the tests, and return whether one failed."""
    print(f"{number:3} {bug.area:9} {bug.path.removeprefix('src/')}: {bug.name}", flush=True)
    if only_list:
        return False
    began = time.monotonic()
    path = copy / bug.path
    sound = path.read_text(encoding="utf-8")
    path.write_text(sound.replace(bug.old, bug.new), encoding="utf-8")
    try:
        failing = first_failure(copy, nearby(bug.path, copy)) or first_failure(copy, [])
    finally:
        path.write_text(sound, encoding="utf-8")
    print(f"    {failing or 'NO TEST FAILED'} ({time.monotonic() - began:.0f} s)", flush=True)
    return bool(failing)


def nearby(path: str, copy: Path) -> list[str]:
    """Return the test folder that mirrors a module's, or the nearest parent that exists; core for central modules."""
    folder = Path("tests", *Path(path).parts[1:-1])
    folder = folder / "core" if folder.name == "prolip" else folder
    while not any((copy / folder).rglob("test_*.py")):
        folder = folder.parent
    return [str(folder)]


def first_failure(copy: Path, tests: list[str]) -> str:
    """Return the first test that fails, or an empty text."""
    done = subprocess.run(
        [sys.executable, *TESTS, *tests], cwd=copy, env=environment(copy), capture_output=True, text=True
    )
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return failed[1] if failed else "" if done.returncode == 0 else f"pytest ended with {done.returncode}"


def environment(copy: Path) -> dict[str, str]:
    """Return this environment, with the modules of the copy first."""
    return os.environ | {"PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": "1"}


def draw(count: int, since: str, seed: int) -> list[Bug]:
    """Draw mutations of changed lines, at most one per module, by the operators of cosmic-ray."""
    from cosmic_ray import plugins
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.mutating import mutate_code

    rng = random.Random(seed)
    changed = changed_lines(since)
    paths = sorted(changed)
    rng.shuffle(paths)
    # VariableReplacer and VariableInserter need arguments; decorators are mostly properties and caches.
    names = [x for x in plugins.operator_names() if not re.search("Variable|RemoveDecorator", x)]
    bugs: list[Bug] = []
    for path in paths:
        if len(bugs) == count:
            break
        code = (ROOT / path).read_text(encoding="utf-8")
        lines = changed[path] - idle_lines(code)
        places = []
        for name in names:
            operator = plugins.get_operator(name)()
            found = [place for node in ast_nodes(get_ast(code)) for place in operator.mutation_positions(node)]
            places += [(name, n, start[0]) for n, (start, end) in enumerate(found) if start[0] in lines]
        if not places:
            continue
        name, occurrence, line = rng.choice(places)
        mutated = mutate_code(code, plugins.get_operator(name)(), occurrence)
        if mutated and mutated != code:
            what = f"{name.removeprefix('core/')}: {mutated.splitlines()[line - 1].strip()}"
            bugs.append(Bug(f"line {line}", path, what, code, mutated))
    return bugs


def changed_lines(since: str) -> dict[str, set[int]]:
    """Return the lines of modules in src that a commit did not have, by path."""
    command = ["git", "-C", str(ROOT), "diff", "--unified=0", "--find-renames", since, "HEAD", "--", "src/*.py"]
    lines: dict[str, set[int]] = {}
    for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines():
        if line.startswith("+++ b/"):
            path = line[6:]
        elif hunk := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            first, count = int(hunk[1]), int(hunk[2] or 1)
            lines.setdefault(path, set()).update(range(first, first + count))
    return {path: found for path, found in lines.items() if found}


def idle_lines(code: str) -> set[int]:
    """Return lines in which a mutation has no effect: annotations, imports, docstrings."""
    idle: set[int] = set()
    for node in ast.walk(ast.parse(code)):
        parts: list[ast.expr | ast.stmt | None] = []
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            parts = [node.returns, *(arg.annotation for arg in ast.walk(node.args) if isinstance(arg, ast.arg))]
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            parts = [node]
        elif isinstance(node, ast.AnnAssign):
            parts = [node.annotation]
        for part in parts:
            if part is not None:
                idle.update(range(part.lineno, (part.end_lineno or part.lineno) + 1))
    return idle


if __name__ == "__main__":
    sys.exit(main())
