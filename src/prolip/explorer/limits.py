"""Many visitors at once: places for their connections, and turns for work that is done one at a time."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

#: Seconds that a request waits for its turn, and between two looks for a free place.
PATIENCE, LOOK = 30.0, 0.01


class Busy(Exception):
    """There was no turn in time."""


@contextmanager
def turn(lock: threading.Lock, work: str) -> Iterator[None]:
    """Hold a lock. `Busy` after PATIENCE seconds without it."""
    if not lock.acquire(timeout=PATIENCE):
        raise Busy(f"this machine is busy with {work} of others: ask again in a moment")
    try:
        yield
    finally:
        lock.release()


class Places:
    """At most `most` connections. The one that has kept the server waiting longest, over `grace` s, yields to the next.
    since: when a connection began to keep the server waiting, None while the server works for it.
    """

    def __init__(self, most: int, grace: float):
        self.most, self.grace, self.since = most, grace, dict[socket.socket, float | None]()
        self._turn = threading.Lock()

    def enter(self, connection: socket.socket, work: str) -> None:
        """Take a place as soon as there is one. `Busy` after PATIENCE seconds in which others wait for one, too."""
        with turn(self._turn, work):
            while len(self.since) >= self.most:
                self.end(self.grace, 1)
                time.sleep(LOOK)
            self.since[connection] = time.monotonic()

    def leave(self, connection: socket.socket) -> None:
        """Give the place back."""
        self.since.pop(connection, None)

    def mark(self, connection: socket.socket, waits: bool) -> None:
        """Note that the server now waits for a connection, or works for it."""
        if connection in self.since:
            self.since[connection] = time.monotonic() if waits else None

    def end(self, seconds: float, count: int | None = None) -> None:
        """End connections that have kept the server waiting for more than `seconds`, at most `count`, longest first."""
        waiting = [(since, connection) for connection, since in list(self.since.items()) if since is not None]
        late = sorted((pair for pair in waiting if pair[0] < time.monotonic() - seconds), key=lambda pair: pair[0])
        for _, connection in late[:count]:
            with suppress(OSError):  # it has left
                connection.shutdown(socket.SHUT_RDWR)  # its thread reads the end and leaves
