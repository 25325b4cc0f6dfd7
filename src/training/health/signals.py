"""Signals that ask a run to stop, handled before torch is imported; and stacks of a run that stands still."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from prolip.utils.console import EXIT_INTERRUPTED, say

#: Sent by SLURM and torchrun before they kill, by Ctrl-C, and by a terminal that closes.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
EXIT_STOPPED = 75  # exit code of a run that stopped on request and can be resumed: EX_TEMPFAIL of sysexits.h
#: Seconds within which a second SIGINT is the first one: some launchers send it to a process and to its group.
SAME = 0.5
#: True of any run at any moment, while `latest` is refused where there is no checkpoint.
WAY_ON = "--resume auto (with its --name) goes on from the newest checkpoint, or from the start if there is none"


class Stopped(Exception):
    """A run ended on request, with a checkpoint to resume from. folder: the run's."""

    def __init__(self, message: str, folder: Path):
        super().__init__(message)
        self.folder = folder


class StopSignal:
    """The first stop signal that this process received, 0 for none. A second SIGINT ends the process at once."""

    def __init__(self) -> None:
        self.number = 0
        self.time = 0.0
        self.ended = False  # the run, so that there is nothing to stop
        self.last_words: Callable[[], None] = lambda: None  # writes a status before the process ends at once
        self.before: dict[int, Any] = {}

    def install(self) -> None:
        """Handle the signals from now on; only the main thread may do this."""
        self.ended = False
        for number in SIGNALS:
            # `nohup`, and a shell's `&` in a script, have signals ignored; a rank has only its torchrun to tell it
            ignored = number in (signal.SIGINT, signal.SIGHUP) and signal.getsignal(number) is signal.SIG_IGN
            if under_torchrun() or not ignored:
                self.before[number] = signal.signal(number, self._note)

    def release(self) -> None:
        """Restore the former handlers, in a process that does more than the run."""
        while self.before:
            signal.signal(*self.before.popitem())

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.ended:
            if number == signal.SIGINT:
                self._leave("SIGINT: left at once, behind the end of the run")
        elif not self.number:
            self.number, self.time = number, time.monotonic()
            # a second Ctrl-C ends torchrun itself, and its ranks by SIGTERM
            twice = number == signal.SIGINT and not under_torchrun()
            again = "; once more, and it leaves at once" if twice else ""
            say(f"{signal.Signals(number).name} received: the run will finish its step, save and stop{again}")
        elif number == signal.SIGINT and time.monotonic() - self.time > SAME:
            self._leave(f"SIGINT again: left at once; {WAY_ON}")

    def _leave(self, words: str) -> None:
        """End without unwinding: other ranks, threads and workers could each keep the process waiting."""
        say(words)
        with contextlib.suppress(Exception):
            self.last_words()
        os._exit(EXIT_INTERRUPTED)


STOP = StopSignal()  # the one of this process


def under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


class Watchdog:
    """Prints the stacks of all threads of a rank when no step ends for `patience` seconds (0: never), once per
    standstill; a rank that goes on says for how long it stood still.
    """

    def __init__(self, patience: float, rank: int = 0):
        self.patience, self.rank, self.pauses, self.last = patience, rank, 0, 0.0
        self.arm()

    def arm(self) -> None:
        """Wait from now on; outside of pauses."""
        self.last = time.monotonic()
        if self.patience and not self.pauses:  # by a thread in C, which prints even if Python is stuck
            with contextlib.suppress(OSError, ValueError):  # a stream that is closed
                faulthandler.dump_traceback_later(self.patience, file=sys.__stderr__ or 2)

    def beat(self, step: int) -> None:
        """Step `step` has ended."""
        if self.patience and (still := time.monotonic() - self.last) > self.patience and not self.pauses:
            say(f"warning: rank {self.rank} stood still for {still:.0f} s before step {step}; its stacks are above")
        self.arm()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Expect no step while this lasts: evaluations, last writes."""
        self.pauses += 1
        self.close()
        try:
            yield
        finally:
            self.pauses -= 1
            self.arm()

    def close(self) -> None:
        """Stop waiting."""
        faulthandler.cancel_dump_traceback_later()
