"""What an index says of shards, and a stream that compares: counts, bytes, checksums by block.

`prolip data index` writes it. The file is JSON:
{"format": FORMAT, "block": bytes, "shards": {name: {"samples", "bytes", "sha256", "crc32": [hex, one per block]}}},
a name being relative to the index's folder where the shard lies below it, else its URL without user info and query, or
the hash of a `pipe:` command.
"""
from __future__ import annotations

import logging
import os
import posixpath
import zlib
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from prolip.data.faults import ShardFault
from prolip.data.reading.opening import ReadPolicy, ResumingStream, is_local, local_path, open_stream, read_up_to
from prolip.utils.documents import loads, read_file, shown
from prolip.utils.secrecy import redacted, tag

log = logging.getLogger(__name__)
FORMAT = "prolip shard index 1"
INDEX_NAME = "index.json"
#: What begins the name of a shard that a command gives, before the salted hash of the command.
HASHED = "pipe:sha256="
#: Bytes per checksum: what a reader must hold before it can vouch for any of it.
BLOCK = 2**22
#: Blocks of an index that are read: what a reader holds at once. And bytes of an index, some 3,000 per shard of 1 GB.
LEAST_BLOCK, MOST_BLOCK = 1, 2**28
INDEX_BYTES = 2**30


class Entry(NamedTuple):
    """One shard as it was when it was indexed. samples: those with an image; crc32: of every block of `block` bytes."""

    samples: int
    bytes: int
    sha256: str
    crc32: tuple[int, ...]
    block: int = BLOCK


@dataclass(frozen=True)
class ShardIndex:
    """Entries by shard, and where they were read. place: path or URL of the index, for messages."""

    place: str
    entries: Mapping[str, Entry]

    def __getitem__(self, url: str) -> Entry:
        """The entry of a shard; ValueError where there is none."""
        if (name := self.name_of(url)) not in self.entries:
            raise ValueError(f"{self.place} has no entry for {url}: {remedy(url, self.place)}")
        return self.entries[name]

    def name_of(self, url: str) -> str:
        """The name of a shard here: of a command its hash where that is known, else `canonical`."""
        names = [f"{HASHED}{tag(url[5:], salt)}" for salt in self.salts] if url.startswith("pipe:") else []
        return next((name for name in names if name in self.entries), canonical(url))

    @cached_property
    def salts(self) -> list[str]:
        """Those of the hashes that stand for commands."""
        return sorted({name.removeprefix(HASHED).partition("-")[0] for name in self.entries if name.startswith(HASHED)})

    def count(self, urls: Sequence[str]) -> int:
        """Samples of all shards; ValueError for shards that are missing, and for local ones of another size."""
        total = 0
        for url in urls:
            entry = self[url]
            if is_local(url) and (size := os.path.getsize(local_path(url))) != entry.bytes:
                raise ValueError(
                    f"{self.place} says that {url} has {entry.bytes} bytes, it has {size}: if the shard is right, "
                    f"{remedy(url, self.place)}; if the index is, fetch the shard again"
                )
            total += entry.samples
        return total


def canonical(url: str) -> str:
    """One spelling per shard: local paths are absolute, without `file:`; URLs are without user info and query."""
    if url.startswith("pipe:"):
        return url
    return os.path.abspath(local_path(url)) if is_local(url) else redacted(url)


def parent(url: str) -> str:
    """The folder of a shard or an index, as a path or a URL."""
    return posixpath.dirname(canonical(url))


def remedy(url: str, place: str) -> str:
    """The command that writes an index anew."""
    default = posixpath.join(parent(url), INDEX_NAME) in map(canonical, place.split(", "))
    shards = posixpath.join(parent(url), "*.tar") if is_local(url) else "SHARDS"
    return f"run: prolip data index '{shards}'" + ("" if default else f" --output {place}")


def to_json(index: ShardIndex) -> dict[str, Any]:
    """The index as it is written; its place decides on the names."""
    folder = parent(index.place) + "/"
    return {
        "format": FORMAT,
        "block": BLOCK,
        "shards": {
            redacted(url.removeprefix(folder)): {
                "samples": entry.samples,
                "bytes": entry.bytes,
                "sha256": entry.sha256,
                "crc32": [f"{value:08x}" for value in entry.crc32],
            }
            for url, entry in sorted(index.entries.items())
        },
    }


def from_json(data: Any, place: str) -> ShardIndex:
    """The reverse of `to_json`; ValueError where it is something else."""
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f"{place} is no {FORMAT!r}: make one by prolip data index SHARDS --output {place}")
    folder = parent(place)
    try:
        block = data["block"]
        if not is_count(block) or not LEAST_BLOCK <= block <= MOST_BLOCK:
            raise ValueError(f"block is {shown(block)}, wanted {LEAST_BLOCK} to {MOST_BLOCK} bytes")
        entries = {}
        for name, values in data["shards"].items():
            entry = Entry(values["samples"], values["bytes"], values["sha256"],
                          tuple(int(value, 16) for value in values["crc32"]), block)  # fmt: skip
            for key in ("samples", "bytes"):
                if not is_count(values[key]):
                    found = shown(values[key])
                    raise ValueError(f"{key} of {shown(name)} is {found}, wanted a whole number of 0 or more")
            if len(entry.crc32) != -(-entry.bytes // block):
                found = f"{len(entry.crc32)} checksums for {entry.bytes} bytes in blocks of {block}"
                raise ValueError(f"{shown(name)} has {found}")
            whole = "://" in name or name.startswith("pipe:")
            entries[canonical(name if whole else posixpath.join(folder, name))] = entry
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{place} is damaged ({type(error).__name__}: {error}): write it anew") from error
    return ShardIndex(place, entries)


def is_count(value: Any) -> bool:
    """Whether a value is a whole number of 0 or more, which true is not."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def read_index(place: str, policy: ReadPolicy | None = None) -> ShardIndex:
    """The index at a path or URL; ValueError where it is none, ShardFault where it cannot be read."""
    with closing(open_stream(place, policy)) as stream:
        data = read_up_to(stream, INDEX_BYTES + 1)
    if len(data) > INDEX_BYTES:
        raise ValueError(f"{place} has more than {INDEX_BYTES:,} bytes: is it an index?")
    try:
        values = loads(data)
    except ValueError as error:
        raise ValueError(f"{place} is no JSON ({error}): write it anew by prolip data index") from error
    return from_json(values, place)


def find_index(urls: Sequence[str]) -> ShardIndex | None:
    """What the index.json files beside local shards say together; None where a shard is remote or a folder has none."""
    if not urls or not all(is_local(url) for url in urls):
        return None
    found = []
    for folder in sorted({parent(url) for url in urls}):
        place = posixpath.join(folder, INDEX_NAME)
        if not os.path.isfile(place):
            return None
        try:
            head = loads(read_file(place, INDEX_BYTES))
        except ValueError as error:
            raise ValueError(f"{place} is no JSON ({error}): remove it, or {remedy(urls[0], place)}") from error
        if not isinstance(head, dict) or head.get("format") != FORMAT:
            log.info("%s is not ours: %r is not its format", place, FORMAT)
            return None
        found.append(from_json(head, place))
    entries = {url: entry for index in found for url, entry in index.entries.items()}
    return ShardIndex(", ".join(index.place for index in found), entries)


class CheckedStream:
    """A stream that hands out only what the index vouches for.

    Blocks are held back until their checksum fits; one that does not is read once more, over a new connection, and is
    then an "index mismatch", as is another length.
    """

    def __init__(self, stream: ResumingStream, entry: Entry, checksums: bool = True):
        self.stream, self.entry, self.checksums = stream, entry, checksums
        self._block, self._at, self._number = b"", 0, 0
        if stream.size is not None and stream.size != entry.bytes:
            stream.close()
            raise self._mismatch(f"the shard has {stream.size} bytes")

    def read(self, size: int = 2**16) -> bytes:
        if self._at == len(self._block):
            self._block, self._at = self._next(), 0
        data = self._block[self._at : self._at + size]
        self._at += len(data)
        return data

    def close(self) -> None:
        self.stream.close()

    def _next(self) -> bytes:
        start = self._number * self.entry.block
        wanted = min(self.entry.block, self.entry.bytes - start)
        if wanted <= 0:
            if self.stream.read(1):
                raise self._mismatch("the shard goes on")
            return b""
        for attempt in range(2):
            block = read_up_to(self.stream, wanted)
            if len(block) < wanted:
                raise self._mismatch(f"the shard ends after {start + len(block)}")
            if not self.checksums or zlib.crc32(block) == self.entry.crc32[self._number]:
                self._number += 1
                return block
            if attempt == 0 and not self.stream.url.startswith("pipe:"):
                self.stream.rewind(start, f"bytes {start} to {start + wanted} do not fit their checksum")
        raise self._mismatch(f"bytes {start} to {start + wanted} do not fit their checksum")

    def _mismatch(self, what: str) -> ShardFault:
        return ShardFault(
            "index mismatch",
            f"{what}; the index says {self.entry.bytes} bytes: run prolip data index again if the "
            "shards were written anew, else fetch this shard again",
        )
