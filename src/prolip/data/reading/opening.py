"""A shard's bytes as one stream: what breaks off is taken up at the byte where it stood, or ends as a named fault."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from prolip.data.faults import RESUMED, SampleFault, ShardFault
from prolip.data.reading.addresses import check_address
from prolip.data.reading.connections import (
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

log = logging.getLogger(__name__)
#: Bytes that are read again after a break and compared, for servers that change an object and tell nobody.
OVERLAP = 4096
#: Times that the pause between retries is doubled at most: a float ends at 2**1024.
DOUBLINGS = 64
#: Retries are counted afresh after this many bytes.
PROGRESS = 2**20


class Stream(Protocol):
    """Bytes to read forwards."""

    def read(self, size: int) -> bytes:
        """At least one byte and at most `size`; none at the end."""


def is_local(url: str) -> bool:
    """Whether a URL is a path of this machine."""
    return url.startswith("file:") or not (url.startswith("pipe:") or "://" in url)


def local_path(url: str) -> str:
    """The path of a local URL."""
    return url.removeprefix("file:").removeprefix("//") if url.startswith("file:") else url


def connect(url: str, position: int, policy: ReadPolicy) -> Connection:
    """One attempt to read `url` from a byte on. ValueError for an address that the policy has no leave to open."""
    check_address(url, policy.pipes)
    if url.startswith("pipe:"):
        if position:
            raise ShardFault("broken shard", f"a command's output cannot be read again from byte {position}")
        return PipeConnection(url.removeprefix("pipe:"), policy)
    if is_local(url):
        return LocalConnection(local_path(url), position)
    if url.startswith(("http://", "https://")):
        return HttpConnection(url, position, policy)
    return FsspecConnection(url, position, policy)


class ResumingStream:
    """A shard's bytes, connected: a stream that outlives its connections.

    on_retry: called for every attempt that failed and was followed by another one.

    Faults, all of them ShardFault: "unreadable shard": not there, not allowed, an HTML page. "interrupted shard":
    policy.retries failures in a row (time-outs, resets, 5xx, bodies cut short). "changed shard": what is behind the URL
    now is not what was there before. "broken shard": a command failed. A retry goes on at the byte where the stream
    stood, never before and never after it.
    """

    def __init__(
        self, url: str, policy: ReadPolicy | None = None, on_retry: Callable[[SampleFault], None] | None = None
    ):
        self.url, self.policy, self.on_retry = url, policy or ReadPolicy(), on_retry
        self.position = 0
        self.identity: Identity | None = None
        self._tail = b""
        self._failures, self._failed_at = 0, 0
        self._jitter = random.Random()  # of its own: waiting must not touch what training draws from
        self._connection: Connection | None = None
        self._attempt(lambda: b"")

    @property
    def size(self) -> int | None:
        """Bytes of the object, where the source tells."""
        return self.identity.size if self.identity is not None else None

    def read(self, size: int = 2**16) -> bytes:
        """The next bytes, after as many retries as it takes."""
        return self._attempt(lambda: self._read(size))

    def close(self) -> None:
        """Close the connection, if there is one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(Exception):  # it is broken, or nobody wants the rest
                connection.close()

    def _attempt(self, work: Callable[[], bytes]) -> bytes:
        while True:
            try:
                if self._connection is None:
                    self._connect()
                return work()
            except ShardFault:
                raise
            except Exception as error:  # every file system has its own exceptions
                if isinstance(error, PERMANENT if self.identity is None else GONE):
                    raise ShardFault("unreadable shard", f"{type(error).__name__}: {error}") from error
                self.close()
                self._failed(error)

    def _read(self, size: int) -> bytes:
        assert self._connection is not None
        data = self._connection.read(size)
        wanted = self.size
        if not data and wanted is not None and self.position < wanted:
            raise Transient(f"cut at byte {self.position} of {wanted}")
        self.position += len(data)
        self._tail = (self._tail + data)[-OVERLAP:] if len(data) < OVERLAP else data[-OVERLAP:]
        return data

    def _connect(self) -> None:
        start = self.position - len(self._tail)
        self._connection = connection = connect(self.url, start, self.policy)
        if self.identity is None:
            self.identity = connection.identity
        elif self.identity.differs(connection.identity):
            raise ShardFault("changed shard", f"it was ({self.identity}), now it is ({connection.identity})")
        while connection.position < start:  # the server begins anew whatever it is asked for
            connection.position += len(read_exactly(connection, min(start - connection.position, 2**16)))
        if read_exactly(connection, len(self._tail)) != self._tail:
            raise ShardFault("changed shard", f"the {len(self._tail)} bytes before {self.position} are others now")

    def _failed(self, error: Exception) -> None:
        """Count a failure and wait; ShardFault once there were too many in a row."""
        if self.position - self._failed_at >= PROGRESS:
            self._failures = 0
        self._failed_at = self.position
        reason = f"{type(error).__name__}: {error}"
        if self._failures >= self.policy.retries:
            kind = error.kind if isinstance(error, Transient) else "interrupted shard"
            raise ShardFault(kind, f"{reason}, at byte {self.position}, after {self._failures} retries") from error
        waiting = min(self.policy.backoff * 2.0 ** min(self._failures, DOUBLINGS), self.policy.backoff_limit)
        waiting = max(waiting * self._jitter.uniform(0.5, 1), min(getattr(error, "wait", 0), self.policy.backoff_limit))
        self._failures += 1
        log.info("%s: %s; going on at byte %d in %.1f s", self.url, reason, self.position, waiting)
        if self.on_retry is not None:
            self.on_retry(SampleFault(RESUMED, f"at byte {self.position} after {reason}"))
        time.sleep(waiting)


open_stream = ResumingStream


def read_up_to(source: Connection | Stream, count: int) -> bytes:
    """The next `count` bytes, or fewer at the end."""
    parts = []
    while count and (part := source.read(min(count, 2**20))):
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def read_exactly(source: Connection, count: int) -> bytes:
    """The next `count` bytes; Transient where the source ends before."""
    data = read_up_to(source, count)
    if len(data) < count:
        raise Transient(f"cut {count - len(data)} bytes before the end of {count}")
    return data
