"""Reports when a run stands still, and where: every rank prints the stacks of its threads."""

from __future__ import annotations

import contextlib
import faulthandler
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO


class Watchdog:
    """A thread that waits for `beat`; without one for `patience` seconds it prints all stacks of its process, once per
    standstill. Every rank has its own, so that a hang shows which rank the others wait for.
    """

    def __init__(self, patience: float, rank: int = 0, stream: TextIO | None = None):
        self.patience, self.rank = patience, rank
        self.stream = stream or sys.stderr
        self.last, self.step, self.reported = time.monotonic(), 0, False
        self.paused = 0
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        if patience > 0:
            self.thread.start()

    def beat(self, step: int) -> None:
        """The run has done step `step`."""
        self.last, self.step, self.reported = time.monotonic(), step, False

    @contextmanager
    def pause(self) -> Iterator[None]:
        """While this lasts, there need not be any step: evaluations, last writes."""
        self.paused += 1
        try:
            yield
        finally:
            self.paused -= 1
            self.last = time.monotonic()

    def close(self) -> None:
        """End the thread."""
        self.ended.set()
        if self.thread.is_alive():
            self.thread.join()

    def _watch(self) -> None:
        while not self.ended.wait(min(1.0, self.patience / 4)):
            still = time.monotonic() - self.last
            if still > self.patience and not self.reported and not self.paused:
                self.reported = True
                text = f"warning: rank {self.rank} has stood still for {still:.0f} s behind step {self.step}"
                with contextlib.suppress(OSError, ValueError):  # a stream that is closed or full must not end the watch
                    self.stream.write(f"{text}; its threads:\n")
                    self.stream.flush()
                    faulthandler.dump_traceback(self.stream, all_threads=True)  # does not ask them: they may be in C
