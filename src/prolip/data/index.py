"""Write a shard index, of samples, bytes and SHA-256: every shard is read once by the strict reader."""

from __future__ import annotations

import json
import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import fsspec

from prolip.data.faults import SampleFault, ShardFault
from prolip.data.reading.addresses import check_address
from prolip.data.reading.entries import (
    INDEX_NAME,
    CheckedStream,
    Entry,
    ShardIndex,
    canonical,
    parent,
    read_index,
    to_json,
)
from prolip.data.reading.opening import ReadPolicy, is_local, local_path, open_stream
from prolip.data.reading.shards import expand_shards
from prolip.data.reading.tar import read_shard
from prolip.data.samples.sample import has_image
from prolip.data.survey import survey
from prolip.utils.outputs import check_output, replacing

#: Shards may be commands.
PIPES = ReadPolicy(pipes=True)


class IndexedShard(NamedTuple):
    """What became of one shard. entry: None where it could not be read, message then says why, as where it is empty."""

    url: str
    entry: Entry | None
    faults: Counter[str]
    message: str = ""


def index_shard(url: str, policy: ReadPolicy) -> IndexedShard:
    faults: Counter[str] = Counter()

    def note(fault: SampleFault) -> None:
        faults[fault.kind] += 1

    try:
        stream = CheckedStream(open_stream(url, policy, note))
        samples = sum(map(has_image, read_shard(url, note, stream=stream)))
    except ShardFault as fault:
        return IndexedShard(url, None, faults + Counter([fault.kind]), str(fault))
    message = "" if samples else f"0 samples: {survey([url], policy)}"
    return IndexedShard(url, Entry(samples, stream.length, stream.sha256.hexdigest()), faults, message)


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
    """Write an index to its place: whole or not at all."""
    data = json.dumps(to_json(index), indent=0).encode()
    if not is_local(index.place):
        with fsspec.open(index.place, "wb") as remote:  # object stores show an object once it is complete
            remote.write(data)
        return
    path = Path(local_path(index.place))
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def check_place(place: str) -> None:
    """ValueError, ImportError or OSError where no index can be written: reported before shards are read for hours."""
    check_address(place)
    if place.startswith(("http://", "https://")):
        raise ValueError(f"nothing can be written to {place}: say where the index goes with --output FILE")
    if not is_local(place):
        fsspec.get_filesystem_class(place.split("://")[0])
        return
    path = Path(local_path(place))
    if path.is_dir():
        raise ValueError(f"{place} is a folder: give a file, e.g. --output {path / INDEX_NAME}")
    if path.exists() and not path.is_file():  # a new file would take the place of the device
        raise ValueError(f"{place} is a device or a pipe: give a file with --output")
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {path.parent} for the index: make it, or give another --output")
    check_output(path)


def dropped(place: str, urls: Sequence[str]) -> str:
    """Words on the shards of the index at `place` that are none of `urls`; none where there is no such index."""
    try:
        old = read_index(place, ReadPolicy(retries=0))
    except (ValueError, ShardFault):
        return ""
    gone = sorted(set(old.names) - set(map(old.name_of, urls)))
    if not gone:
        return ""
    return f"{place} had {len(gone)} more shards, such as {gone[0]}, that were not given: they are in it no more"


def default_output(urls: Sequence[str]) -> str:
    """index.json in the folder of all shards; ValueError where they are in several, or are commands."""
    folders = sorted({parent(url) for url in urls})
    if len(folders) > 1 or any(url.startswith("pipe:") for url in urls):
        where = f"{len(folders)} folders ({folders[0]}, {folders[1]}...)" if len(folders) > 1 else "a command"
        raise ValueError(f"the shards come from {where}: say where the index goes with --output FILE")
    return f"{folders[0]}/{INDEX_NAME}"


def urls_of(sources: Iterable[str]) -> list[str]:
    """The shards of sources as `expand_shards` takes them, each once. ValueError for some that an index cannot tell."""
    shards = [shard for source in sources for shard in expand_shards(source, pipes=True)]
    urls = list(dict.fromkeys(shard.url for shard in shards))
    if len(set(map(canonical, remote := [url for url in urls if not is_local(url)]))) < len(remote):
        raise ValueError(
            "some shards differ in user info or query alone, which an index does not hold: index them "
            "under addresses of their own"
        )
    return urls


def build_index(
    urls: Sequence[str],
    place: str | None = None,
    workers: int = 1,
    policy: ReadPolicy = PIPES,
    seen: Callable[[IndexedShard], None] = lambda shard: None,
) -> tuple[str, str]:
    """Read shards and write their index; returns its place, which is empty where none could be read, and `dropped`.

    place: `default_output` without. seen: is called with what became of each shard. Raises ValueError, ImportError and
    OSError before anything is read where no index can be written there, and OSError where that fails at the end.
    """
    place = place or default_output(urls)
    check_place(place)
    entries: dict[str, Entry] = {}
    for result in index_shards(urls, policy, workers):
        seen(result)
        if result.entry is not None:
            entries[canonical(result.url)] = result.entry
    if not entries:
        return "", ""
    gone = dropped(place, urls)
    try:
        write_index(ShardIndex.of(place, entries))
    except Exception as error:  # every store has its own exceptions
        raise OSError(f"{place} cannot be written ({error}): make room, or give another --output") from error
    return place, gone
