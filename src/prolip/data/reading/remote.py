"""One attempt to read bytes: a local file, http(s), an fsspec URL, a command. What may pass is not a ShardFault."""

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
#: Answers of HTTP that may pass: time-out, too early, too many requests, errors of the server.
PASSING = frozenset({408, 425, 429, *range(500, 600)})
#: Errors after which no second attempt helps; and those at the first opening, of a missing library or a wrong URL.
GONE = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
PERMANENT = (*GONE, ImportError, ValueError, TypeError, NotImplementedError)
#: What file systems call the version of an object.
VERSIONS = ("ETag", "etag", "md5Hash", "LastModified", "last_modified", "updated", "mtime", "created")
#: IPv6 addresses of the internet, and those that stand for IPv4 ones at a translator.
GLOBAL, TRANSLATED = ipaddress.ip_network("2000::/3"), ipaddress.ip_network("64:ff9b::/96")


@dataclass(frozen=True, kw_only=True)
class ReadPolicy:
    """How long to wait for shards, how often to try again, and what may be opened: some five minutes by default."""

    connect_timeout: float = 10.0  # seconds
    read_timeout: float = 30.0  # seconds without a byte
    least_rate: float = 2.0**16  # bytes/s below which a source counts as stalled, over read_timeout
    retries: int = 7  # attempts in a row that bring less than 1 MiB
    backoff: float = 1.0  # seconds before the first retry, doubled for each further one, times 0.5 to 1 at random
    backoff_limit: float = 60.0
    block: int = 2**22  # bytes fetched at once from object stores
    pipes: bool = False  # whether `pipe:` commands are run
    public_only: bool = False  # whether http(s) addresses, and redirects, of hosts that are not public are refused

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = "a positive number" if name in ("connect_timeout", "read_timeout", "block") else "0 or more"
            if not 0 <= value < float("inf") or (least != "0 or more" and not value):
                raise ValueError(f"{name} is {value}: give {least}")


class Transient(OSError):
    """A failure that may pass. kind: of the fault if it does not; wait: the seconds a server asked for."""

    def __init__(self, message: str, kind: str = "interrupted shard", wait: float = 0.0):
        super().__init__(message)
        self.kind, self.wait = kind, wait


class Identity(NamedTuple):
    """Facts that differ between two objects; None where one is not known."""

    size: int | None = None
    version: str | None = None
    changed: str | None = None

    def differs(self, other: Identity) -> bool:
        """Whether anything that both know is different."""
        return any(a != b for a, b in zip(self, other) if a is not None and b is not None)


def within(seconds: float, work: Callable[[], T], what: str) -> T:
    """The result of `work`, run in a thread, which is abandoned with a Transient where it takes longer."""
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
    """Detects sources that send next to nothing forever, which a time-out per read does not."""

    policy: ReadPolicy
    seconds: float = 0.0
    bytes: int = 0

    def add(self, start: float, count: int) -> None:
        """Count the time since `start` for `count` bytes; Transient where that is too slow over read_timeout."""
        self.seconds, self.bytes = self.seconds + time.monotonic() - start, self.bytes + count
        if self.seconds >= self.policy.read_timeout:
            least = self.policy.least_rate
            if self.bytes < least * self.seconds:
                raise Transient(f"stalled: {self.bytes} bytes in {self.seconds:.3g} s, least_rate is {least:g}/s")
            self.seconds, self.bytes = 0.0, 0


def is_public(address: str) -> bool:
    """Whether an IP address is not private, loopback, link-local, multicast or reserved."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv4Address):
        return found.is_global and not (found.is_multicast or found.is_reserved)
    inner = ipaddress.IPv4Address(int(found) % 2**32) if found in TRANSLATED else found.ipv4_mapped or found.sixtofour
    return is_public(str(inner)) if inner else found.is_global and found in GLOBAL


class Guarded:
    """A connection that checks a host's addresses before it connects, and its peer's after: a name may change."""

    def _check(self: Any, address: str) -> None:
        if not is_public(address):
            why = f"{self.host} is at {address}, which is not public, and the address comes from data"
            raise ShardFault("unreadable shard", f"{why}: give --allow-private-hosts if you trust it")

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
    """A file of this machine. The kernel alone decides how long a network file system may take."""

    def __init__(self, path: str, position: int):
        self.file = open(path, "rb", buffering=2**20)  # noqa: SIM115  # closed by close
        state = os.fstat(self.file.fileno())
        self.identity = Identity(state.st_size, None, str(state.st_mtime_ns))
        self.position = self.file.seek(position)
        self.read, self.close = self.file.read, self.file.close


class HttpConnection:
    """One GET, read as it comes; `Range` asks for the rest of an object."""

    def __init__(self, url: str, position: int, policy: ReadPolicy):
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={position}-"} if position else {})
        limits = policy.connect_timeout, policy.read_timeout
        with requests.Session() as session:
            if policy.public_only:
                session.trust_env = False  # a proxy would look names up itself; a .netrc is not for hosts data names
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
        """Where the answer begins and how long the object is."""
        code, head = self.response.status_code, self.response.headers
        if code in PASSING:
            wait = head.get("Retry-After", "")
            raise Transient(f"HTTP {code} {self.response.reason}", wait=float(wait) if wait.isdigit() else 0.0)
        if code == 416:
            raise ShardFault("changed shard", f"HTTP 416: the object has no byte {position} any more")
        if code not in (200, 206):
            raise ShardFault("unreadable shard", f"HTTP {code} {self.response.reason}")
        if head.get("Content-Type", "").startswith("text/html"):
            raise Transient("the server answered with an HTML page", "unreadable shard")
        length = head.get("Content-Length", "")
        if code == 200:
            return 0, int(length) if length.isdigit() else None
        span = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", head.get("Content-Range", ""))
        if span is None or int(span[1]) > position:
            raise Transient(f"asked for bytes from {position}, got Content-Range {head.get('Content-Range')!r}")
        return int(span[1]), None if span[2] == "*" else int(span[2])

    def read(self, limit: int) -> bytes:
        """What has come, at most `limit` bytes; any of urllib3's errors."""
        start = time.monotonic()
        data = self.response.raw.read1(limit, decode_content=False) or b""
        self.pace.add(start, len(data))
        return data


def file_system(url: str, policy: ReadPolicy) -> tuple[Any, str]:
    """fsspec's file system and the path in it; of s3 with the policy's time-outs."""
    if not url.startswith("s3://"):
        return fsspec.core.url_to_fs(url)
    given = fsspec.config.conf.get("s3", {}).get("config_kwargs", {})
    limits = {"connect_timeout": policy.connect_timeout, "read_timeout": policy.read_timeout}
    system, path = fsspec.core.url_to_fs(url, config_kwargs={**given, **limits, "retries": {"max_attempts": 0}})
    system.retries = 1  # ours are counted, and resume where the bytes ended
    return system, path


class FsspecConnection:
    """An object at an fsspec URL, read in ranges of `block` bytes, each with a time-out and, in s3, the same ETag."""

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
        """The next bytes; any of the file system's errors."""
        if not self.buffer:
            block, rate = self.policy.block, self.policy.least_rate
            seconds = self.policy.read_timeout + (block / rate if rate else 0.0)
            self.buffer = within(seconds, lambda: self.file.read(block), f"reading {self.url}")
        data, self.buffer = self.buffer[:limit], self.buffer[limit:]
        return data

    def close(self) -> None:
        """Close the file; one that hangs is left to its thread."""
        with suppress(Exception):
            within(self.policy.connect_timeout, self.file.close, f"closing {self.url}")


class PipeConnection:
    """The output of a shell command, under pipefail. It is not run again: its first bytes would come twice."""

    def __init__(self, command: str, policy: ReadPolicy):
        self.command, self.policy, self.identity, self.position = command, policy, Identity(), 0
        self.errors, self.pace = tempfile.TemporaryFile(), Pace(policy)  # noqa: SIM115  # closed by close
        self.process = subprocess.Popen(
            ["bash", "-c", f"set -o pipefail\n{command}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            start_new_session=True,  # so that all of a pipeline can be killed
        )
        self.output = cast(IO[bytes], self.process.stdout)
        self.poll = select.poll()  # select.select refuses file numbers from 1,024 on
        self.poll.register(self.output, select.POLLIN)

    def read(self, limit: int) -> bytes:
        """The next bytes; ShardFault where the command stalls or ends badly."""
        start, seconds = time.monotonic(), self.policy.read_timeout
        try:
            if not self.poll.poll(1000 * seconds):
                raise Transient(f"stalled: no byte in {seconds:g} s")
            data = os.read(self.output.fileno(), limit)
            if not data and (code := self.process.wait(seconds)):
                raise ShardFault("broken shard", f"the command failed with exit {code}{self._said()}")
            self.pace.add(start, len(data))
        except subprocess.TimeoutExpired as error:
            raise ShardFault("interrupted shard", "stalled: the command closed its output and goes on") from error
        except Transient as error:
            raise ShardFault("interrupted shard", f"{error}{self._said()}") from error
        return data

    def _said(self) -> str:
        """The end of what the command wrote to stderr."""
        self.errors.seek(max(0, self.errors.seek(0, os.SEEK_END) - 300))
        text = self.errors.read().decode(errors="replace").strip()
        return f": {said_by(self.command, text)}" if text else ""

    def close(self) -> None:
        """Kill what is left of the pipeline."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.output.close()
        self.process.wait()
        self.errors.close()


#: Bytes of an object from `position`, at most the requested byte: `read(limit)` gives the next ones, none at the end.
Connection = LocalConnection | HttpConnection | FsspecConnection | PipeConnection
