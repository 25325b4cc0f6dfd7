"""What tells a shard, and a sample of it, from what it was when it was scored."""
from __future__ import annotations

import hashlib
from contextlib import closing

from prolip.data.faults import SampleFault
from prolip.data.reading.connections import Identity, ReadPolicy
from prolip.data.reading.entries import canonical
from prolip.data.reading.opening import open_stream
from prolip.data.reading.shards import expand_shards
from prolip.data.reading.tar import ShardReader
from prolip.data.samples.sample import Raw, suffixes_of

GONE, CHANGED = "is gone", "has changed"


def source_of(url: str, policy: ReadPolicy) -> Identity | None:
    """Size, version and time of change of a shard as its file system or store tells them, at the cost of one opening;
    None where it does not answer.
    """
    try:
        with closing(open_stream(url, policy)) as stream:
            return stream.identity
    except SampleFault:
        return None


def change_of(url: str, was: list | None, policy: ReadPolicy) -> str:
    """What happened to a shard since its source was this: GONE, CHANGED or nothing that can be told without reading."""
    now = source_of(url, policy)
    if was is None or now is None:
        return "" if was is None else GONE
    return CHANGED if Identity(*was).differs(now) else ""


def reader_of(data: str | None = None, allow_private_hosts: bool = False) -> ShardReader:
    """A reader of shards whose addresses stand in tables. data: the shards again, where these are without secrets."""
    addresses = {canonical(shard.url): shard.url for shard in (expand_shards(data) if data else ())}
    return ShardReader(ReadPolicy(public_only=not allow_private_hosts), addresses=addresses)


def content_of(raw: Raw) -> bytes:
    """16 bytes that change with any member of a sample as it was read, or its name."""
    sums = hashlib.blake2b(digest_size=16)
    for suffix in sorted(suffixes_of(raw)):
        sums.update(f"{len(suffix)} {suffix} {len(raw[suffix])} ".encode() + raw[suffix])
    return sums.digest()
