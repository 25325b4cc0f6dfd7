"""Streams that close during a process: it continues, reports this once if it can, and its exit code stays its own."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from prolip.cli import main as cli
from prolip.models.checkpoint import CheckpointError
from prolip.utils import console

ROOT = Path(__file__).parents[3]
STATES = ["whole", "closed", "full", "gone", "leaving", "read-only", "slow"]


class Case:
    """A forked process with this stdout and stderr, which prints `count` lines on either and leaves with 7."""

    def __init__(self, folder: Path, out: str, err: str, same: bool, count: int) -> None:
        self.folder, self.states, self.count = folder, {1: out, 2: "same" if same else err}, count
        self.readers: list[int] = []

    def run(self) -> int:
        """The process's exit code; minus the signal that it was killed by."""
        pid = os.fork()
        if pid == 0:
            code = 99
            try:
                self.child()
                code = 7
            finally:
                os._exit(code)
        deadline = time.monotonic() + 20
        while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.001)
        return os.waitstatus_to_exitcode(ended[1])

    def child(self) -> None:
        for number, state in sorted(self.states.items(), key=lambda item: item[1] == "closed"):  # or it is opened again
            self.open(number, state)
        console.lost.clear()
        console.guard()
        (self.folder / "opened").write_text("no file of the process takes the place of a closed stream")
        for line in range(self.count):
            print(f"line {line} ✓ \udcff", flush=line % 3 == 0)
            print(f"remark {line}", file=sys.stderr)
        os.fstat(1), os.fstat(2)  # what is not Python's own output finds files there
        sys.stdout.flush(), sys.stderr.flush()
        (self.folder / "lost").write_text(" ".join(sorted(console.lost)))

    def open(self, number: int, state: str) -> None:
        name = console.NAMES[number]
        if state == "closed":
            os.close(number)
            setattr(sys, name, None)
            return
        setattr(sys, name, os.fdopen(number, "w", encoding="ascii", closefd=False))
        if state == "same":
            os.dup2(1, number)
        elif state in ("gone", "leaving", "slow"):
            reading, writing = os.pipe()
            if os.fork() == 0:
                os.close(writing)
                self.read(reading, state)
            os.close(reading)
            os.set_blocking(writing, state != "slow")
            os.dup2(writing, number)
            os.close(writing)
        else:
            path = {"whole": self.folder / name, "full": "/dev/full", "read-only": "/dev/null"}[state]
            mode = os.O_RDONLY if state == "read-only" else os.O_WRONLY | os.O_CREAT | os.O_APPEND
            os.dup2(os.open(path, mode), number)

    def read(self, reading: int, state: str) -> None:
        """A reader that ends at once or after some bytes, or is slower than what a non-blocking pipe holds."""
        if state == "leaving":
            os.read(reading, 40)
        while state == "slow" and os.read(reading, 1 << 14):
            time.sleep(0.0002)
        os._exit(0)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))])
def test_a_process_outlives_its_streams(tmp_path, seed):
    """Fifteen cases by seed."""
    rng = random.Random(seed)
    for number in range(15):
        folder = tmp_path / str(number)
        folder.mkdir()
        out, err, count = rng.choice(STATES), rng.choice(STATES), rng.choice([1, 40, 4000])
        same = out != "closed" and rng.random() < 0.2
        assert Case(folder, out, err, same, count).run() == 7, (out, err, same, count)
        assert (folder / "opened").read_text().startswith("no file of the process")
        lost = (folder / "lost").read_text().split()
        for name, state in (("stdout", out), ("stderr", out if same else err)):
            if state in ("full", "read-only"):
                assert name in lost, (out, err, same, count)
            if state in ("whole", "closed", "slow"):
                assert name not in lost, (out, err, same, count)
        if out == "whole":
            lines = (folder / "stdout").read_text().splitlines()
            assert [line for line in lines if line.startswith("line")][-1] == f"line {count - 1} \\u2713 \\udcff"
            reported = [line for line in lines if line.startswith("warning: stderr cannot be written")]
            assert len(reported) == (not same and "stderr" in lost)


def run(*words: str, line: str = '"$@"') -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = ["bash", "-c", line, "bash", sys.executable, *words]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


PRINTS = "from prolip.utils import console\nconsole.command(lambda: print('x\\n' * 100_000) or {code})"


@pytest.mark.parametrize(
    "line, code, ended",
    [
        ('"$@" | head -n 1; exit ${PIPESTATUS[0]}', 0, 0),
        ('"$@" | head -n 1; exit ${PIPESTATUS[0]}', 3, 3),
        ('"$@" > /dev/full', 0, 74),
        ('"$@" > /dev/full', 3, 3),
        ('"$@" >&- 2>&-', 0, 0),
    ],
)
def test_a_command_ends_quietly_with_its_reader_and_not_well_without_room(line, code, ended):
    done = run("-c", PRINTS.format(code=code), line=line)
    assert done.returncode == ended and "Traceback" not in done.stderr and done.stderr.count("\n") <= 1


@pytest.fixture
def raising(monkeypatch):
    """`prolip` with a command that raises these errors, one a call, and returns 5 without."""

    def main(*raised):
        left = list(raised)

        def run(words):
            print("https://u:SECRET@h/x?id=3")
            if error := left.pop(0):
                raise error
            return 5

        monkeypatch.setattr(cli, "run", run)
        return [cli.main([]) for _ in raised]

    return main


def test_what_a_user_can_mend_ends_in_one_line_and_other_errors_do_not(raising, capsys):
    assert raising(ValueError("no such thing"), CheckpointError("a key"), None) == [2, 2, 5]
    assert capsys.readouterr().err == "error: no such thing\nerror: a key\n"
    with pytest.raises(TypeError, match="of ours"):
        raising(TypeError("a mistake of ours"))


def test_what_is_guarded_is_there_before_torch():
    done = run("-c", "import sys, prolip.utils.console, training.health.signals; print('torch' in sys.modules)")
    assert done.stdout == "False\n", done.stderr


def test_names_from_data_do_not_steer_a_terminal(capsys):
    hostile = "a\x1b]0;x\x07\x1b[31m\x85\u202e\u2028b"
    with console.cleaning():
        print(hostile, "\t✓ 👩‍👩‍👧", end="\r\n")
        sys.stderr.write("\n\n\x1b[A\x1b[A")  # a progress bar's
    printed = capsys.readouterr()
    assert printed.out == "a\\x1b]0;x\\x07\\x1b[31m\\u0085\\u202e\\u2028b \t✓ 👩‍👩‍👧\r\n"
    assert printed.err == "\n\n\x1b[A\x1b[A"
    assert console.plain("a\nb\tc\rd\x1b") == "a\\nb\\tc\\rd\\x1b"


def test_an_error_that_lists_what_differs_keeps_its_lines():
    assert console.one_line(CheckpointError("sizes differ:\n  a\n  b")) == "sizes differ:\n  a\n  b"
