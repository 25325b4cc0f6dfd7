"""Signals that ask a run to stop. Noted when they come, acted on between two steps.

Nothing heavy is imported here: in the seconds of importing torch a signal would end the process without a word.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from prolip.utils.console import EXIT_INTERRUPTED, say

#: What SLURM and torchrun send before they kill; Ctrl-C; a terminal that is closed.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
#: Exit code of a run that was asked to stop, and can go on: EX_TEMPFAIL of sysexits.h.
EXIT_STOPPED = 75
#: Seconds within which a second SIGINT is the first one: some launchers send it to a process and to its group.
SAME = 0.5
#: True of any run at any moment, while `latest` is refused where there is no checkpoint.
WAY_ON = "--resume auto (with its --name) goes on from the newest checkpoint, or from the start if there is none"


class Stopped(Exception):
    """A run that ended on request, behind a checkpoint from which it can go on. folder: the run's."""

    def __init__(self, message: str, folder: Path):
        super().__init__(message)
        self.folder = folder


class StopSignal:
    """The first stop signal that this process received, 0 for none. A second SIGINT ends the process at once.

    last_words: called before that, to leave a status. ended: the run has, and there is nothing to stop any more.
    """

    def __init__(self) -> None:
        self.number = 0
        self.time = 0.0
        self.ended = False
        self.last_words: Callable[[], None] = lambda: None
        self.before: dict[int, Any] = {}

    def install(self) -> None:
        """Take the signals from now on; only the main thread may do this."""
        self.ended = False
        for number in SIGNALS:
            # what is ignored at the start stays so: `nohup` wants that, and a shell's `&` in a script; but not in a
            # rank, which has its torchrun alone to hear of it, and is killed next
            ignored = number in (signal.SIGINT, signal.SIGHUP) and signal.getsignal(number) is signal.SIG_IGN
            if under_torchrun() or not ignored:
                self.before[number] = signal.signal(number, self._note)

    def release(self) -> None:
        """Leave the signals to those who had them, for a process that has more to do than the run."""
        while self.before:
            signal.signal(*self.before.popitem())

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.ended:
            if number == signal.SIGINT:
                self._leave("SIGINT: left at once, behind the end of the run")
        elif not self.number:
            self.number, self.time = number, time.monotonic()
            # torchrun's second Ctrl-C ends torchrun itself, of which its ranks hear by SIGTERM
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


#: The one of this process.
STOP = StopSignal()

PR_SET_PDEATHSIG = 1


def under_torchrun() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def stop_with_launcher() -> None:
    """Have the kernel send SIGTERM to this rank should its torchrun die (Linux).

    torchrun starts its ranks in sessions of their own. Killed by SIGKILL, it would leave them behind, training on and
    writing into a folder that the next try has taken.
    """
    if under_torchrun() and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
