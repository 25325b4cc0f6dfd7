"""Samples of small local shards, kept in memory: a corpus of a few megabytes is read many times, and parsing its tars
costs as much as decoding its small pictures.
"""
from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from typing import Any

from prolip.data.reading.opening import is_local, local_path

#: Bytes that a reading process keeps at most. Shards of a real training set are larger than this, and are never kept.
ROOM = 64 << 20
#: What a sample takes besides its members.
OVERHEAD = 512


class KeptShards:
    """What a reader handed out of a shard without a fault, for the next time; each process has its own.

    A shard of more than `room` bytes, or one that does not fit beside those that are there, is read each time.
    """

    def __init__(self, room: int = ROOM):
        self.room = room
        self._kept: dict[str, tuple[Any, list[dict[str, Any]], int]] = {}  # of a file its mark, samples and their bytes

    def get(self, url: str) -> list[dict[str, Any]] | None:
        """The samples of a shard that was kept and has not changed since; they are the caller's own."""
        mark, samples, _ = self._kept.get(url, (None, [], 0))
        return [dict(sample) for sample in samples] if mark is not None and mark == mark_of(url) else None

    def keeping(self, url: str, samples: Iterator[dict[str, Any]], faults: Collection[Any]) -> Iterator[dict[str, Any]]:
        """The same samples, kept when they have ended if `faults` is empty then."""
        mark = mark_of(url)
        if mark is None or mark[1] > self.room:
            yield from samples
            return
        held: list[dict[str, Any]] = []
        size = 0
        for sample in samples:
            if size <= self.room:
                held.append(dict(sample))
                size += OVERHEAD + sum(len(part) for part in sample.values())
            yield sample
        if size <= self.room and not faults and mark == mark_of(url):
            *_, before = self._kept.get(url, (0,))  # of the file that stood there before, or another stream was quicker
            self.room += before - size
            self._kept[url] = (mark, held, size)


def mark_of(url: str) -> tuple[int, int] | None:
    """When a local file was changed, and its size; None for what is remote, a command's output, or not there."""
    if not is_local(url) or not os.path.exists(local_path(url)):
        return None
    found = os.stat(local_path(url))
    return found.st_mtime_ns, found.st_size
