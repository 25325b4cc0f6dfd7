"""Signals that ask a run to stop. Noted when they come, acted on between two steps.

This module imports nothing heavy, so that the handlers stand before torch is imported: a signal in those seconds would
otherwise end the process without a word.
"""
from __future__ import annotations

import ctypes
import os
import signal
import sys
from types import FrameType

#: What SLURM and torchrun send before they kill.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
#: Exit code of a run that was asked to stop, and can go on: EX_TEMPFAIL of sysexits.h.
EXIT_STOPPED = 75


class Stopped(Exception):
    """A run that ended on request, behind a checkpoint from which it can go on."""


class StopSignal:
    """The first stop signal that this process received, 0 for none."""

    def __init__(self) -> None:
        self.number = 0

    def install(self) -> None:
        """Take the signals from now on; only the main thread may do this."""
        for number in SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.number:
            self.number = number
            # os.write and not print, which may be in the middle of a line of its own
            text = f"{signal.Signals(number).name} received: the run will finish its step, save and stop\n"
            os.write(2, text.encode())


#: The one of this process.
STOP = StopSignal()

PR_SET_PDEATHSIG = 1


def stop_with_launcher() -> None:
    """Have the kernel send SIGTERM to this rank should its torchrun die (Linux).

    torchrun starts its ranks in sessions of their own. Killed by SIGKILL, it would leave them behind, training on and
    writing into a folder that the next try has taken.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
