"""The order of the data: the rows of each of the S = ranks x workers streams in an epoch.

Pass p of epoch e has one permutation, a function of (seed, e, p), and stream s takes its elements s, s + S, s + 2 S...
A stream that reaches the end of its pass before the epoch ends continues with the next.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, islice
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from prolip.data.captions import Selector, stable_hash
from prolip.data.faults import FaultCounter, SampleFault, ShardFault
from prolip.data.order.cursor import Cursor, Opened, ShuffledShards
from prolip.data.reading.stream import is_local, local_path
from prolip.data.reading.tar import ShardReader, survey
from prolip.data.samples import Raw, Row, is_selected

#: Passes without a sample that stop a stream: with `select`, single passes may be empty.
EMPTY_PASSES = 10
#: Bytes of small shards that a process keeps, and those of a sample besides its members.
ROOM, OVERHEAD = 64 << 20, 512


class Place(NamedTuple):
    """A stream of an epoch: stream = worker * ranks + rank, of `streams` = ranks * workers."""

    seed: int
    epoch: int
    stream: int
    streams: int


class Source(Protocol):
    """Anything that has an endless stream of rows for every place."""

    def stream(self, place: Place, faults: FaultCounter, cursor: Cursor | None = None) -> Iterator[Row]:
        """Rows in order, from `cursor` on, which moves along; `faults` counts what cannot be read."""


class KeptShards:
    """The samples of small local shards without a fault, up to `room` bytes, in each process.

    A corpus of a few megabytes is read many times, and parsing its tars costs as much as decoding its small images.
    """

    def __init__(self, room: int = ROOM):
        self.room = room
        self._kept: dict[str, tuple[Any, list[Raw], int]] = {}  # of a file its mark, samples and their bytes

    def get(self, url: str) -> list[Raw] | None:
        """Copies of the samples of a shard that was kept and has not changed since."""
        mark, samples, _ = self._kept.get(url, (None, [], 0))
        return [dict(sample) for sample in samples] if mark is not None and mark == mark_of(url) else None

    def keeping(self, url: str, samples: Iterator[Raw], faults: Collection[Any]) -> Iterator[Raw]:
        """The same samples, kept at their end if `faults` is empty then."""
        mark = mark_of(url)
        if mark is None or mark[1] > self.room:
            yield from samples
            return
        held: list[Raw] = []
        size = 0
        for sample in samples:
            if size <= self.room:
                held.append(dict(sample))
                size += OVERHEAD + sum(len(part) for part in sample.values())
            yield sample
        if size <= self.room and not faults and mark == mark_of(url):
            *_, before = self._kept.get(url, (0,))  # of an older file, or another stream was quicker
            self.room += before - size
            self._kept[url] = (mark, held, size)


def mark_of(url: str) -> tuple[int, int] | None:
    """Time of change and size of a local file; None for anything else."""
    with suppress(OSError, ValueError):  # the latter for a zero byte in it
        if is_local(url):
            found = os.stat(local_path(url))
            return found.st_mtime_ns, found.st_size
    return None


@dataclass(frozen=True)
class ShardSource:
    """Webdataset shards, in passes. by_sample: every stream reads all shards, which are few, and keeps its share."""

    urls: Sequence[str]
    selector: Selector | None = None
    shuffle_buffer: int = 5000
    by_sample: bool = False
    reader: ShardReader = ShardReader()
    kept: KeptShards = field(default_factory=KeptShards, compare=False)

    def among(self, streams: int) -> ShardSource:
        """The same shards for so many streams."""
        return replace(self, by_sample=len(self.urls) < streams)

    def stream(self, place: Place, faults: FaultCounter, cursor: Cursor | None = None) -> Iterator[Row]:
        """Passes over this stream's share, each through its own seeded shuffle buffer."""
        cursor = cursor or Cursor()
        empty = 0
        while True:
            empty = empty + 1 if not cursor.drawn else 0
            for raw, _ in self.one_pass(place, faults, cursor):
                empty = 0
                yield Row(raw, cursor.turn)
            if empty == EMPTY_PASSES:
                faults.fail(nothing_found(place, f"{empty} passes over the data", self.urls, self.reader, faults))
            cursor.next_turn()

    def one_pass(self, place: Place, faults: FaultCounter, cursor: Cursor) -> ShuffledShards:
        """The rest of a stream's share of the pass that the cursor is in."""
        order = list(range(len(self.urls)))  # the same on every stream
        random.Random(stable_hash(place.seed, place.epoch, cursor.turn, "shards")).shuffle(order)
        mine = order if self.by_sample else order[place.stream :: place.streams]
        rng = random.Random(stable_hash(place.seed, place.epoch, cursor.turn, place.stream, "buffer"))
        opened = (Opened(self.urls[number], cursor.turn) for number in mine)
        return ShuffledShards(opened, partial(self._read, place), cursor, self.shuffle_buffer, rng, faults)

    def _read(self, place: Place, number: int, url: str, faults: FaultCounter) -> Iterator[Raw]:
        """This stream's samples of a shard: all, or every S-th, from one that varies with the shard."""
        if not self.by_sample:
            return checked_samples(url, self.selector, faults, self.reader, self.kept)
        # every stream meets every fault: one of them counts it
        counter = faults if number % place.streams == place.stream else FaultCounter()
        start = (place.stream - number) % place.streams
        return islice(checked_samples(url, self.selector, counter, self.reader, self.kept), start, None, place.streams)


@dataclass(frozen=True)
class ResampledSource:
    """Webdataset shards drawn with replacement, in proportion to their upsampling factors, without passes."""

    urls: Sequence[str]
    weights: tuple[float, ...]
    selector: Selector | None = None
    shuffle_buffer: int = 5000
    reader: ShardReader = ShardReader()
    kept: KeptShards = field(default_factory=KeptShards, compare=False)

    def stream(self, place: Place, faults: FaultCounter, cursor: Cursor | None = None) -> Iterator[Row]:
        """Rows of shards drawn by a generator of (seed, epoch, stream), through a seeded shuffle buffer."""
        cursor = cursor or Cursor()
        rng = random.Random(stable_hash(place.seed, place.epoch, place.stream, "resampled buffer"))

        def read(number: int, url: str, faults: FaultCounter) -> Iterator[Raw]:
            return checked_samples(url, self.selector, faults, self.reader, self.kept)

        drawn = self._draw_shards(place, cursor)
        for raw, occurrence in ShuffledShards(drawn, read, cursor, self.shuffle_buffer, rng, faults):
            yield Row(raw, occurrence)
        shards = EMPTY_PASSES * len(self.urls)
        faults.fail(nothing_found(place, f"{shards} shards", self.urls, self.reader, faults))

    def _draw_shards(self, place: Place, cursor: Cursor) -> Iterator[Opened]:
        """Shards until too many in a row were empty."""
        rng = random.Random(stable_hash(place.seed, place.epoch, place.stream, "resampled shards"))
        times: Counter[str] = Counter()
        empty = 0
        for number in count():
            url = rng.choices(self.urls, self.weights)[0]
            yield Opened(url, times[url])
            times[url] += 1
            empty = 0 if cursor.shards[number] else empty + 1
            if empty == EMPTY_PASSES * len(self.urls):
                return


class Groups(NamedTuple):
    """Rows that are read together, as a row group of a table. of_row: group of each row, (rows,) int64; sizes: of each
    group, (groups,) float64, as a share of the memory of a process.
    """

    of_row: Tensor
    sizes: Tensor

    def together(self, order: Tensor, generator: torch.Generator) -> Tensor:
        """The same permutation, but as many groups at a time, in random order, as a process keeps."""
        turn, now, filled = torch.empty(len(self.sizes), dtype=torch.int64), 0, 0.0
        for group in torch.randperm(len(turn), generator=generator).tolist():
            size = float(self.sizes[group])
            now, filled = (now + 1, size) if filled + size > 1 else (now, filled + size)
            turn[group] = now
        return order[turn[self.of_row[order]].argsort(stable=True)]


@dataclass(frozen=True)
class RowSource:
    """Rows that are known beforehand (CSV, image folders): row i of the permutation goes to stream i % S.

    read: row number -> raw sample, SampleFault where its file is missing. texts: the same without opening the image.
    """

    length: int
    read: Callable[[int], Raw]
    texts: Callable[[int], Raw] | None = None
    groups: Groups | None = None

    def stream(self, place: Place, faults: FaultCounter, cursor: Cursor | None = None) -> Iterator[Row]:
        """Passes over this stream's share of the permutation."""
        if place.stream >= self.length:
            raise ValueError(f"{self.length} rows for {place.streams} streams: use fewer ranks or workers")
        cursor = cursor or Cursor()
        faults.rows = len(range(place.stream, self.length, place.streams))
        while True:
            seed = stable_hash(place.seed, place.epoch, cursor.turn, "rows", bits=63)
            generator = torch.Generator().manual_seed(seed)
            order = torch.randperm(self.length, generator=generator)
            if self.groups is not None:
                order = self.groups.together(order, generator)
            for row in order[place.stream :: place.streams][cursor.drawn :].tolist():
                cursor.drawn += 1
                try:
                    raw = self.read(row)
                except SampleFault as fault:
                    faults.lose_sample(fault, "" if self.texts is not None else f"row {row}")
                    faults.judge_chunk()  # the loader cannot, while this stream has nothing to hand out
                    continue
                yield Row(raw, cursor.turn)
            cursor.next_turn()


def nothing_found(place: Place, tried: str, urls: Sequence[str], reader: ShardReader, faults: FaultCounter) -> str:
    """The words for a stream that stays empty, with the content of the first shard where no fault explains it."""
    why = "" if faults.examples else f": {survey(urls, reader.policy)}"
    return f"stream {place.stream} of {place.streams} found no sample in {tried}{why}"


def checked_samples(
    url: str, selector: Selector | None, faults: FaultCounter, reader: ShardReader, kept: KeptShards
) -> Iterator[Raw]:
    """The samples of a shard that the selector keeps; faults are counted, and end no more than the shard."""
    faults.shards += 1
    seen: set[str] = set()

    def note(fault: SampleFault) -> None:
        seen.add(fault.kind)
        faults.add(fault, url=url)

    def selected() -> Iterator[Raw]:
        for raw in reader(url, note):
            faults.lost_in_a_row = 0
            try:
                keep = is_selected(raw, selector)
            except SampleFault as fault:
                seen.add(fault.kind)
                faults.lose_sample(fault, raw["__key__"], url)
                continue
            if keep:
                yield raw

    if (samples := kept.get(url)) is not None:
        faults.lost_in_a_row = 0
        yield from samples
        return
    try:
        yield from kept.keeping(url, selected(), seen)
    except ShardFault as fault:
        faults.lose_shard(fault, url)
