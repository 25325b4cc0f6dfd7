"""The processes of the training loader: their signals, what they share with the parent, and reports of their ends."""

from __future__ import annotations

import contextlib
import multiprocessing.queues
import os
import signal
import time
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from prolip.utils.console import say


def start_worker(_: int) -> None:
    """A worker's settings: torch runs on one thread there by itself, tokenizers must not start threads after a fork."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # A stop signal, Ctrl-C above all, often goes to the whole group of processes. The run then still finishes its step
    # and saves, and for that it needs its workers; they end when they are told to, or find their parent gone.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    queue: Any = multiprocessing.queues.Queue
    queue._on_queue_feeder_error = staticmethod(end_worker)


def end_worker(error: Exception, _: Any) -> None:
    """End a worker that cannot hand on a chunk: Python's queue would drop it, and the run wait for it for ever."""
    say(f"a worker of the data loader cannot hand on its samples: {type(error).__name__}: {error}")
    os._exit(1)


def hand_on(chunk: Any) -> Any:
    """The collate function of a dataset that yields whole chunks: their tensors in shared memory, where they would get
    only behind the worker's back, and what goes wrong would not reach the parent.
    """
    for value in chunk.values():
        if isinstance(value, Tensor):
            value.share_memory_()
    return chunk


def raise_file_limit() -> None:
    """Let this process, and the workers that it starts, open as many files as its hard limit allows.

    Every tensor that waits between a worker and this process is an open file: workers x chunks ahead x 2, or x 4 with
    known matches, of which the usual soft limit of 1,024 is soon reached.
    """
    try:
        import resource
    except ImportError:  # Windows shares tensors without file descriptors
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # A system may name no hard limit and still refuse a soft one without end.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def lost_worker(error: Exception, workers: DataLoader | None) -> str | None:
    """In torch's words, which worker ended by which signal, where that is what an error came of.

    One that is killed while it hands on a chunk closes its end of the connection before it counts as dead. Torch names
    the signal only where its handler of SIGCHLD raised; where the fetch found a worker dead, it names the pid alone.
    """
    of_worker = isinstance(error, (EOFError, OSError)) or str(error).startswith("DataLoader worker (pid(s) ")
    if workers is None or not of_worker or "Caught " in str(error):
        return None
    iterator: Any = workers._iterator
    for _ in range(20):
        for worker in iterator._workers:
            if worker.exitcode is not None:
                how = signal.strsignal(-worker.exitcode) if worker.exitcode < 0 else None
                end = f"is killed by signal: {how}." if how else "exited unexpectedly"
                return f"DataLoader worker (pid {worker.pid}) {end}"
        time.sleep(0.1)
    return None
