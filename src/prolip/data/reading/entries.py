"""What an index says of shards, and a stream that compares: counts, bytes, checksums.

`prolip data index` writes it. The file is JSON: {"format": FORMAT, "shards": {name: {"samples", "bytes", "sha256"}}}, a
name being relative to the index's folder where the shard lies below it, else its URL without user info and query, or
the hash of a `pipe:` command. Older files also have checksums of blocks, which are passed over.
"""
from __future__ import annotations

import hashlib
import logging
import os
import posixpath
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
#: Bytes of an index, some 200 per shard and 3,000 in older ones.
INDEX_BYTES = 2**30


class Entry(NamedTuple):
    """One shard as it was when it was indexed. samples: those with an image; sha256: as `sha256sum` prints it."""

    samples: int
    bytes: int
    sha256: str


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
    folder, entries = parent(index.place) + "/", sorted(index.entries.items())
    return {"format": FORMAT, "shards": {redacted(url.removeprefix(folder)): entry._asdict() for url, entry in entries}}


def from_json(data: Any, place: str) -> ShardIndex:
    """The reverse of `to_json`; ValueError where it is something else."""
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f"{place} is no {FORMAT!r}: make one by prolip data index SHARDS --output {place}")
    folder, entries = parent(place), {}
    try:
        for name, values in data["shards"].items():
            entry = Entry(values["samples"], values["bytes"], values["sha256"])
            if not (is_count(entry.samples) and is_count(entry.bytes) and isinstance(entry.sha256, str)):
                raise ValueError(f"{shown(name)} is {shown(values)}, wanted whole numbers of 0 or more and a SHA-256")
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
    return from_json(parse_json(data, place), place)


def find_index(urls: Sequence[str]) -> ShardIndex | None:
    """What the index.json files beside local shards say together; None where a shard is remote or a folder has none."""
    if not urls or not all(is_local(url) for url in urls):
        return None
    found = []
    for folder in sorted({parent(url) for url in urls}):
        place = posixpath.join(folder, INDEX_NAME)
        if not os.path.isfile(place):
            return None
        head = parse_json(read_file(place, INDEX_BYTES), place)
        if not isinstance(head, dict) or head.get("format") != FORMAT:
            log.info("%s is not ours: %r is not its format", place, FORMAT)
            return None
        found.append(from_json(head, place))
    entries = {url: entry for index in found for url, entry in index.entries.items()}
    return ShardIndex(", ".join(index.place for index in found), entries)


def parse_json(data: bytes, place: str) -> Any:
    """What a file says; ValueError where that is no JSON."""
    try:
        return loads(data)
    except ValueError as error:
        raise ValueError(f"{place} is no JSON ({error}): remove it, or write it anew by prolip data index") from error


class CheckedStream:
    """A stream that is counted and summed up as it is read and, where an index has its entry, held against that.

    Another length or, at the end, another checksum is an "index mismatch".
    """

    def __init__(self, stream: ResumingStream, entry: Entry | None = None):
        self.stream, self.entry = stream, entry
        self.checksums = entry is None or stream.policy.checksums
        self.length, self.sha256 = 0, hashlib.sha256()
        if entry is not None and stream.size is not None and stream.size != entry.bytes:
            stream.close()
            raise self._mismatch(f"the shard has {stream.size} bytes")

    def read(self, size: int = 2**16) -> bytes:
        data = self.stream.read(size)
        self.length += len(data)
        if self.checksums:
            self.sha256.update(data)
        if self.entry is not None:
            if self.length > self.entry.bytes:
                raise self._mismatch("the shard goes on")
            if not data and self.length < self.entry.bytes:
                raise self._mismatch(f"the shard ends after {self.length}")
            if not data and self.checksums and self.sha256.hexdigest() != self.entry.sha256:
                raise self._mismatch("its bytes do not fit their SHA-256")
        return data

    def close(self) -> None:
        self.stream.close()

    def _mismatch(self, what: str) -> ShardFault:
        assert self.entry is not None
        return ShardFault(
            "index mismatch",
            f"{what}; the index says {self.entry.bytes} bytes: run prolip data index again if the "
            "shards were written anew, else fetch this shard again",
        )
