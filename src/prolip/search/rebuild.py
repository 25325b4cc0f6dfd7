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
from prolip.utils.secrecy import redacted


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

    data: the address as it was given, of which the manifest keeps none of its secrets; restore: whether items come back
    that `delete` removed. added, replaced, removed: items; withheld: deleted before.
    """

    def __init__(self, index: SearchIndex, data: str, restore: bool = False):
        self.index, self.data, self.restore = index, data, restore
        self.address = address = redacted(data)
        self.added = self.replaced = self.removed = self.withheld = 0
        self.source = digest(address.encode(errors="surrogatepass"))[:8]
        sources = {x["address"] for x in index.store.values["sources"]}
        self.known, self.only = address in sources, not sources - {address}
        #: Local shards as they were when they were read whole; those of this pass; those whose items stay unseen.
        self.before, self.shards, self.kept = index.store.shards(address), dict[str, str](), set[str]()
        self.seen = np.zeros(len(index.store), dtype=bool)

    def due(self, reads: Iterator[Read], size: int) -> Iterator[Read]:
        """Those that the index has not as they are, without what was deleted. ValueError for the key of another."""
        for group in groups(enumerate(reads, 1), size):
            keys = [read.item["key"] for _, read in group]
            unwanted = self.index.store.are_unwanted(keys) & (not self.restore)
            for (position, read), row, is_unwanted in zip(group, self.index.find(keys).tolist(), unwanted.tolist()):
                former = None if row < 0 else self.index.items([row])[0]
                item = read.item | {"source": self.source}
                read = read._replace(item=item, position=position, row=row, former=former)
                if former is not None:
                    own = self.owns(former) or ("source" not in former and self.known)
                    if not own or row >= len(self.seen) or self.seen[row]:
                        raise ValueError(f"the key {item['key']} of {self.address} is in the index already, of another"
                                         " source or of the same: rename it, or leave it out")  # fmt: skip
                    self.seen[row] = True
                    if not read.moved and read.mark is not None and former.get("print", "").startswith(read.mark):
                        continue
                elif is_unwanted:
                    self.withheld += 1
                    continue
                yield read

    def owns(self, item: Item) -> bool:
        """Whether an item is of this source, which those of indexes without fingerprints do not say."""
        return item["source"] == self.source if "source" in item else self.only

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
        yield from parts
        store, gone = self.index.store, []
        alive = store.gallery.alive
        unseen = ~self.seen if alive is None else ~self.seen & alive[: len(self.seen)]
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
        every = self.before | dict.fromkeys(self.before) | self.shards
        if changed := {shard: stamp for shard, stamp in every.items() if self.before.get(shard) != stamp}:
            self.index.store.note_shards(self.address, changed)

    def __str__(self) -> str:
        withheld = f"; {self.withheld:,} stay deleted, --restore brings them back" if self.withheld else ""
        return f"{self.added:,} added, {self.replaced:,} replaced, {self.removed:,} removed{withheld}"


def stamp(path: str) -> str:
    """The size of a file and the time of its last change."""
    found = os.stat(path)
    return f"{found.st_size} {found.st_mtime_ns} "


def digest(data: bytes) -> str:
    """128 bits of the contents of an item."""
    return blake2b(data, digest_size=16).hexdigest()
