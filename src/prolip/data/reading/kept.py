"""Samples of small local shards, kept in memory: a corpus of a few megabytes is read many times, and parsing its tars
costs as much as decoding its small pictures.
"""
from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from prolip.data.reading.opening import is_local, local_path

#: Bytes that a reading process keeps at most. Shards of a real training set are larger than this, and are never kept.
ROOM = 64 << 20
#: What a sample takes besides its members.
OVERHEAD = 512


class File(NamedTuple):
    """What tells a file from the one that stood there before."""

    changed: int
    size: int


class Kept(NamedTuple):
    """The samples of a file, and the bytes that they take."""

    file: File
    samples: list[dict[str, Any]]
    size: int


class KeptShards:
    """What a reader handed out of a shard without a fault, for the next time; each process has its own.

    A shard of more than `room` bytes, or one that does not fit beside those that are there, is read each time.
    """

    def __init__(self, room: int = ROOM):
        self.room = room
        self._kept: dict[str, Kept] = {}

    def get(self, url: str) -> list[dict[str, Any]] | None:
        """The samples of a shard that was kept and has not changed since; they are the caller's own."""
        kept = self._kept.get(url)
        return [dict(sample) for sample in kept.samples] if kept is not None and kept.file == file_of(url) else None

    def keeping(self, url: str, samples: Iterator[dict[str, Any]], faults: Collection[Any]) -> Iterator[dict[str, Any]]:
        """The same samples, kept when they have ended if `faults` is empty then."""
        file = file_of(url)
        if file is None or file.size > self.room:
            yield from samples
            return
        held: list[dict[str, Any]] = []
        size = 0
        for sample in samples:
            if size <= self.room:
                held.append(dict(sample))
                size += OVERHEAD + sum(len(part) for part in sample.values())
            yield sample
        if size <= self.room and not faults and file == file_of(url):
            before = self._kept.get(url)  # of the file that stood there before, or another stream was quicker
            self.room += (before.size if before is not None else 0) - size
            self._kept[url] = Kept(file, held, size)


def file_of(url: str) -> File | None:
    """What a local file is now; None for what is remote, a command's output, or not there."""
    if not is_local(url):
        return None
    try:
        found = os.stat(local_path(url))
    except OSError:
        return None
    return File(found.st_mtime_ns, found.st_size)
