"""A shard's bytes as one stream that survives broken connections and is checked against an index; allowed addresses."""

from __future__ import annotations

import hashlib
import logging
import random
import re
import time
from collections.abc import Callable
from contextlib import suppress
from math import inf
from typing import Any, NamedTuple

from braceexpand import alphabet, braceexpand
from fsspec.registry import known_implementations

from prolip.data.faults import RESUMED, SampleFault, ShardFault
from prolip.data.reading.remote import (
    GONE,
    PERMANENT,
    Connection,
    FsspecConnection,
    HttpConnection,
    Identity,
    LocalConnection,
    PipeConnection,
    ReadPolicy,
    Transient,
)
from prolip.utils.documents import shown
from prolip.utils.secrecy import redacted

log = logging.getLogger(__name__)
Note = Callable[[SampleFault], None]  # receives faults that are counted and do not end the stream
SCHEMES = ("file", "http", "https", "s3", "gs", "hf")
ALLOWED = "give a path (./NAME if a file name looks like a URL) or a URL of file, http, https, s3, gs or hf"
#: Words before a colon that name models or, elsewhere, commands.
OF_MODELS, COMMANDS = ("hf-hub", "local-dir"), ("pipe", "shell", "exec", "cmd")
BEGINNING = re.compile(r"([a-z][a-z0-9+.-]*)(://|::|:)", re.IGNORECASE)
#: Limits: addresses of one brace pattern, depth of its braces, and characters of all addresses.
MOST, DEPTH, CHARACTERS = 10_000_000, 50, 2**34
RANGE = re.compile(r"\{(-?\d+|[A-Za-z])\.\.(-?\d+|[A-Za-z])(?:\.\.-?(\d+))?\}")
OVERLAP = 4096  # bytes read again after an interruption and compared, because some servers change objects silently
PROGRESS = 2**20  # bytes after which retries are counted from 0 again


def check_address(address: str, pipes: bool = False) -> str:
    """Return the address; ValueError unless it is a path, a URL of SCHEMES or, with `pipes`, a `pipe:` command.

    fsspec opens many more schemes and chains (`zip://`, `simplecache::`), some of which run programs.
    """
    if (pipes and address.startswith("pipe:")) or address.startswith(("http://", "https://")):
        return address
    begin = BEGINNING.match(address.strip())
    word, sign = begin.groups() if begin else ("", "")
    is_command = address.lstrip().startswith("|") or word.lower() in COMMANDS
    if "://" in address:
        allowed = word in SCHEMES and address.startswith(f"{word}://") and "::" not in address
    else:
        refused = is_command or sign == "::" or word.lower() in (*OF_MODELS, *known_implementations)
        allowed = word == "file" or not refused
    if allowed:
        return address
    why = ": only training shards may be commands (--train-data 'pipe:COMMAND')" if is_command else ""
    if word.lower() in OF_MODELS:
        why = f": {word}: is only for models"
    raise ValueError(f"{redacted(address)!r} is not allowed{why}; {ALLOWED}" + (", or a pipe: command" * pipes))


def expand_braces(pattern: str) -> list[str]:
    """Expand a brace pattern as bash does; ValueError if unbalanced, or for more than MOST texts, counted first."""
    text, count, commas = re.sub(r"\\.", "", pattern), 1.0, [0]
    try:
        for found in RANGE.finditer(text):
            ends = found.groups()[:2]
            if len(found[0]) > 60:
                count = inf  # numbers this long are a mistake
            elif ends[0].isalpha() == ends[1].isalpha():
                first, last = (alphabet.index(end) if end.isalpha() else int(end) for end in ends)
                count *= abs(last - first) // (int(found[3] or 1) or 1) + 1
        for sign in text:
            if sign == "{":
                commas.append(0)
            elif sign == ",":
                commas[-1] += 1
            elif sign == "}":
                count *= commas.pop() + 1
            if not 0 < len(commas) <= DEPTH:
                break
        if len(commas) != 1:
            raise ValueError(f"its braces are unbalanced or nested more than {DEPTH} deep")
        if count > MOST or count * len(pattern) > CHARACTERS:
            number = f"{count:,.0f}" if count < 10**15 else "more than 10^15"
            raise ValueError(f"it expands to {number} addresses: correct it, the limit is {MOST:,} and 16 GB in total")
        return list(braceexpand(pattern))
    except ValueError as error:
        raise ValueError(f"brace pattern {shown(redacted(pattern))}: {error}") from None


def is_local(url: str) -> bool:
    """Return whether a URL is a path of this machine."""
    return url.startswith("file:") or not (url.startswith("pipe:") or "://" in url)


def local_path(url: str) -> str:
    """Return the path of a local URL."""
    return url.removeprefix("file:").removeprefix("//") if url.startswith("file:") else url


def connect(url: str, position: int, policy: ReadPolicy) -> Connection:
    """Try once to read `url` from a byte on. ValueError for an address that the policy forbids."""
    check_address(url, policy.pipes)
    if url.startswith("pipe:"):
        if position:
            raise ShardFault("broken shard", f"a command's output cannot be read again from byte {position}")
        return PipeConnection(url.removeprefix("pipe:"), policy)
    if is_local(url):
        return LocalConnection(local_path(url), position)
    return (HttpConnection if url.startswith(("http://", "https://")) else FsspecConnection)(url, position, policy)


class ResumingStream:
    """A shard's bytes, connected. A retry continues at the byte where the stream stopped.

    on_retry: receives every failure that another attempt follows. ShardFault: "unreadable shard": missing, denied, an
    HTML page; "interrupted shard": policy.retries failures in a row (timeouts, resets, 5xx, bodies cut short); "changed
    shard": the object is a different one now; "broken shard": a command failed.
    """

    def __init__(self, url: str, policy: ReadPolicy | None = None, on_retry: Note | None = None):
        self.url, self.policy, self.on_retry = url, policy or ReadPolicy(), on_retry
        self.identity: Identity | None = None
        self.position, self._tail, self._failures, self._failed_at = 0, b"", 0, 0
        self._jitter = random.Random()  # own generator: waiting must not affect training's random numbers
        self._connection: Connection | None = None
        self.read(0)

    @property
    def size(self) -> int | None:
        """Bytes of the object, None if the source does not report them."""
        return self.identity.size if self.identity is not None else None

    def read(self, size: int = 2**16) -> bytes:
        """Return the next bytes, after as many retries as necessary; with 0 it only connects."""
        while True:
            try:
                connection = self._connection or self._connect()
                data = connection.read(size) if size else b""
                if size and not data and self.size is not None and self.position < self.size:
                    raise Transient(f"cut at byte {self.position} of {self.size}")
                break
            except ShardFault:
                raise
            except Exception as error:  # every file system has its own exceptions
                if isinstance(error, PERMANENT if self.identity is None else GONE):
                    raise ShardFault("unreadable shard", f"{type(error).__name__}: {error}") from error
                self.close()
                self._wait(error)
        self.position += len(data)
        self._tail = (self._tail + data)[-OVERLAP:] if len(data) < OVERLAP else data[-OVERLAP:]
        return data

    def close(self) -> None:
        """Close the connection, if there is one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(Exception):  # the connection failed, or the rest is not needed
                connection.close()

    def _connect(self) -> Connection:
        overlap = len(self._tail)
        self._connection = connection = connect(self.url, self.position - overlap, self.policy)
        if self.identity is None:
            self.identity = connection.identity
        elif self.identity.differs(connection.identity):
            raise ShardFault("changed shard", f"it was ({self.identity}) and is now ({connection.identity})")
        again, left = b"", self.position - connection.position  # more than the overlap if the server ignores ranges
        while left:
            if not (data := connection.read(min(left, 2**16))):
                raise Transient(f"cut {left} bytes before byte {self.position}")
            again, left = (again + data)[-OVERLAP:], left - len(data)
        if again[len(again) - overlap :] != self._tail:
            raise ShardFault("changed shard", f"the {overlap} bytes before {self.position} have changed")
        return connection

    def _wait(self, error: Exception) -> None:
        """Count a failure and wait; ShardFault after too many in a row."""
        if self.position - self._failed_at >= PROGRESS:
            self._failures = 0
        self._failed_at = self.position
        reason = f"{type(error).__name__}: {error}"
        if self._failures >= self.policy.retries:
            kind = error.kind if isinstance(error, Transient) else "interrupted shard"
            raise ShardFault(kind, f"{reason}, at byte {self.position}, after {self._failures} retries") from error
        most = self.policy.backoff_limit
        waiting = min(self.policy.backoff * 2.0 ** min(self._failures, 64), most)
        waiting = max(waiting * self._jitter.uniform(0.5, 1), min(getattr(error, "wait", 0), most))
        self._failures += 1
        log.info("%s: %s; resuming at byte %d in %.1f s", self.url, reason, self.position, waiting)
        if self.on_retry is not None:
            self.on_retry(SampleFault(RESUMED, f"at byte {self.position} after {reason}"))
        time.sleep(waiting)


open_stream = ResumingStream


def read_up_to(source: Any, count: int) -> bytes:
    """Return the next `count` bytes, or fewer at the end."""
    parts = []
    while count and (part := source.read(min(count, 2**20))):
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


class Entry(NamedTuple):
    """A shard at the time of indexing. samples: those with an image; sha256: as `sha256sum` prints it."""

    samples: int
    bytes: int
    sha256: str


class CheckedStream(ResumingStream):
    """A hashed stream; ShardFault "index mismatch" if length or checksum differ from `entry`."""

    def __init__(self, url: str, policy: ReadPolicy | None, on_retry: Note | None, entry: Entry | None = None):
        self.entry, self.sha256 = entry, hashlib.sha256()
        super().__init__(url, policy, on_retry)
        if entry is not None and self.size not in (None, entry.bytes):
            self.close()
            self._differs(f"the shard has {self.size} bytes")

    def read(self, size: int = 2**16) -> bytes:
        data = super().read(size)
        self.sha256.update(data)
        if self.entry is not None and size:
            if self.position > self.entry.bytes:
                self._differs("the shard is longer")
            if not data and self.sha256.hexdigest() != self.entry.sha256:
                self._differs(f"the SHA-256 of its {self.position} bytes differs")
        return data

    def _differs(self, what: str) -> None:
        assert self.entry is not None
        remedy = "if the shards were rewritten, run prolip data index again; if not, fetch this shard again"
        raise ShardFault("index mismatch", f"{what}; the index says {self.entry.bytes} bytes: {remedy}")
