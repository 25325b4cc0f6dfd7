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
import zlib
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

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


class Addresses(Sequence[str]):
    """N addresses of A bytes on average in one block of N (A + 8) bytes, which forked processes share.

    Pickled, the block is compressed: addresses that count up take 2 to 5 bytes each.
    """

    def __init__(self, addresses: Iterable[str] = ()):
        parts = [address.encode("utf-8", "surrogatepass") for address in addresses]
        self.block, self.ends = b"".join(parts), np.cumsum([0, *map(len, parts)])

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, place: Any) -> Any:
        found = range(len(self))[place]
        return self._text(found) if isinstance(found, int) else [self._text(number) for number in found]

    def _text(self, number: int) -> str:
        return self.block[self.ends[number] : self.ends[number + 1]].decode("utf-8", "surrogatepass")

    def __getstate__(self) -> tuple[bytes, bytes]:
        return zlib.compress(self.block, 1), zlib.compress(np.diff(self.ends).tobytes(), 1)

    def __setstate__(self, state: tuple[bytes, bytes]) -> None:
        lengths = np.frombuffer(zlib.decompress(state[1]), dtype=np.int64)
        self.block, self.ends = zlib.decompress(state[0]), np.cumsum([0, *lengths])


@dataclass(frozen=True, eq=False)
class ShardIndex:
    """An entry for each of N shards, in N (A + 88) bytes where their names have A on average.

    place: path or URL of the index, for messages; names: in their order; samples, bytes: (N,) int64; sha256: (N,) S64.
    """

    place: str
    names: Addresses
    samples: np.ndarray
    bytes: np.ndarray
    sha256: np.ndarray

    @classmethod
    def of(cls, place: str, entries: Mapping[str, tuple[int, int, str]]) -> ShardIndex:
        """An index of these entries by name."""
        names = sorted(entries)
        samples, sizes, sums = ([entries[name][field] for name in names] for field in range(3))
        return cls(
            place, Addresses(names), np.array(samples, np.int64), np.array(sizes, np.int64), np.array(sums, "S64")
        )

    def __getitem__(self, url: str) -> Entry:
        """The entry of a shard; ValueError where there is none."""
        return self._entry(self._found(url, self._row(self.name_of(url))))

    def entries(self) -> dict[str, Entry]:
        """All of it, by name."""
        return {name: self._entry(row) for row, name in enumerate(self.names)}

    def _entry(self, row: int) -> Entry:
        return Entry(int(self.samples[row]), int(self.bytes[row]), self.sha256[row].decode())

    def _row(self, name: str) -> int | None:
        row = bisect_left(self.names, name)
        return row if row < len(self.names) and self.names[row] == name else None

    def _found(self, url: str, row: int | None) -> int:
        if row is None:
            raise ValueError(f"{self.place} has no entry for {url}: {remedy(url, self.place)}")
        return row

    def name_of(self, url: str) -> str:
        """The name of a shard here: of a command its hash where that is known, else `canonical`."""
        names = [f"{HASHED}{tag(url[5:], salt)}" for salt in self.salts] if url.startswith("pipe:") else []
        return next((name for name in names if self._row(name) is not None), canonical(url))

    @cached_property
    def salts(self) -> list[str]:
        """Those of the hashes that stand for commands."""
        return sorted({name.removeprefix(HASHED).partition("-")[0] for name in self.names if name.startswith(HASHED)})

    def only(self, urls: Sequence[str], sizes: Mapping[str, int]) -> tuple[ShardIndex, int]:
        """What it says of these shards alone, and how many samples they have in all.

        sizes: bytes of the local ones. ValueError for shards that are missing, and for local ones of another size.
        """
        rows = {name: row for row, name in enumerate(self.names)}
        chosen = np.array([self._found(url, rows.get(self.name_of(url))) for url in urls], dtype=np.int64)
        for url, wanted in zip(urls, self.bytes[chosen].tolist()):
            if (size := sizes.get(url, wanted)) != wanted:
                raise ValueError(
                    f"{self.place} says that {url} has {wanted} bytes, it has {size}: if the shard is right, "
                    f"{remedy(url, self.place)}; if the index is, fetch the shard again"
                )
        kept = np.unique(chosen)
        names = Addresses(self.names[row] for row in kept.tolist())
        part = ShardIndex(self.place, names, self.samples[kept], self.bytes[kept], self.sha256[kept])
        return part, int(self.samples[chosen].sum())


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
    folder, entries = parent(index.place) + "/", index.entries().items()
    return {"format": FORMAT, "shards": {redacted(url.removeprefix(folder)): entry._asdict() for url, entry in entries}}


def from_json(data: Any, place: str) -> ShardIndex:
    """The reverse of `to_json`; ValueError where it is something else."""
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f"{place} is no {FORMAT!r}: make one by prolip data index SHARDS --output {place}")
    folder = parent(place)
    try:
        shards = data["shards"]
        columns = [[values[field] for values in shards.values()] for field in Entry._fields]
        for name, *values in zip(shards, *columns):
            if not (is_count(values[0]) and is_count(values[1]) and isinstance(values[2], str) and len(values[2]) < 65):
                what = f"{shown(name)} is {shown(shards[name])}"
                raise ValueError(f"{what}, wanted whole numbers of 0 or more and a SHA-256")
        return ShardIndex.of(place, dict(zip([place_of(name, folder) for name in shards], zip(*columns))))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{place} is damaged ({type(error).__name__}: {error}): write it anew") from error


def place_of(name: str, folder: str) -> str:
    """`canonical` of a shard that an index in `folder`, itself canonical, calls by this name."""
    if "://" in name or name.startswith("pipe:"):
        return canonical(name)
    url = posixpath.join(folder, name)
    settled = url[:1] == "/" and "//" not in url and "/." not in url and url[-1] != "/"  # abspath takes longer
    return url if settled else canonical(url)


def is_count(value: Any) -> bool:
    """Whether a value is a whole number from 0 to below 2^63, which true is not."""
    return type(value) is int and 0 <= value < 2**63


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
    for folder in sorted(map(os.path.abspath, {posixpath.dirname(local_path(url)) for url in urls})):
        place = posixpath.join(folder, INDEX_NAME)
        if not os.path.isfile(place):
            return None
        head = parse_json(read_file(place, INDEX_BYTES), place)
        if not isinstance(head, dict) or head.get("format") != FORMAT:
            log.info("%s is not ours: %r is not its format", place, FORMAT)
            return None
        found.append(from_json(head, place))
    if len(found) == 1:
        return found[0]
    entries = {url: entry for index in found for url, entry in index.entries().items()}
    return ShardIndex.of(", ".join(index.place for index in found), entries)


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
