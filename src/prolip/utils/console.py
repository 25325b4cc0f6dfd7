"""Standard output and error that may die without the process: a full disk, a reader that ends, a terminal that is gone.

What is printed is cleaned: control characters are escaped, and addresses are without secrets.

Nothing heavy is imported here, so that a program can guard its output before it loads torch.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import select
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from prolip.utils import secrecy

#: EX_IOERR of sysexits.h: what a command was asked to print could not be written.
EXIT_LOST = 74
#: As shells count it: ended by SIGINT.
EXIT_INTERRUPTED = 130

NAMES = {1: "stdout", 2: "stderr"}
#: Characters that steer a terminal, reorder a line or cannot be encoded; in one value line ends and tabs do so, too.
STEERING = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
STEERING_A_VALUE = re.compile(rf"{STEERING.pattern}|[\t\n\r]")
#: How a progress bar goes to another line.
MOVES = re.compile(r"(?:\x1b\[A|[\r\n])*")
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
        os.write(number, f"{secrecy.scrub(text)}\n".encode(errors="backslashreplace"))


def escaped(found: re.Match[str]) -> str:
    """A character as Python and JSON write it."""
    code = ord(found[0])
    return {9: r"\t", 10: r"\n", 13: r"\r"}.get(code, f"\\x{code:02x}" if code < 128 else f"\\u{code:04x}")


def plain(value: object) -> str:
    """A name from data as one line: line ends, and what steers a terminal, are escaped."""
    return STEERING_A_VALUE.sub(escaped, str(value))


def one_line(error: object) -> str:
    """What an error says: one line, names from data escaped, but of a class that has `many_lines` as it is."""
    told = str(error.args[0] if isinstance(error, KeyError) and error.args else error)
    return told if getattr(error, "many_lines", False) else plain(told)


class Cleaned:
    """A text stream whose text is cleaned. stream: takes the program's own control sequences."""

    def __init__(self, stream: Any, queries: bool) -> None:
        self.stream, self.queries = stream, queries

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """All of `text`, without what steers a terminal and without secrets."""
        cleaned = text if MOVES.fullmatch(text) else STEERING.sub(escaped, secrecy.scrub(text, self.queries))
        self.stream.write(cleaned)
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Each of the lines as `write` does it."""
        for line in lines:
            self.write(line)


@contextlib.contextmanager
def cleaning() -> Iterator[None]:
    """Clean what is printed while the context lasts. Queries of addresses stay on stdout, where they may be data."""
    streams = {name: getattr(sys, name) for name in NAMES.values()}
    for name, stream in streams.items():
        if stream is not None and not isinstance(stream, Cleaned):
            setattr(sys, name, Cleaned(stream, queries=name == "stderr"))
    try:
        yield
    finally:
        for name, stream in streams.items():
            setattr(sys, name, stream)


def guard() -> None:
    """Have print, warnings, logs and the flush at the end of the process survive a stdout or stderr that dies.

    A stream that is closed from the start is opened to nowhere, or the next file that is opened would be in its place,
    and what others print be written into it. What cannot be encoded is escaped.
    Secrets in the addresses of the command line are never printed.
    """
    secrecy.hide([word.partition("=")[2] if word.startswith("--") and "=" in word else word for word in sys.argv[1:]])
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
        text = io.TextIOWrapper(
            buffer,
            encoding=getattr(stream, "encoding", "utf-8"),
            errors="backslashreplace",
            line_buffering=number == 2 or os.isatty(number),
            write_through=getattr(stream, "write_through", False),
        )
        setattr(sys, name, Cleaned(text, queries=number == 2))


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
    sys.exit(finished(code if isinstance(code, int) else 0))


def finished(code: int) -> int:
    """The exit code of a command that returned `code`, when all that it printed is written, or lost."""
    for name in NAMES.values():
        getattr(sys, name).flush()
    cut_off = "stdout" in lost and lost["stdout"].errno != errno.EPIPE
    return code or (EXIT_LOST if cut_off else 0)
