"""The end of .ci/run, with a stand-in for make: pytest's closing line of a failure, and the right exit status."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PASSED = "some tests\n.... [100%]\n1900 passed, 3 skipped, 90 deselected in 900.12s (0:15:00)"
FAILED = "....F [100%]\nFAILED tests/x.py::test_y\n1 failed, 1899 passed in 900.12s (0:15:00)"
SETTINGS = "SSE, 1 thread, ATen default: 500 passed in 20.10s\nAVX2, 1 thread, ATen default: 500 passed in 21.00s"
ONE_FAILED = f"F...\n1 failed, 499 passed in 20.50s\nSSE, 1 thread: 1 failed, 499 passed in 20.50s\n{SETTINGS}"


LATE = "the tests {}did not end"
#: What the targets of make end with -> the status, and the last line.
CASES = {
    "all passed": ({}, 0, PASSED),
    "tests": ({"test": (2, FAILED)}, 2, FAILED),
    "arithmetic": ({"test_numerics": (2, ONE_FAILED)}, 2, "1 failed, 499 passed in 20.50s"),
    "arithmetic too slow": ({"test_numerics": (124, SETTINGS)}, 124, LATE.format("of arithmetic ")),
    "lint": ({"lint": (1, "E501")}, 1, PASSED),
}


def run(folder: Path, **outcomes: tuple[int, str]) -> tuple[int, list[str]]:
    """.ci/run in a folder of its own, with what each target of make writes and how it ends."""
    tools = folder / "tools"
    for file in (tools / "make", tools / "slurmctld", folder / ".venv/bin/python"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text('#!/bin/sh\ncat "$OUTCOMES/$1"\nexit "$(cat "$OUTCOMES/$1.status")"\n')
        file.chmod(0o755)
    fine = {
        "lint": (0, "All checks passed!"),
        "test": (0, PASSED),
        "test_numerics": (0, SETTINGS),
        "test_slurm": (0, "5 passed, 4 deselected in 200.00s (0:03:20)"),
        "test_lowest": (0, "1800 passed, 9 skipped in 600.00s (0:10:00)"),
    }
    for target, (status, text) in {**fine, **outcomes}.items():
        name = target.replace("_", "-")
        (folder / name).write_text(text + "\n")
        (folder / f"{name}.status").write_text(str(status))
    (folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", folder / ".ci/run")
    env = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "OUTCOMES": str(folder)}
    done = subprocess.run([folder / ".ci/run"], env=env, stdout=subprocess.PIPE, text=True, timeout=60)
    return done.returncode, done.stdout.splitlines()


@pytest.mark.skipif(not (ROOT / ".ci/run").exists(), reason="an unpacked release has no .ci")
@pytest.mark.parametrize("outcomes, status, closing", CASES.values(), ids=CASES)
def test_the_last_line_is_that_of_what_failed(tmp_path, outcomes, status, closing):
    code, lines = run(tmp_path, **outcomes)
    assert code == status
    assert lines[-1] == closing.splitlines()[-1]
    assert lines[-2] == "lint and tests: " + (f"FAILED ({status})" if status else "passed")
    said = outcomes.get("test_numerics", (0, SETTINGS))[1]
    assert all(line in lines for line in said.splitlines())  # one per setting, to be read
