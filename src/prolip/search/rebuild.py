"""A source beside what an index has of it: what is new or has changed is embedded, what is gone is removed.

Every item has a fingerprint, "print": of a picture's file its size, its time of change and a hash of its bytes; of a
sample of shards the hash alone; of kept features a hash of the row; a text is its own. A file with the size and time of
before is not read, and one with the bytes of before is not decoded. A local shard that was read without a fault, and
has the size and time of before, is passed over. So a pass that was killed goes on where it was: it finds what is there.
"""
from __future__ import annotations

import os
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np

from prolip.evaluation.model import groups
from prolip.gaussian import Gaussian
from prolip.search.index import Part, SearchIndex
from prolip.search.store import Item


class Read(NamedTuple):
    """What is known of an item. mark: how its fingerprint begins, None: unknown before it is read; data: what to embed.

    position: its place in the source, from 1; row: its row in the index, -1 for none, and former: what is there.
    """

    item: Item
    mark: str | None
    data: Any
    position: int = 0
    row: int = -1
    former: Item | None = None

    @property
    def moved(self) -> bool:
        """Whether anything but the fingerprint is another than before."""
        return self.former is not None and {**self.former, "print": ""} != {**self.item, "print": ""}


class Rebuild:
    """One pass over a source by the writer of an index, whose lock is held.

    restore: whether items come back that `delete` removed. added, replaced, removed: items; withheld: deleted before.
    """

    def __init__(self, index: SearchIndex, address: str, restore: bool = False):
        self.index, self.address, self.restore = index, address, restore
        self.added = self.replaced = self.removed = self.withheld = 0
        sources = index.store.values["sources"]
        self.only = not [x for x in sources if x["address"] != address]
        numbers = [x.get("number", -1) for x in sources]
        own: dict[str, Any] = next((x for x in sources if x["address"] == address), {})
        self.number = own.get("number", max(numbers, default=-1) + 1)
        #: Local shards as they were when they were read whole; those of this pass; those whose items stay unseen.
        self.before, self.shards, self.kept = own.get("shards", {}), dict[str, str](), set[str]()
        self.unwanted = set() if restore else set(index.store.values.get("unwanted", ()))
        self.seen, self.noted = np.zeros(len(index.store), dtype=bool), "number" in own

    def note(self, **values: Any) -> None:
        """Keep something of the source in the manifest."""
        sources = self.index.store.values["sources"]
        own = next((x for x in sources if x["address"] == self.address), {"position": 0, "done": False})
        own = {**own, "address": self.address, "number": self.number, **values}
        self.index.store.write(sources=[*(x for x in sources if x["address"] != self.address), own])
        self.noted = True

    def due(self, reads: Iterator[Read], size: int) -> Iterator[Read]:
        """Those that the index has not as they are, without what was deleted. ValueError for the key of another."""
        position = 0
        for group in groups(reads, size):
            for read, row in zip(group, self.index.find([read.item["key"] for read in group]).tolist()):
                position += 1
                former = None if row < 0 else self.index.items([row])[0]
                item = read.item | {"source": self.number}
                read = read._replace(item=item, position=position, row=row, former=former)
                if former is None:
                    if read.item["key"] not in self.unwanted:
                        yield read
                    else:
                        self.withheld += 1
                    continue
                if not self.owns(former) or row >= len(self.seen) or self.seen[row]:
                    raise ValueError(f"the key {read.item['key']} of {self.address} is in the index already, of another"
                                     " source or of the same: rename it, or leave it out")  # fmt: skip
                self.seen[row] = True
                if read.moved or read.mark is None or not former.get("print", "").startswith(read.mark):
                    yield read

    def owns(self, item: Item) -> bool:
        """Whether an item is of this source, which those of indexes without fingerprints do not say."""
        return item["source"] == self.number if "source" in item else self.only

    def part(self, reads: list[Read], z: Gaussian, position: int) -> Part:
        """Items to be put in the place of those with their keys, and counted."""
        replaced = sum(read.former is not None for read in reads)
        self.replaced, self.added = self.replaced + replaced, self.added + len(reads) - replaced
        return Part([read.item for read in reads], z, position)

    def lose(self, read: Read) -> None:
        """Have an item that is damaged now be gone, and its shard be read again next time."""
        if read.row >= 0:
            self.seen[read.row] = False
        self.shards.pop(read.item.get("shard", ""), None)

    def whole(self, parts: Iterator[Part]) -> Iterator[Part]:
        """All parts, and what was not seen is removed after the last."""
        for part in parts:
            if not self.noted:
                self.note()
            yield part
        store, gone = self.index.store, []
        unseen = ~self.seen if store.alive is None else ~self.seen & store.alive[: len(self.seen)]
        for row in np.flatnonzero(unseen).tolist():
            (item,) = store.items([row])
            if self.owns(item) and item.get("shard") not in self.kept:
                gone.append(item["key"])
        if gone:
            store.delete(gone)
        self.removed = len(gone)

    def run(self, parts: Iterator[Part], rows: int) -> None:
        """Bring the index to what the source holds, chunk by chunk."""
        self.index.add(self.address, self.whole(parts), rows, replace=True)
        if self.before != self.shards or not self.noted:
            self.note(shards=self.shards)
        if self.restore and (unwanted := self.index.store.values.get("unwanted")):
            left = [key for key, row in zip(unwanted, self.index.find(unwanted).tolist()) if row < 0]
            self.index.store.write(unwanted=left)

    def __str__(self) -> str:
        withheld = f"; {self.withheld:,} stay deleted, --restore brings them back" if self.withheld else ""
        return f"{self.added:,} added, {self.replaced:,} replaced, {self.removed:,} removed{withheld}"


def stamp(path: str) -> str:
    """The size of a file and the time of its last change."""
    found = os.stat(path)
    return f"{found.st_size} {found.st_mtime_ns} "


def digest(*parts: bytes) -> str:
    """128 bits of the contents of an item."""
    found = blake2b(digest_size=16)
    for part in parts:
        found.update(part)
    return found.hexdigest()
