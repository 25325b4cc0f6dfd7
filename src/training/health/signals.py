"""Signals that stop a run, handled before torch is imported, and stacks of a run without progress."""

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

#: Sent by SLURM and torchrun before they kill, by Ctrl-C, and by a closing terminal.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
EXIT_STOPPED = 75  # exit code of a run that stopped on request and can be resumed: EX_TEMPFAIL of sysexits.h
#: Seconds within which a second SIGINT counts as the first: some launchers send it to a process and to its group.
SAME = 0.5
#: Valid for every run at any time, while `latest` requires a checkpoint.
WAY_ON = "--resume auto (with its --name) resumes from the newest checkpoint, or starts again if there is none"


class Stopped(Exception):
    """The end of a run on request, with a checkpoint to resume from. folder: of the run."""

    def __init__(self, message: str, folder: Path):
        super().__init__(message)
        self.folder = folder


class StopSignal:
    """The first stop signal that this process received, 0 for none. A second SIGINT ends the process immediately."""

    def __init__(self) -> None:
        self.number = 0
        self.time = 0.0
        self.ended = False  # the run has ended: nothing to stop
        self.last_words: Callable[[], None] = lambda: None  # writes a status before an immediate end
        self.before: dict[int, Any] = {}
        self.again = ""  # the command that resumes a run of another program, such as the demo

    @property
    def way_on(self) -> str:
        """The way to resume the run, for a message."""
        return f"resume with: {self.again}" if self.again else WAY_ON

    def install(self, again: str = "") -> None:
        """Handle the signals from now on; only the main thread may do this. again: as the attribute."""
        self.ended, self.again = False, again
        for number in SIGNALS:
            # `nohup` and `&` in a script ignore signals; a rank receives its signal only from torchrun
            ignored = number in (signal.SIGINT, signal.SIGHUP) and signal.getsignal(number) is signal.SIG_IGN
            if under_torchrun() or not ignored:
                self.before[number] = signal.signal(number, self._note)

    def release(self) -> None:
        """Restore the former handlers, for a process that continues after the run."""
        while self.before:
            signal.signal(*self.before.popitem())

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.ended:
            if number == signal.SIGINT:
                self._leave("SIGINT: stopped immediately, after the end of the run")
        elif not self.number:
            self.number, self.time = number, time.monotonic()
            # a second Ctrl-C ends torchrun itself, and its ranks by SIGTERM
            twice = number == signal.SIGINT and not under_torchrun()
            again = " (press Ctrl-C again to stop immediately)" if twice else ""
            say(f"{signal.Signals(number).name} received: the run will finish its step, save and stop{again}")
        elif number == signal.SIGINT and time.monotonic() - self.time > SAME:
            self._leave(f"SIGINT again: stopped immediately; {self.way_on}")

    def _leave(self, words: str) -> None:
        """Exit without unwinding: other ranks, threads and workers could each block the process."""
        say(words)
        with contextlib.suppress(Exception):
            self.last_words()
        os._exit(EXIT_INTERRUPTED)


STOP = StopSignal()  # the one of this process


def under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


class Watchdog:
    """Printer of the stacks of all threads of a rank if no step ends for `patience` seconds (0: never). When a step
    ends again, it reports the time without progress.
    """

    def __init__(self, patience: float, rank: int = 0):
        self.patience, self.rank, self.pauses, self.last = patience, rank, 0, 0.0
        self.arm()

    def arm(self) -> None:
        """Restart the timer, except in a pause."""
        self.last = time.monotonic()
        if self.patience and not self.pauses:  # by a thread in C, which prints even if Python hangs
            with contextlib.suppress(OSError, ValueError):  # a closed stream
                faulthandler.dump_traceback_later(self.patience, file=sys.__stderr__ or 2)

    def beat(self, step: int) -> None:
        """Record the end of step `step`."""
        if self.patience and (still := time.monotonic() - self.last) > self.patience and not self.pauses:
            say(f"warning: rank {self.rank} made no progress for {still:.0f} s before step {step}; stacks are above")
        self.arm()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Stop the timer during evaluations and last writes."""
        self.pauses += 1
        self.close()
        try:
            yield
        finally:
            self.pauses -= 1
            self.arm()

    def close(self) -> None:
        """Stop the timer."""
        faulthandler.cancel_dump_traceback_later()
