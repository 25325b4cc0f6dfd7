"""The shards and other sources that are scored, and what tells whether one has changed since."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import closing

from prolip.data.faults import SampleFault
from prolip.data.reading.named import ROWS, NamedSource, parse_source
from prolip.data.reading.remote import Identity, ReadPolicy
from prolip.data.reading.rows import read_stored
from prolip.data.reading.shard_index import canonical
from prolip.data.reading.shards import expand_shards
from prolip.data.reading.stream import Note, open_stream
from prolip.data.reading.tar import ShardReader
from prolip.data.samples import Raw, suffixes_of
from prolip.data.sets import SETS

GONE, CHANGED = "is gone", "has changed"


class SourceReader(ShardReader):
    """A `ShardReader` that also reads a table, folder of images or published set, as one shard of all its images."""

    def __call__(self, url: str, on_fault: Note | None = None) -> Iterator[Raw]:
        source = table_of(url)
        return read_stored(source, None) if source else super().__call__(url, on_fault)


def table_of(url: str) -> NamedSource | None:
    """The table, folder of images or published set of an address, None for a shard."""
    kind, _, address = url.partition(":")
    return NamedSource(kind, address) if kind in ROWS else None


def urls_of(data: str) -> list[str]:
    """The addresses of the shards to score, one of a table, folder or published set. ValueError for other kinds."""
    kind, address = parse_source(data, "--data", (*ROWS, "shards"))
    if kind == "shards":
        return [shard.url for shard in expand_shards(address)]
    return [f"{kind}:{','.join(map(os.path.abspath, address.split(',') if kind in SETS else [address]))}"]


def name_of(url: str) -> str:
    """The name of a shard in the tables, without secrets."""
    return url if table_of(url) else canonical(url)


def source_of(url: str, policy: ReadPolicy) -> Identity | None:
    """Size, version and time of change of a shard, or of the first file of a published set, by opening it once. None if
    it does not answer, as a folder.
    """
    kind, address = table_of(url) or ("shards", url)
    try:
        with closing(open_stream(address.split(",")[0] if kind in SETS else address, policy)) as stream:
            return stream.identity
    except SampleFault:
        return None


def change_of(url: str, was: list | None, policy: ReadPolicy) -> str:
    """GONE, CHANGED, or "" if a shard's source looks unchanged without reading it."""
    now = source_of(url, policy)
    if was is None or now is None:
        return "" if was is None else GONE
    return CHANGED if Identity(*was).differs(now) else ""


def content_of(raw: Raw) -> bytes:
    """16 bytes that change with the name or the bytes of any member of a sample."""
    sums = hashlib.blake2b(digest_size=16)
    for suffix in sorted(suffixes_of(raw)):
        sums.update(f"{len(suffix)} {suffix} {len(raw[suffix])} ".encode() + raw[suffix])
    return sums.digest()
