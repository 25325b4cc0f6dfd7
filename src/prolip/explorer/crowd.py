"""Many who ask at once: places for their connections, and turns for work that is done one after the other."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

#: Seconds that a question waits for its turn, and between two looks whether a place is free.
PATIENCE, LOOK = 30.0, 0.01


class Busy(Exception):
    """There was no turn in time; the text says for what."""


@contextmanager
def turn(lock: threading.Lock, work: str) -> Iterator[None]:
    """Hold a lock. `Busy` after PATIENCE seconds without it."""
    if not lock.acquire(timeout=PATIENCE):
        raise Busy(f"this machine is busy with {work} of others: ask again in a moment")
    try:
        yield
    finally:
        lock.release()


class Crowd:
    """At most `most` connections; the one that kept the server waiting for longest gives way to the next.

    grace: seconds that a connection may keep it waiting before it gives way. since: when it began to, None while the
    server works for it.
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
        """From now on the server waits for a connection, or works for it."""
        if connection in self.since:
            self.since[connection] = time.monotonic() if waits else None

    def end(self, seconds: float, count: int | None = None) -> None:
        """End connections that have kept the server waiting for more than `seconds`, at most `count`, longest first."""
        waiting = [(since, connection) for connection, since in list(self.since.items()) if since is not None]
        late = sorted((pair for pair in waiting if pair[0] < time.monotonic() - seconds), key=lambda pair: pair[0])
        for _, connection in late[:count]:
            with suppress(OSError):  # it left meanwhile
                connection.shutdown(socket.SHUT_RDWR)  # its thread reads the end and leaves
