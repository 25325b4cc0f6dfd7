"""Runs of training.main and of scripts, forked from one process which has loaded all: a second each instead of six."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

SERVER = """
import json, os, resource, signal, socket, sys
import sklearn.metrics, torch.distributed.fsdp, torch.utils.tensorboard
import prolip.corpora.emoji.report.page, training.evaluate, training.loop, training.main, training.run
from prolip.methods import METHODS, find_method
from prolip.utils import console
from training.health.signals import STOP


def take_streams(order):
    for number, where in ((1, order["out"]), (2, order["err"])):
        if where == "closed":  # as Python has it when it begins with one
            os.close(number)
            setattr(sys, console.NAMES[number], None)
        elif where.startswith("head:"):  # a reader that ends after its first bytes
            reading, writing = os.pipe()
            if os.fork() == 0:
                os.close(writing)
                os.read(reading, int(where[5:]))
                os._exit(0)
            os.dup2(writing, number)
            os.close(reading), os.close(writing)
        elif where == "same":
            os.dup2(1, number)
        else:
            os.dup2(os.open(where, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)

def join(rank, ranks, port):  # as torchrun does
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}

def fork(order, rank=0, port=0):
    pid = os.fork()
    if pid == 0:
        os.setsid()
        if order["ranks"] > 1:
            join(rank, order["ranks"], port)
        take_streams(order)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if the tests run under nohup or with `&`
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        for name in order["ignored"]:
            signal.signal(getattr(signal, name), signal.SIG_IGN)
        console.guard()
        STOP.install()
        exec(order["before"], globals())
        sys.exit(training.main.main(order["words"]))
    return pid

for name in METHODS:
    find_method(name)
for line in sys.stdin:
    order = json.loads(line)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pids = [fork(order, rank, port) for rank in range(order["ranks"])]
    print(*pids, flush=True)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    print(next((code for code in codes if code), 0), flush=True)
"""


class Forked:
    """One run at a time: `start`, perhaps `send`, then `end` for its exit code, of several ranks the first that failed.

    It does not run torchrun, which needs two more processes, and whose ranks import everything again.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        environment |= {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        words, pipe = [sys.executable, "-c", SERVER], subprocess.PIPE
        self.server = subprocess.Popen(words, cwd=ROOT, env=environment, text=True, stdin=pipe, stdout=pipe)
        self.pids: list[int] = []
        self.under_way = False

    def start(
        self, *words: Any, ranks: int = 1, before: str = "", ignored: tuple[str, ...] = (), out: str = "", err: str = ""
    ) -> None:
        """Begin a run. before: source that each rank executes first; out, err: a path, closed, same, head:BYTES."""
        if self.under_way:  # of a test that failed
            self.send(signal.SIGKILL)
            self.end()
        for name in ("out", "err"):
            (self.folder / name).unlink(missing_ok=True)
        order = {
            "words": [str(word) for word in words],
            "ranks": ranks,
            "before": before,
            "ignored": ignored,
            "out": out or str(self.folder / "out"),
            "err": err or str(self.folder / "err"),
        }
        assert self.server.stdin and self.server.stdout
        self.server.stdin.write(json.dumps(order) + "\n")
        self.server.stdin.flush()
        self.pids = [int(word) for word in self.server.stdout.readline().split()]
        self.under_way = True

    @property
    def pid(self) -> int:
        """Process id of the run, or of its first rank."""
        return self.pids[0]

    def end(self) -> int:
        """The exit code; minus the signal that killed it."""
        assert self.server.stdout
        code = int(self.server.stdout.readline())
        self.under_way = False
        return code

    def run(self, *words: Any, **settings: Any) -> int:
        self.start(*words, **settings)
        return self.end()

    def script(self, path: Path, *words: Any, **settings: Any) -> int:
        """Run a program other than training.main, with these words; it can import modules next to it."""
        argv = [str(path), *map(str, words)]
        code = (
            f"import runpy; sys.argv = {argv!r}; sys.path.insert(0, {str(path.parent)!r});"
            f" runpy.run_path({argv[0]!r}, run_name='__main__'); sys.exit(0)"
        )
        return self.run(before=code, **settings)

    def send(self, number: int) -> None:
        """A signal to the run and all its workers, as a terminal sends it; to all ranks."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, number)

    def workers(self, rank: int = 0) -> list[int]:
        """Process ids of the loader's workers."""
        listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(self.pids[rank])], capture_output=True, text=True)
        return [int(word) for word in listed.stdout.split()]

    @property
    def out(self) -> str:
        return (self.folder / "out").read_text() if (self.folder / "out").exists() else ""

    @property
    def err(self) -> str:
        return (self.folder / "err").read_text() if (self.folder / "err").exists() else ""

    def close(self) -> None:
        assert self.server.stdin
        self.server.stdin.close()
        try:
            self.server.wait(10)
        except subprocess.TimeoutExpired:
            self.send(signal.SIGKILL)
            self.server.kill()


def until(condition: Callable[[], object], seconds: float = 60) -> None:
    """Wait for it."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.002)


def one_thread() -> None:
    """Limit a fork to one thread: it has none of the threads that OpenMP would wait for."""
    import faiss
    import torch

    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
