"""Standard output and error without secrets, which may fail without ending the process. Light imports."""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import re
import select
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from prolip.utils import secrecy

#: EX_IOERR of sysexits.h, for lost output; and the code of shells for SIGINT.
EXIT_LOST, EXIT_INTERRUPTED = 74, 130
NAMES = {1: "stdout", 2: "stderr"}
#: Characters that control a terminal, reorder a line or cannot be encoded; in a value also line ends and tabs.
STEERING = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
STEERING_A_VALUE = re.compile(rf"{STEERING.pattern}|[\t\n\r]")
#: Cursor movements of a progress bar.
MOVES = re.compile(r"(?:\x1b\[A|[\r\n])*")
lost: dict[str, OSError] = {}  # name of a stream -> its first write error


class Undying(io.FileIO):
    """The descriptor of a standard stream that drops failed writes, with one warning on the other stream."""

    def __init__(self, number: int) -> None:
        super().__init__(number, "wb", closefd=False)
        self.owner = os.getpid()  # a forked child shares this object and leaves the warning to its parent

    def write(self, data: Any) -> int:
        try:
            while (written := super().write(data)) is None:  # another program made the pipe non-blocking
                select.select([], [self.fileno()], [])
            return written
        except OSError as error:
            name, other = NAMES[self.fileno()], 3 - self.fileno()
            if name not in lost and os.getpid() == self.owner:
                lost[name] = error
                # without print, which may be in the middle of a line
                say(f"warning: cannot write to {name} ({error}). Further output is lost; the run continues", other)
            return memoryview(data).nbytes


def say(text: str, number: int = 2) -> None:
    """Write a line to a standard stream; ignores failures; safe in a signal handler."""
    with contextlib.suppress(OSError):
        os.write(number, f"{secrecy.scrub(text)}\n".encode(errors="backslashreplace"))


def escaped(found: re.Match[str]) -> str:
    """Escape a character as in Python and JSON."""
    code = ord(found[0])
    return {9: r"\t", 10: r"\n", 13: r"\r"}.get(code, f"\\x{code:02x}" if code < 128 else f"\\u{code:04x}")


def plain(value: object) -> str:
    """Return a name from data as one line, with control characters and line ends escaped."""
    return STEERING_A_VALUE.sub(escaped, str(value))


def columns(start: str, parts: Sequence[str], width: int = 84) -> str:
    """Return texts after `start`, two spaces apart, in lines of `width` characters; later lines are indented."""
    lines = [start]
    for i, part in enumerate(map(plain, parts)):
        if i and len(lines[-1]) + 2 + len(part) > width:
            lines.append(" " * len(start))
        lines[-1] += f"  {part}"
    return "\n".join(lines)


def one_line(error: object) -> str:
    """Return an error's message in one line, with names from data escaped; unchanged for a class with `many_lines`."""
    text = str(error.args[0] if isinstance(error, KeyError) and error.args else error)
    return text if getattr(error, "many_lines", False) else plain(text)


class Notes(logging.Handler):
    """Writes log records to stderr as commands write notes: `warning: TEXT`, and information as its text."""

    def emit(self, record: logging.LogRecord) -> None:
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        print(f"{level}{self.format(record)}", file=sys.stderr)


class Cleaned:
    """A text stream that cleans its text; the program's own control sequences go to `stream`."""

    def __init__(self, stream: Any, queries: bool) -> None:
        self.stream, self.queries = stream, queries

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        cleaned = text if MOVES.fullmatch(text) else STEERING.sub(escaped, secrecy.scrub(text, self.queries))
        self.stream.write(cleaned)
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)


@contextlib.contextmanager
def cleaning() -> Iterator[None]:
    """Clean the printed text inside the context. Queries of addresses stay on stdout, where they may be data."""
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
    """Make print, warnings, logs and the last flush survive a stdout or stderr that fails or is closed at the start."""
    secrecy.hide([word.partition("=")[2] if word.startswith("--") and "=" in word else word for word in sys.argv[1:]])
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest free number, which is this one
    for number, name in NAMES.items():
        stream = getattr(sys, name)
        if isinstance(getattr(getattr(stream, "buffer", None), "raw", None), Undying):
            continue
        with contextlib.suppress(OSError):
            if stream is not None:
                stream.flush()
        encoding, through = getattr(stream, "encoding", "utf-8"), getattr(stream, "write_through", False)
        buffer, by_line = io.BufferedWriter(Undying(number)), number == 2 or os.isatty(number)
        text = io.TextIOWrapper(buffer, encoding, "backslashreplace", line_buffering=by_line, write_through=through)
        setattr(sys, name, Cleaned(text, queries=number == 2))


def command(main: Callable[[], object]) -> NoReturn:
    """Run a command whose result is its output; exits with the code of `main`. A closed pipe (`| head`) is no error."""
    guard()
    try:
        code = main()
    except KeyboardInterrupt:
        say("interrupted")
        code = EXIT_INTERRUPTED
    sys.exit(finished(code if isinstance(code, int) else 0))


def finished(code: int) -> int:
    """Flush the output; returns the exit code of a command that returned `code`."""
    for name in NAMES.values():
        getattr(sys, name).flush()
    cut_off = "stdout" in lost and lost["stdout"].errno != errno.EPIPE
    return code or (EXIT_LOST if cut_off else 0)
