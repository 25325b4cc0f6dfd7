"""Kill a writer after each write, fsync, rename and unlink of one commit: the old or the new state must be left.

A test names an object MODULE:NAME with three functions, of a folder that is theirs alone:

    prepare(folder)   make the old state
    commit(folder)    write the new one
    state(folder)     what a reader finds there, which == compares; an exception is a state of neither kind

`check("commits:file", tmp_path)` then runs them in a process that faults.c watches. Each try is a fork of it, so
that a thousand kills cost no import; several names, MODULE:ONE,OTHER, share the imports too. Run by hand: python
tests/faults.py MODULE:NAME FOLDER [--all].
"""

from __future__ import annotations

import ctypes
import importlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
KINDS = ("write", "fsync", "rename", "unlink")


def check(commit: str, folder: Path, every: bool = False) -> str:
    """Run commits in folders below `folder`, killed after one call of each kind, or after every call; the report.

    AssertionError with the report where a kill or a full disk leaves anything but the old or the new state.
    """
    import pytest

    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs a C compiler and Linux, to watch system calls")
    library = folder / "faults.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-w", "-o", library, HERE / "faults.c", "-ldl"], check=True)
    helpers = sorted(path for path in (HERE / "helpers").iterdir() if path.is_dir())
    rooms = [HERE.parent / "src", HERE, HERE / "prolip", HERE / "training", *helpers]
    paths = os.pathsep.join(map(str, rooms))
    env = os.environ | {"LD_PRELOAD": str(library), "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, str(HERE / "faults.py"), commit, str(folder), *(["--all"] if every else [])]
    done = subprocess.run(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def attempt(
    arm: Callable[..., None], case: Any, work: Path, old: Path, kill: int = 0, full: int = 0
) -> tuple[int, list[str]]:
    """Commit in a fork of this process, on a copy of the old state: how it ended, and its calls."""
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(old, work, symlinks=True)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        code = 1
        try:
            arm(os.fsencode(work), kill, full, write)
            case.commit(work)
            code = 0
        except OSError:
            code = 3
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", flush=True)
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        calls = os.fsdecode(pipe.read()).splitlines()
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), calls


def chosen(calls: list[str], every: bool) -> Iterator[int]:
    """Numbers of the calls that are tried, from 1: the first and the last of each kind, or all."""
    kinds = [call.split(" ", 1)[0] for call in calls]
    some = {kinds.index(kind) for kind in KINDS if kind in kinds}
    some |= {len(kinds) - 1 - kinds[::-1].index(kind) for kind in KINDS if kind in kinds}
    yield from (number + 1 for number in (range(len(calls)) if every else sorted(some)))


def run(case: Any, folder: Path, every: bool) -> int:
    """Try the kills, print what each left; how many left neither state."""
    arm = ctypes.CDLL(None).faults_arm
    old, work = folder / "old", folder / "work"
    old.mkdir(parents=True)
    case.prepare(old)
    before = case.state(old)
    code, calls = attempt(arm, case, work, old)
    after = case.state(work)
    print(f"{len(calls)} calls: " + ", ".join(f"{sum(x.startswith(k) for x in calls)} {k}" for k in KINDS))
    assert code == 0, f"the commit itself failed ({code})"
    assert before != after, "the commit changes nothing that state() sees"
    bad = 0
    writes = [number for number, call in enumerate(calls, 1) if call.startswith("write")]
    full_at = writes if every else writes[:1] + writes[-1:]
    tries = [*((number, 0) for number in chosen(calls, every)), *((0, number) for number in full_at)]
    for kill, full in tries:
        code, _ = attempt(arm, case, work, old, kill, full)
        try:
            found = case.state(work)
            left = "the old state" if found == before else "the new state" if found == after else "NEITHER"
        except Exception as error:
            left = f"NEITHER ({type(error).__name__}: {error})"
        wanted = -signal.SIGKILL if kill else 3
        if code != wanted and (kill or left.startswith("the new") is False):
            left += f", ended with {code}, NEITHER as expected"
        bad += "NEITHER" in left
        print(f"{'killed after' if kill else 'disk full at'} {kill or full} ({calls[(kill or full) - 1]}): {left}")
    return bad


if __name__ == "__main__":
    sys.path.pop(0)  # this folder comes after the others
    module, _, names = sys.argv[1].partition(":")
    bad = 0
    for name in names.split(","):
        print(f"{name}:")
        case = getattr(importlib.import_module(module), name)
        bad += run(case, Path(sys.argv[2]).resolve() / name, "--all" in sys.argv)
    sys.exit(1 if bad else 0)
