"""The shard index: samples, bytes and SHA-256 of every shard, written after one strict reading (`prolip data index`).

The file is JSON: {"format": FORMAT, "shards": {name: {"samples", "bytes", "sha256"}}}. A name is relative to the
index's folder if the shard is below it, else its URL without user info and query, or the hash of a `pipe:` command.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import posixpath
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import numpy as np

from prolip.data.faults import FaultCounter, ShardFault
from prolip.data.reading.remote import ReadPolicy
from prolip.data.reading.stream import (
    CheckedStream,
    Entry,
    check_address,
    is_local,
    local_path,
    open_stream,
    read_up_to,
)
from prolip.data.reading.tar import read_shard, survey
from prolip.data.samples import has_image
from prolip.utils.documents import loads, read_file, shown
from prolip.utils.outputs import check_output, replacing
from prolip.utils.secrecy import redacted, tag

FORMAT = "prolip shard index 1"
INDEX_NAME = "index.json"
HASHED = "pipe:sha256="  # prefix of a command's salted hash, the name of its shard
ENTRY = np.dtype([("samples", np.int64), ("bytes", np.int64), ("sha256", "S64")])
INDEX_BYTES = 2**30  # largest index, about 200 per shard and 3,000 in older ones
PIPES = ReadPolicy(pipes=True)


class Addresses(Sequence[str]):
    """N addresses of at most A bytes, in N A bytes that forked processes share and pickling compresses."""

    def __init__(self, addresses: Iterable[str] = ()):
        self.block = np.array([address.encode("utf-8", "surrogatepass") for address in addresses], "S")

    def __len__(self) -> int:
        return len(self.block)

    def __getitem__(self, place: Any) -> Any:
        found = self.block[place].tolist()
        decoded = [one.decode("utf-8", "surrogatepass") for one in ([found] if isinstance(found, bytes) else found)]
        return decoded[0] if isinstance(found, bytes) else decoded

    def __getstate__(self) -> tuple[bytes, str]:
        return zlib.compress(self.block.tobytes(), 1), self.block.dtype.str

    def __setstate__(self, state: tuple[bytes, str]) -> None:
        self.block = np.frombuffer(zlib.decompress(state[0]), state[1])


@dataclass(frozen=True, eq=False)
class ShardIndex:
    """Entries of N shards, in N (A + 80) bytes if their names have A bytes."""

    place: str  # path or URL of the index, for messages
    names: Addresses  # in order
    values: np.ndarray  # (N,) of ENTRY

    @classmethod
    def of(cls, place: str, entries: Mapping[str, tuple[int, int, str]]) -> ShardIndex:
        """Return an index of these entries by name."""
        names = sorted(entries)
        return cls(place, Addresses(names), np.array([tuple(entries[name]) for name in names], ENTRY))

    def __getitem__(self, url: str) -> Entry:
        """Return the entry of a shard; ValueError if there is none."""
        samples, size, sha256 = self.values[self.rows([url])[0]].item()
        return Entry(samples, size, sha256.decode())

    def entries(self) -> dict[str, Entry]:
        """Return all entries by name."""
        rows = zip(self.names, self.values.tolist())
        return {name: Entry(samples, size, sha256.decode()) for name, (samples, size, sha256) in rows}

    def rows(self, urls: Sequence[str]) -> np.ndarray:
        """Return the rows of shards in the index; ValueError for a shard without an entry."""
        wanted = Addresses(map(self.name_of, urls)).block
        rows = np.searchsorted(self.names.block, wanted)
        lacking = rows == len(self.names)
        lacking[~lacking] = self.names.block[rows[~lacking]] != wanted[~lacking]
        if lacking.any():
            url = urls[int(lacking.argmax())]
            raise ValueError(f"{self.place} has no entry for {url}: {remedy(url, self.place)}")
        return rows

    def name_of(self, url: str) -> str:
        """Return the name of a shard here: the hash of a command if it is known, else `canonical`."""
        if url.startswith("pipe:"):
            commands = set(self.names[np.char.startswith(self.names.block, HASHED.encode())])
            for salt in {name.removeprefix(HASHED).partition("-")[0] for name in commands}:
                if (name := f"{HASHED}{tag(url[5:], salt)}") in commands:
                    return name
        return canonical(url)

    def only(self, urls: Sequence[str], sizes: Mapping[str, int]) -> tuple[ShardIndex, int]:
        """Return the index of only these shards, and their total samples; ValueError if a size differs from `sizes`."""
        chosen = self.rows(urls)
        for url, wanted in zip(urls, self.values["bytes"][chosen].tolist()):
            if (size := sizes.get(url, wanted)) != wanted:
                raise ValueError(
                    f"{self.place} says that {url} has {wanted} bytes, but it has {size}: if the shard is right, "
                    f"{remedy(url, self.place)}; if the index is, fetch the shard again"
                )
        kept = np.unique(chosen)
        part = ShardIndex(self.place, Addresses(self.names[kept]), self.values[kept])
        return part, int(self.values["samples"][chosen].sum())


def canonical(url: str) -> str:
    """Return one spelling per shard: absolute local paths without `file:`, URLs without user info and query."""
    if url.startswith("pipe:"):
        return url
    return os.path.abspath(local_path(url)) if is_local(url) else redacted(url)


def parent(url: str) -> str:
    """Return the folder of a shard or an index, as a path or a URL."""
    return posixpath.dirname(canonical(url))


def remedy(url: str, place: str) -> str:
    """Return the command that rewrites an index."""
    default = posixpath.join(parent(url), INDEX_NAME) in map(canonical, place.split(", "))
    shards = posixpath.join(parent(url), "*.tar") if is_local(url) else "SHARDS"
    return f"run: prolip data index '{shards}'" + ("" if default else f" --output {place}")


def from_json(text: bytes, place: str) -> ShardIndex | None:
    """Parse an index file; None for another program's file. ValueError if it is damaged or not JSON."""
    try:
        data = loads(text)
    except ValueError as error:
        raise ValueError(f"{place} is not JSON ({error}). Remove it, or rewrite it with prolip data index") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        return None
    folder, entries, fields = parent(place), {}, itemgetter(*Entry._fields)
    try:
        for name, values in data["shards"].items():
            samples, size, sha256 = entry = fields(values)
            whole = type(samples) is type(size) is int and 0 <= samples < 2**63 and 0 <= size < 2**63
            if not (whole and isinstance(sha256, str) and len(sha256) < 65):
                expected = "expected whole numbers of 0 or more and a SHA-256"
                raise ValueError(f"{shown(name)} is {shown(values)}, {expected}")
            url = name if "://" in name or name.startswith("pipe:") else posixpath.join(folder, name)
            settled = url[:1] == "/" and "//" not in url and "/." not in url and url[-1] != "/"
            entries[url if settled else canonical(url)] = entry  # abspath is slow
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{place} is damaged ({type(error).__name__}: {error}). Write it again") from error
    return ShardIndex.of(place, entries)


def read_index(place: str, policy: ReadPolicy | None = None) -> ShardIndex:
    """Return the index at a path or URL; ValueError if it is not an index, ShardFault if it cannot be read."""
    with closing(open_stream(place, policy)) as stream:
        data = read_up_to(stream, INDEX_BYTES + 1)
    if len(data) > INDEX_BYTES:
        raise ValueError(f"{place} has more than {INDEX_BYTES:,} bytes, too many for an index")
    if (index := from_json(data, place)) is None:
        raise ValueError(f"{place} is not a {FORMAT!r}: write one with prolip data index SHARDS --output {place}")
    return index


def find_index(urls: Sequence[str]) -> ShardIndex | None:
    """Return the joined index.json files next to local shards; None if a shard is remote or a folder has none."""
    if not urls or not all(map(is_local, urls)):
        return None
    found: list[ShardIndex] = []
    for folder in sorted(map(os.path.abspath, {posixpath.dirname(local_path(url)) for url in urls})):
        place = posixpath.join(folder, INDEX_NAME)
        index = from_json(read_file(place, INDEX_BYTES), place) if os.path.isfile(place) else None
        if index is None:
            return None
        found.append(index)
    if len(found) == 1:
        return found[0]
    entries = {url: entry for index in found for url, entry in index.entries().items()}
    return ShardIndex.of(", ".join(index.place for index in found), entries)


class IndexedShard(NamedTuple):
    """The result for one shard. entry: None if it could not be read; message: the reason, or why it is empty."""

    url: str
    entry: Entry | None
    faults: Counter[str]
    message: str = ""


def index_shard(url: str, policy: ReadPolicy) -> IndexedShard:
    """Read one shard to its end."""
    faults = FaultCounter()
    try:
        stream = CheckedStream(url, policy, faults.add)
        samples = sum(map(has_image, read_shard(url, faults.add, stream=stream)))
    except ShardFault as fault:
        return IndexedShard(url, None, faults.kinds + Counter([fault.kind]), str(fault))
    message = "" if samples else f"0 samples: {survey([url], policy)}"
    return IndexedShard(url, Entry(samples, stream.position, stream.sha256.hexdigest()), faults.kinds, message)


def index_shards(urls: Sequence[str], policy: ReadPolicy, workers: int = 1) -> Iterator[IndexedShard]:
    """Yield one result per shard in their order, from `workers` processes."""
    work = partial(index_shard, policy=policy)
    if workers <= 1:
        yield from map(work, urls)
        return
    method = "fork" if "fork" in multiprocessing.get_all_start_methods() else None
    with ProcessPoolExecutor(workers, multiprocessing.get_context(method)) as pool:
        yield from pool.map(work, urls)


def write_index(index: ShardIndex) -> None:
    """Write an index to its place, completely or not at all; names are relative to it."""
    folder, entries = parent(index.place) + "/", index.entries().items()
    shards = {redacted(url.removeprefix(folder)): entry._asdict() for url, entry in entries}
    data = json.dumps({"format": FORMAT, "shards": shards}, indent=0).encode()
    if is_local(index.place):
        with replacing(Path(local_path(index.place))) as temporary:
            temporary.write_bytes(data)
    else:
        with fsspec.open(index.place, "wb") as remote:  # object stores show an object only when it is complete
            remote.write(data)


def build_index(
    urls: Sequence[str],
    place: str | None = None,
    workers: int = 1,
    policy: ReadPolicy = PIPES,
    seen: Callable[[IndexedShard], None] = lambda shard: None,
) -> str:
    """Read shards and write their index, by default index.json next to them; return its place, "" if all failed.

    seen: takes the result of each shard. Errors before reading if no index can be written there.
    """
    if not place:
        folders = sorted({parent(url) for url in urls})
        if len(folders) > 1 or any(url.startswith("pipe:") for url in urls):
            where = f"{len(folders)} folders ({folders[0]}, {folders[1]}...)" if len(folders) > 1 else "a command"
            raise ValueError(f"the shards come from {where}. Name the index file with --output FILE")
        place = f"{folders[0]}/{INDEX_NAME}"
    check_address(place)
    if place.startswith(("http://", "https://")):
        raise ValueError(f"cannot write to {place}. Name the index file with --output FILE")
    if is_local(place):
        check_output(local_path(place))
    else:
        fsspec.get_filesystem_class(place.split("://")[0])
    entries: dict[str, Entry] = {}
    for result in index_shards(urls, policy, workers):
        seen(result)
        if result.entry is not None:
            entries[canonical(result.url)] = result.entry
    if not entries:
        return ""
    try:
        write_index(ShardIndex.of(place, entries))
    except Exception as error:  # every store has its own exceptions
        raise OSError(f"cannot write {place} ({error}). Free some space, or give another --output") from error
    return place
