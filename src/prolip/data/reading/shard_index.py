"""The shard index: samples, bytes and SHA-256 of every shard, written after one strict reading (`prolip data index`).

The file is JSON: {"format": FORMAT, "shards": {name: {"samples", "bytes", "sha256"}}}. A name is relative to the
index's folder where the shard is below it, else its URL without user info and query, or the hash of a `pipe:` command.
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
HASHED = "pipe:sha256="  # before the salted hash of a command, in the name of its shard
ENTRY = np.dtype([("samples", np.int64), ("bytes", np.int64), ("sha256", "S64")])
INDEX_BYTES = 2**30  # of an index, some 200 per shard and 3,000 in older ones
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
    """An entry for each of N shards, in N (A + 80) bytes where their names have A."""

    place: str  # path or URL of the index, for messages
    names: Addresses  # in their order
    values: np.ndarray  # (N,) of ENTRY

    @classmethod
    def of(cls, place: str, entries: Mapping[str, tuple[int, int, str]]) -> ShardIndex:
        """An index of these entries by name."""
        names = sorted(entries)
        return cls(place, Addresses(names), np.array([tuple(entries[name]) for name in names], ENTRY))

    def __getitem__(self, url: str) -> Entry:
        """The entry of a shard; ValueError where there is none."""
        samples, size, sha256 = self.values[self.rows([url])[0]].item()
        return Entry(samples, size, sha256.decode())

    def entries(self) -> dict[str, Entry]:
        """All entries by name."""
        rows = zip(self.names, self.values.tolist())
        return {name: Entry(samples, size, sha256.decode()) for name, (samples, size, sha256) in rows}

    def rows(self, urls: Sequence[str]) -> np.ndarray:
        """Where the entries of shards are; ValueError for a shard without one."""
        wanted = Addresses(map(self.name_of, urls)).block
        rows = np.searchsorted(self.names.block, wanted)
        lacking = rows == len(self.names)
        lacking[~lacking] = self.names.block[rows[~lacking]] != wanted[~lacking]
        if lacking.any():
            url = urls[int(lacking.argmax())]
            raise ValueError(f"{self.place} has no entry for {url}: {remedy(url, self.place)}")
        return rows

    def name_of(self, url: str) -> str:
        """The name of a shard here: of a command its hash where that is known, else `canonical`."""
        if url.startswith("pipe:"):
            commands = set(self.names[np.char.startswith(self.names.block, HASHED.encode())])
            for salt in {name.removeprefix(HASHED).partition("-")[0] for name in commands}:
                if (name := f"{HASHED}{tag(url[5:], salt)}") in commands:
                    return name
        return canonical(url)

    def only(self, urls: Sequence[str], sizes: Mapping[str, int]) -> tuple[ShardIndex, int]:
        """The index of these shards alone, and their samples in all; ValueError for another size than in `sizes`."""
        chosen = self.rows(urls)
        for url, wanted in zip(urls, self.values["bytes"][chosen].tolist()):
            if (size := sizes.get(url, wanted)) != wanted:
                raise ValueError(
                    f"{self.place} says that {url} has {wanted} bytes, it has {size}: if the shard is right, "
                    f"{remedy(url, self.place)}; if the index is, fetch the shard again"
                )
        kept = np.unique(chosen)
        part = ShardIndex(self.place, Addresses(self.names[kept]), self.values[kept])
        return part, int(self.values["samples"][chosen].sum())


def canonical(url: str) -> str:
    """One spelling per shard: local paths are absolute, without `file:`; URLs are without user info and query."""
    if url.startswith("pipe:"):
        return url
    return os.path.abspath(local_path(url)) if is_local(url) else redacted(url)


def parent(url: str) -> str:
    """The folder of a shard or an index, as a path or a URL."""
    return posixpath.dirname(canonical(url))


def remedy(url: str, place: str) -> str:
    """The command that writes an index again."""
    default = posixpath.join(parent(url), INDEX_NAME) in map(canonical, place.split(", "))
    shards = posixpath.join(parent(url), "*.tar") if is_local(url) else "SHARDS"
    return f"run: prolip data index '{shards}'" + ("" if default else f" --output {place}")


def from_json(text: bytes, place: str) -> ShardIndex | None:
    """The index in a file; None where the file is another's. ValueError where it is no JSON or damaged."""
    try:
        data = loads(text)
    except ValueError as error:
        raise ValueError(f"{place} is no JSON ({error}): remove it, or write it again by prolip data index") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        return None
    folder, entries, fields = parent(place), {}, itemgetter(*Entry._fields)
    try:
        for name, values in data["shards"].items():
            samples, size, sha256 = entry = fields(values)
            whole = type(samples) is type(size) is int and 0 <= samples < 2**63 and 0 <= size < 2**63
            if not (whole and isinstance(sha256, str) and len(sha256) < 65):
                wanted = "wanted whole numbers of 0 or more and a SHA-256"
                raise ValueError(f"{shown(name)} is {shown(values)}, {wanted}")
            url = name if "://" in name or name.startswith("pipe:") else posixpath.join(folder, name)
            settled = url[:1] == "/" and "//" not in url and "/." not in url and url[-1] != "/"
            entries[url if settled else canonical(url)] = entry  # abspath takes longer
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{place} is damaged ({type(error).__name__}: {error}): write it again") from error
    return ShardIndex.of(place, entries)


def read_index(place: str, policy: ReadPolicy | None = None) -> ShardIndex:
    """The index at a path or URL; ValueError where it is none, ShardFault where it cannot be read."""
    with closing(open_stream(place, policy)) as stream:
        data = read_up_to(stream, INDEX_BYTES + 1)
    if len(data) > INDEX_BYTES:
        raise ValueError(f"{place} has more than {INDEX_BYTES:,} bytes: is it an index?")
    if (index := from_json(data, place)) is None:
        raise ValueError(f"{place} is no {FORMAT!r}: make one by prolip data index SHARDS --output {place}")
    return index


def find_index(urls: Sequence[str]) -> ShardIndex | None:
    """The index.json files beside local shards, joined; None where a shard is remote or a folder has none."""
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
    """The result for one shard. entry: None where it could not be read; message: why not, or why it is empty."""

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
    """One result per shard, in their order, from `workers` processes."""
    work = partial(index_shard, policy=policy)
    if workers <= 1:
        yield from map(work, urls)
        return
    method = "fork" if "fork" in multiprocessing.get_all_start_methods() else None
    with ProcessPoolExecutor(workers, multiprocessing.get_context(method)) as pool:
        yield from pool.map(work, urls)


def write_index(index: ShardIndex) -> None:
    """Write an index to its place, whole or not at all; names are relative to it."""
    folder, entries = parent(index.place) + "/", index.entries().items()
    shards = {redacted(url.removeprefix(folder)): entry._asdict() for url, entry in entries}
    data = json.dumps({"format": FORMAT, "shards": shards}, indent=0).encode()
    if is_local(index.place):
        with replacing(Path(local_path(index.place))) as temporary:
            temporary.write_bytes(data)
    else:
        with fsspec.open(index.place, "wb") as remote:  # object stores show an object once it is complete
            remote.write(data)


def build_index(
    urls: Sequence[str],
    place: str | None = None,
    workers: int = 1,
    policy: ReadPolicy = PIPES,
    seen: Callable[[IndexedShard], None] = lambda shard: None,
) -> str:
    """Read shards and write their index, by default index.json beside them; returns its place, "" without any.

    seen: takes the result of each shard. Errors before anything is read where no index can be written there.
    """
    if not place:
        folders = sorted({parent(url) for url in urls})
        if len(folders) > 1 or any(url.startswith("pipe:") for url in urls):
            where = f"{len(folders)} folders ({folders[0]}, {folders[1]}...)" if len(folders) > 1 else "a command"
            raise ValueError(f"the shards come from {where}: say where the index goes with --output FILE")
        place = f"{folders[0]}/{INDEX_NAME}"
    check_address(place)
    if place.startswith(("http://", "https://")):
        raise ValueError(f"nothing can be written to {place}: say where the index goes with --output FILE")
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
        raise OSError(f"{place} cannot be written ({error}): make room, or give another --output") from error
    return place
