"""Standard output and error that may die without the process: a full disk, a reader that ends, a terminal that is gone.

Nothing heavy is imported here, so that a program can guard its output before it loads torch.
"""
from __future__ import annotations

import contextlib
import errno
import functools
import io
import os
import select
import sys
from collections.abc import Callable
from typing import Any, NoReturn, ParamSpec

P = ParamSpec("P")

#: EX_IOERR of sysexits.h: what a command was asked to print could not be written.
EXIT_LOST = 74
#: As shells count it: ended by SIGINT.
EXIT_INTERRUPTED = 130

NAMES = {1: "stdout", 2: "stderr"}
#: What each stream met when it first could not write, by its name.
lost: dict[str, OSError] = {}


class Undying(io.FileIO):
    """A standard stream's file descriptor; what it cannot take is dropped, which is reported once, on the other stream.

    A later write is tried again: a disk may have room again.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number, "wb", closefd=False)
        self.owner = os.getpid()  # a forked child has the same object, and leaves the telling to its parent

    def write(self, data: Any) -> int:
        """All of `data`, to the descriptor or to nowhere."""
        try:
            while (written := super().write(data)) is None:  # another program made the pipe non-blocking
                select.select([], [self.fileno()], [])
            return written
        except OSError as error:
            name, other = NAMES[self.fileno()], 3 - self.fileno()
            if name not in lost and os.getpid() == self.owner:
                lost[name] = error
                # not by print: it may be in the middle of a line, or find that it is dead, too
                say(f"warning: {name} takes no more ({error}): what goes there is lost, the work goes on", other)
            return memoryview(data).nbytes


def say(text: str, number: int = 2) -> None:
    """A line straight to a standard stream, also from within a signal's handler; nowhere where that is dead."""
    with contextlib.suppress(OSError):
        os.write(number, f"{text}\n".encode(errors="backslashreplace"))


def guard() -> None:
    """Have print, warnings, logs and the flush at the end of the process survive a stdout or stderr that dies.

    A stream that is closed from the start is opened to nowhere, or the next file that is opened would be in its place,
    and what others print be written into it. What cannot be encoded is escaped.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest number that is free: this one
    for number, name in NAMES.items():
        stream = getattr(sys, name)
        if isinstance(getattr(getattr(stream, "buffer", None), "raw", None), Undying):
            continue
        with contextlib.suppress(OSError):
            if stream is not None:
                stream.flush()
        buffer = io.BufferedWriter(Undying(number))
        setattr(sys, name, io.TextIOWrapper(
            buffer, encoding=getattr(stream, "encoding", "utf-8"), errors="backslashreplace",
            line_buffering=number == 2 or os.isatty(number), write_through=getattr(stream, "write_through", False),
        ))  # fmt: skip


def ends_in_one_line(*mistakes: type[Exception]) -> Callable[[Callable[P, int]], Callable[P, int]]:
    """For a command's `main`: these errors, which its user can mend, are a line on stderr and exit code 2."""

    def around(main: Callable[P, int]) -> Callable[P, int]:
        @functools.wraps(main)
        def run(*args: P.args, **kwargs: P.kwargs) -> int:
            try:
                return main(*args, **kwargs)
            except mistakes as error:
                print(f"error: {error.args[0] if isinstance(error, KeyError) else error}", file=sys.stderr)
                return 2

        return run

    return around


def command(main: Callable[[], object]) -> NoReturn:
    """Run a command whose output is what was asked for, and end the process with the exit code that `main` returns.

    Its reader may leave (`| head`); where what it prints could not be written for another reason, the code is not 0.
    """
    guard()
    try:
        code = main()
    except KeyboardInterrupt:
        say("interrupted")
        code = EXIT_INTERRUPTED
    code = code if isinstance(code, int) else 0
    for name in NAMES.values():
        getattr(sys, name).flush()
    cut_off = "stdout" in lost and lost["stdout"].errno != errno.EPIPE
    sys.exit(code or (EXIT_LOST if cut_off else 0))
