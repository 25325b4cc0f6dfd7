"""One attempt to read bytes from a file, http(s), an fsspec URL or a command. ShardFaults are permanent failures."""

from __future__ import annotations

import ipaddress
import os
import re
import select
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import IO, Any, NamedTuple, TypeVar, cast

import fsspec.core
import requests
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

from prolip.data.faults import ShardFault
from prolip.utils.secrecy import said_by

T = TypeVar("T")
#: HTTP answers to retry: timeout, too early, too many requests, server errors.
PASSING = frozenset({408, 425, 429, *range(500, 600)})
#: Errors that are never retried; and those at opening: a missing library or a wrong URL.
GONE = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
PERMANENT = (*GONE, ImportError, ValueError, TypeError, NotImplementedError)
#: Names that file systems give to the version of an object.
VERSIONS = ("ETag", "etag", "md5Hash", "LastModified", "last_modified", "updated", "mtime", "created")
#: Public IPv6 addresses, and those that embed IPv4 ones for a translator.
GLOBAL, TRANSLATED = ipaddress.ip_network("2000::/3"), ipaddress.ip_network("64:ff9b::/96")


@dataclass(frozen=True, kw_only=True)
class ReadPolicy:
    """Timeouts and retries of shards, and the allowed addresses; gives up after about five minutes by default."""

    connect_timeout: float = 10.0  # seconds
    read_timeout: float = 30.0  # seconds without a byte
    least_rate: float = 2.0**16  # bytes/s over read_timeout below which a source counts as stalled
    retries: int = 7  # attempts in a row with less than 1 MiB
    backoff: float = 1.0  # seconds before the first retry, doubled for each further one, times a random 0.5 to 1
    backoff_limit: float = 60.0
    block: int = 2**22  # bytes per request to object stores
    pipes: bool = False  # whether to run `pipe:` commands
    public_only: bool = False  # whether to refuse http(s) addresses, and redirects, of hosts that are not public

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = "a positive number" if name in ("connect_timeout", "read_timeout", "block") else "0 or more"
            if not 0 <= value < float("inf") or (least != "0 or more" and not value):
                raise ValueError(f"{name} is {value}: give {least}")


class Transient(OSError):
    """A temporary failure. kind: of the fault if it persists; wait: seconds that a server requested."""

    def __init__(self, message: str, kind: str = "interrupted shard", wait: float = 0.0):
        super().__init__(message)
        self.kind, self.wait = kind, wait


class Identity(NamedTuple):
    """Facts that distinguish two objects; None if unknown."""

    size: int | None = None
    version: str | None = None
    changed: str | None = None

    def differs(self, other: Identity) -> bool:
        """Return whether any fact that both know differs."""
        return any(a != b for a, b in zip(self, other) if a is not None and b is not None)


def within(seconds: float, work: Callable[[], T], what: str) -> T:
    """Return the result of `work`, run in a thread; abandon it with a Transient if it takes longer."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True, name=f"prolip: {what}"[:60]).start()
    if not wait([done], seconds).done:
        raise Transient(f"stalled: {what} took more than {seconds:g} s")
    return done.result()


@dataclass
class Pace:
    """Detector of sources that send almost nothing forever, which a timeout per read cannot find."""

    policy: ReadPolicy
    seconds: float = 0.0
    bytes: int = 0

    def add(self, start: float, count: int) -> None:
        """Add the time since `start` and `count` bytes; Transient if that is too slow over read_timeout."""
        self.seconds, self.bytes = self.seconds + time.monotonic() - start, self.bytes + count
        if self.seconds >= self.policy.read_timeout:
            least = self.policy.least_rate
            if self.bytes < least * self.seconds:
                raise Transient(f"stalled: {self.bytes} bytes in {self.seconds:.3g} s; least_rate is {least:g}/s")
            self.seconds, self.bytes = 0.0, 0


def is_public(address: str) -> bool:
    """Return whether an IP address is not private, loopback, link-local, multicast or reserved."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv4Address):
        return found.is_global and not (found.is_multicast or found.is_reserved)
    inner = ipaddress.IPv4Address(int(found) % 2**32) if found in TRANSLATED else found.ipv4_mapped or found.sixtofour
    return is_public(str(inner)) if inner else found.is_global and found in GLOBAL


class Guarded:
    """A connection that checks a host's addresses before connecting and the peer's after it, as names may change."""

    def _check(self: Any, address: str) -> None:
        if not is_public(address):
            why = f"{self.host} is at {address}, which is not public, and the address comes from data"
            raise ShardFault("unreadable shard", f"{why}. If you trust it, give --allow-private-hosts")

    def _new_conn(self: Any) -> socket.socket:
        for *_, (address, *_) in socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM):
            self._check(str(address))
        connection = super()._new_conn()  # type: ignore[misc]
        try:
            self._check(connection.getpeername()[0])
        except BaseException:
            connection.close()
            raise
        return connection


POOLS = {
    pool.scheme: type(pool.__name__, (pool,), {"ConnectionCls": type("Connection", (Guarded, pool.ConnectionCls), {})})
    for pool in (HTTPConnectionPool, HTTPSConnectionPool)
}


class LocalConnection:
    """A file of this machine. Only the kernel limits the time of a network file system."""

    def __init__(self, path: str, position: int):
        self.file = open(path, "rb", buffering=2**20)  # noqa: SIM115  # closed by close
        state = os.fstat(self.file.fileno())
        self.identity = Identity(state.st_size, None, str(state.st_mtime_ns))
        self.position = self.file.seek(position)
        self.read, self.close = self.file.read, self.file.close


class HttpConnection:
    """One GET, read as it arrives; `Range` requests the rest of an object."""

    def __init__(self, url: str, position: int, policy: ReadPolicy):
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={position}-"} if position else {})
        limits = policy.connect_timeout, policy.read_timeout
        with requests.Session() as session:
            if policy.public_only:
                session.trust_env = False  # a proxy would resolve names; a .netrc is not for hosts named by data
                for adapter in session.adapters.values():
                    cast(Any, adapter).poolmanager.pool_classes_by_scheme = POOLS
            get = partial(session.get, url, headers=headers, stream=True, timeout=limits)
            self.response = within(sum(limits), get, f"GET {url}")
        self.close, self.pace = self.response.close, Pace(policy)
        try:
            self.position, size = self._placed(position)
        except BaseException:
            self.close()
            raise
        head = self.response.headers
        self.identity = Identity(size, head.get("ETag"), head.get("Last-Modified"))

    def _placed(self, position: int) -> tuple[int, int | None]:
        """Return the first byte of the answer and the length of the object."""
        code, head = self.response.status_code, self.response.headers
        if code in PASSING:
            wait = head.get("Retry-After", "")
            raise Transient(f"HTTP {code} {self.response.reason}", wait=float(wait) if wait.isdigit() else 0.0)
        if code == 416:
            raise ShardFault("changed shard", f"HTTP 416: the object no longer has byte {position}")
        if code not in (200, 206):
            raise ShardFault("unreadable shard", f"HTTP {code} {self.response.reason}")
        if head.get("Content-Type", "").startswith("text/html"):
            raise Transient("the server answered with an HTML page", "unreadable shard")
        length = head.get("Content-Length", "")
        if code == 200:
            return 0, int(length) if length.isdigit() else None
        span = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", head.get("Content-Range", ""))
        if span is None or int(span[1]) > position:
            raise Transient(f"requested bytes from {position}, got Content-Range {head.get('Content-Range')!r}")
        return int(span[1]), None if span[2] == "*" else int(span[2])

    def read(self, limit: int) -> bytes:
        """Return available bytes, at most `limit`; raises urllib3's errors."""
        start = time.monotonic()
        data = self.response.raw.read1(limit, decode_content=False) or b""
        self.pace.add(start, len(data))
        return data


def file_system(url: str, policy: ReadPolicy) -> tuple[Any, str]:
    """Return fsspec's file system and the path in it; s3 gets the policy's timeouts."""
    if not url.startswith("s3://"):
        return fsspec.core.url_to_fs(url)
    given = fsspec.config.conf.get("s3", {}).get("config_kwargs", {})
    limits = {"connect_timeout": policy.connect_timeout, "read_timeout": policy.read_timeout}
    system, path = fsspec.core.url_to_fs(url, config_kwargs={**given, **limits, "retries": {"max_attempts": 0}})
    system.retries = 1  # our own retries resume at the byte where the stream ended
    return system, path


class FsspecConnection:
    """An object at an fsspec URL, read in ranges of `block` bytes, each with a timeout and, for s3, the same ETag."""

    def __init__(self, url: str, position: int, policy: ReadPolicy):
        self.url, self.policy, self.position, self.buffer = url, policy, position, b""

        def opened() -> tuple[IO[bytes], dict[str, Any]]:
            system, path = file_system(url, policy)
            system.invalidate_cache()
            file = system.open(path, "rb", block_size=policy.block, cache_type="none")
            return file, getattr(file, "details", None) or system.info(path)

        self.file, details = within(policy.connect_timeout + policy.read_timeout, opened, f"opening {url}")
        size = details.get("size")
        version, changed = ([str(details[name]) for name in VERSIONS if details.get(name)] + [None, None])[:2]
        self.identity = Identity(None if size is None else int(size), version, changed)
        if position:
            self.file.seek(position)

    def read(self, limit: int) -> bytes:
        """Return the next bytes; raises the file system's errors."""
        if not self.buffer:
            block, rate = self.policy.block, self.policy.least_rate
            seconds = self.policy.read_timeout + (block / rate if rate else 0.0)
            self.buffer = within(seconds, lambda: self.file.read(block), f"reading {self.url}")
        data, self.buffer = self.buffer[:limit], self.buffer[limit:]
        return data

    def close(self) -> None:
        """Close the file; leave one that hangs to its thread."""
        with suppress(Exception):
            within(self.policy.connect_timeout, self.file.close, f"closing {self.url}")


class PipeConnection:
    """The output of a shell command, under pipefail. A second run would repeat its first bytes, so there is none."""

    def __init__(self, command: str, policy: ReadPolicy):
        self.command, self.policy, self.identity, self.position = command, policy, Identity(), 0
        self.errors, self.pace = tempfile.TemporaryFile(), Pace(policy)  # noqa: SIM115  # closed by close
        self.process = subprocess.Popen(
            ["bash", "-c", f"set -o pipefail\n{command}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            start_new_session=True,  # so that the whole pipeline can be killed
        )
        self.output = cast(IO[bytes], self.process.stdout)
        self.poll = select.poll()  # select.select refuses file numbers from 1,024 on
        self.poll.register(self.output, select.POLLIN)

    def read(self, limit: int) -> bytes:
        """Return the next bytes; ShardFault if the command stalls or fails."""
        start, seconds = time.monotonic(), self.policy.read_timeout
        try:
            if not self.poll.poll(1000 * seconds):
                raise Transient(f"stalled: no byte in {seconds:g} s")
            data = os.read(self.output.fileno(), limit)
            if not data and (code := self.process.wait(seconds)):
                raise ShardFault("broken shard", f"the command failed with exit {code}{self._said()}")
            self.pace.add(start, len(data))
        except subprocess.TimeoutExpired as error:
            raise ShardFault("interrupted shard", "stalled: the command closed its output but keeps running") from error
        except Transient as error:
            raise ShardFault("interrupted shard", f"{error}{self._said()}") from error
        return data

    def _said(self) -> str:
        """Return the end of what the command wrote to stderr."""
        self.errors.seek(max(0, self.errors.seek(0, os.SEEK_END) - 300))
        text = self.errors.read().decode(errors="replace").strip()
        return f": {said_by(self.command, text)}" if text else ""

    def close(self) -> None:
        """Kill the rest of the pipeline."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.output.close()
        self.process.wait()
        self.errors.close()


#: Bytes of an object from `position`, at most the requested byte: `read(limit)` returns the next ones, b"" at the end.
Connection = LocalConnection | HttpConnection | FsspecConnection | PipeConnection
