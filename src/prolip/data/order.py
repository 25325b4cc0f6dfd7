"""The order of the data: the rows of each of the S = ranks x workers streams in an epoch, and each stream's position.

Pass p of epoch e has one permutation, a function of (seed, e, p); stream s takes its elements s, s + S, s + 2 S, ...
A stream that reaches the end of its pass before the epoch ends continues with the next.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, count, islice
from typing import Any, NamedTuple

import torch
import webdataset as wds
from torch import Tensor

from prolip.data.captions import Selector, stable_hash
from prolip.data.faults import FaultCounter, SampleFault, ShardFault
from prolip.data.reading.stream import is_local, local_path
from prolip.data.reading.tar import ShardReader, survey
from prolip.data.samples import Raw, Row, is_selected

EMPTY_PASSES = 10  # passes without a sample after which a stream stops: with `select`, single passes may be empty
ROOM, OVERHEAD = 64 << 20, 512  # bytes of small shards that a process keeps, and overhead per sample
#: (number of the shard in the stream's order, its URL, counter of faults) -> those of its samples that are ours
ReadShard = Callable[[int, str, FaultCounter], Iterator[Raw]]


class Place(NamedTuple):
    """A stream of an epoch: stream = worker * ranks + rank, out of `streams` = ranks * workers."""

    seed: int
    epoch: int
    stream: int
    streams: int


@dataclass
class Cursor:
    """The position of a stream in its epoch."""

    turn: int = 0  # current pass
    drawn: int = 0  # rows of this pass already returned, usable or not
    shards: list[int] = field(default_factory=list)  # samples returned from each shard opened in this pass
    ended: bool = False  # whether the last shard was read to its end and no other follows in this pass

    def next_turn(self) -> None:
        """Start the next pass."""
        self.turn, self.drawn, self.shards, self.ended = self.turn + 1, 0, [], False


class Ticket(NamedTuple):
    """A sample by its position: the number of its shard in the stream's order, and its number in the shard."""

    shard: int
    sample: int


def shuffled(
    order: Iterator[tuple[str, int]],
    read: ReadShard,
    cursor: Cursor,
    buffer: int,
    rng: random.Random,
    faults: FaultCounter,
) -> Iterator[tuple[Raw, int]]:
    """Yield the samples of (URL, occurrence) of shards through a shuffle buffer, from `cursor` on, and advance it.

    The buffer's order depends on the number of samples, not on their content. So it is replayed on tickets up to
    `cursor.drawn`, which opens no shard; then only the shards of the tickets left in the buffer are read again.
    """
    passed = list(islice(order, len(cursor.shards)))
    waiting: set[Ticket] = set()

    def tickets() -> Iterator[Ticket]:
        for shard, given in enumerate(list(cursor.shards)):
            for sample in range(given):
                ticket = Ticket(shard, sample)
                waiting.add(ticket)
                yield ticket

    rows: Iterator[Any] = chain(tickets(), fresh_samples(passed, order, read, cursor, faults))
    if buffer > 1:  # it starts at a fifth of its size (OpenCLIP's 1000 of 5000), then fills up
        rows = wds.filters.shuffle(buffer, initial=max(1, buffer // 5), rng=rng)(rows)
    for ticket in islice(rows, cursor.drawn):
        waiting.remove(ticket)
    recovered: dict[Ticket, Raw] = {}
    for number in sorted({ticket.shard for ticket in waiting}):
        last = max(ticket.sample for ticket in waiting if ticket.shard == number)
        samples = islice(read(number, passed[number][0], FaultCounter()), last + 1)
        found = {Ticket(number, index): raw for index, raw in enumerate(samples) if Ticket(number, index) in waiting}
        recovered.update(found)
    for row in rows:
        cursor.drawn += 1
        if not isinstance(row, Ticket):
            yield row
        elif row in recovered:
            yield recovered.pop(row), passed[row.shard][1]
        else:
            faults.samples += 1
            lost = SampleFault("lost at restart", f"sample {row.sample} was in the shuffle buffer but no longer exists")
            faults.add(lost, url=passed[row.shard][0])


def fresh_samples(
    passed: list[tuple[str, int]],
    order: Iterator[tuple[str, int]],
    read: ReadShard,
    cursor: Cursor,
    faults: FaultCounter,
) -> Iterator[tuple[Raw, int]]:
    """Yield the samples that have not entered the buffer: the rest of the last shard passed, then later shards."""
    if cursor.ended:
        return
    for number, (url, occurrence) in enumerate(chain(passed[-1:], order), max(len(passed) - 1, 0)):
        if number < len(passed):
            known = faults.drain()
            samples = read(number, url, faults)
            for _ in islice(samples, cursor.shards[-1]):
                pass
            faults.drain()  # already counted before the interruption
            faults.merge(known)
        else:
            cursor.shards.append(0)
            samples = read(number, url, faults)
        for raw in samples:
            cursor.shards[-1] += 1
            yield raw, occurrence
    cursor.ended = True


class KeptShards:
    """Cache of the samples of small undamaged local shards, up to `room` bytes; reading costs as much as decoding."""

    def __init__(self, room: int = ROOM):
        self.room = room
        self._kept: dict[str, tuple[Any, list[Raw], int]] = {}  # file -> its mark, samples and their bytes

    def get(self, url: str) -> list[Raw] | None:
        """Return copies of the samples of a shard that was kept and has not changed since."""
        mark, samples, _ = self._kept.get(url, (None, [], 0))
        return [dict(sample) for sample in samples] if mark is not None and mark == mark_of(url) else None

    def keeping(self, url: str, samples: Iterator[Raw], kinds: set[str]) -> Iterator[Raw]:
        """Yield the same samples, and keep them at the end if `kinds` of faults is empty."""
        mark, held, size = mark_of(url), list[Raw](), 0
        fits = mark is not None and mark[1] <= self.room
        for sample in samples:
            if fits:
                held.append(dict(sample))
                size += OVERHEAD + sum(len(part) for part in sample.values())
                fits = size <= self.room
            yield sample
        if fits and not kinds and mark == mark_of(url):
            *_, before = self._kept.get(url, (0,))  # an older file, or another stream was faster
            self.room += before - size
            self._kept[url] = (mark, held, size)


def mark_of(url: str) -> tuple[int, int] | None:
    """Return the modification time and size of a local file; None for anything else."""
    with suppress(OSError, ValueError):  # ValueError: a zero byte in the path
        if is_local(url):
            found = os.stat(local_path(url))
            return found.st_mtime_ns, found.st_size
    return None


@dataclass(frozen=True)
class ShardSource:
    """Webdataset shards, read in passes or, with `weights`, drawn with replacement in proportion to the weights.

    by_sample: every stream reads all (few) shards and keeps its share.
    """

    urls: Sequence[str]
    selector: Selector | None = None
    shuffle_buffer: int = 5000
    by_sample: bool = False
    reader: ShardReader = ShardReader()
    kept: KeptShards = field(default_factory=KeptShards, compare=False)
    weights: tuple[float, ...] | None = None

    def stream(self, place: Place, faults: FaultCounter, cursor: Cursor | None = None) -> Iterator[Row]:
        """Yield passes over this stream's share, each through its own seeded shuffle buffer."""
        cursor = cursor or Cursor()
        empty = 0
        while True:
            empty = empty + 1 if not cursor.drawn else 0
            for raw, occurrence in self.one_pass(place, faults, cursor):
                empty = 0
                yield Row(raw, occurrence)
            if empty == EMPTY_PASSES or self.weights:  # the only pass of weighted shards ends if no sample is found
                why = "" if faults.examples else f": {survey(self.urls, self.reader.policy)}"
                shards = EMPTY_PASSES * len(self.urls)
                tried = f"{shards} shards" if self.weights else f"{empty} passes over the data"
                faults.fail(f"stream {place.stream} of {place.streams} found no sample in {tried}{why}")
            cursor.next_turn()

    def one_pass(self, place: Place, faults: FaultCounter, cursor: Cursor) -> Iterator[tuple[Raw, int]]:
        """Yield the rest of a stream's share of the cursor's pass: (raw sample, occurrence)."""
        seed, epoch, stream, streams = place
        if self.weights:
            rng = random.Random(stable_hash(seed, epoch, stream, "resampled buffer"))
            opened = self._draw_shards(place, cursor)
        else:
            order = list(range(len(self.urls)))  # the same on every stream
            random.Random(stable_hash(seed, epoch, cursor.turn, "shards")).shuffle(order)
            mine = order if self.by_sample else order[stream::streams]
            rng = random.Random(stable_hash(seed, epoch, cursor.turn, stream, "buffer"))
            opened = ((self.urls[number], cursor.turn) for number in mine)

        def read(number: int, url: str, faults: FaultCounter) -> Iterator[Raw]:
            if not self.by_sample:
                return self._samples(url, faults)
            counter = faults if number % streams == stream else FaultCounter()  # one stream counts the shared faults
            return islice(self._samples(url, counter), (stream - number) % streams, None, streams)

        return shuffled(opened, read, cursor, self.shuffle_buffer, rng, faults)

    def _draw_shards(self, place: Place, cursor: Cursor) -> Iterator[tuple[str, int]]:
        """Yield shards until too many in a row were empty."""
        rng = random.Random(stable_hash(place.seed, place.epoch, place.stream, "resampled shards"))
        times: Counter[str] = Counter()
        empty = 0
        for number in count():
            url = rng.choices(self.urls, self.weights)[0]
            yield url, times[url]
            times[url] += 1
            empty = 0 if cursor.shards[number] else empty + 1
            if empty == EMPTY_PASSES * len(self.urls):
                return

    def _samples(self, url: str, faults: FaultCounter) -> Iterator[Raw]:
        """Yield the samples of a shard that the selector keeps; faults are counted and end at most the shard."""
        faults.shards += 1
        seen: set[str] = set()

        def note(fault: SampleFault) -> None:
            seen.add(fault.kind)
            faults.add(fault, url=url)

        def selected() -> Iterator[Raw]:
            for raw in self.reader(url, note):
                faults.lost_in_a_row = 0
                try:
                    keep = is_selected(raw, self.selector)
                except SampleFault as fault:
                    seen.add(fault.kind)
                    faults.lose_sample(fault, raw["__key__"], url)
                    continue
                if keep:
                    yield raw

        if (samples := self.kept.get(url)) is not None:
            faults.lost_in_a_row = 0
            yield from samples
            return
        try:
            yield from self.kept.keeping(url, selected(), seen)
        except ShardFault as fault:
            faults.lose_shard(fault, url)


class Groups(NamedTuple):
    """Rows to read together, such as a row group of a table."""

    of_row: Tensor  # group of each row, (rows,) int64
    sizes: Tensor  # size of each group, as a share of a process's memory, (groups,) float64

    def together(self, order: Tensor, generator: torch.Generator) -> Tensor:
        """Return the same permutation, but with as many groups at a time, in random order, as a process keeps."""
        turn, now, filled = torch.empty(len(self.sizes), dtype=torch.int64), 0, 0.0
        for group in torch.randperm(len(turn), generator=generator).tolist():
            size = float(self.sizes[group])
            now, filled = (now + 1, size) if filled + size > 1 else (now, filled + size)
            turn[group] = now
        return order[turn[self.of_row[order]].argsort(stable=True)]


@dataclass(frozen=True)
class RowSource:
    """Rows that are known in advance (CSV, image folders): row i of the permutation goes to stream i % S.

    read: row number -> raw sample, SampleFault if its file is missing. texts: the same without opening the image.
    """

    length: int
    read: Callable[[int], Raw]
    texts: Callable[[int], Raw] | None = None
    groups: Groups | None = None

    def stream(self, place: Place, faults: FaultCounter, cursor: Cursor | None = None) -> Iterator[Row]:
        """Yield passes over this stream's share of the permutation."""
        if place.stream >= self.length:
            raise ValueError(f"{self.length} rows for {place.streams} streams are too few. Use fewer ranks or workers")
        cursor = cursor or Cursor()
        faults.rows = len(range(place.stream, self.length, place.streams))
        while True:
            generator = torch.Generator()
            generator.manual_seed(stable_hash(place.seed, place.epoch, cursor.turn, "rows", bits=63))
            order = torch.randperm(self.length, generator=generator)
            if self.groups is not None:
                order = self.groups.together(order, generator)
            for row in order[place.stream :: place.streams][cursor.drawn :].tolist():
                cursor.drawn += 1
                try:
                    raw = self.read(row)
                except SampleFault as fault:
                    faults.lose_sample(fault, "" if self.texts is not None else f"row {row}")
                    continue
                yield Row(raw, cursor.turn)
            cursor.next_turn()


@dataclass(frozen=True)
class SyntheticSource:
    """Generated rows: sample i of `length` goes to stream i % S, the same in every pass."""

    length: int

    def stream(self, place: Place, faults: FaultCounter, cursor: Cursor | None = None) -> Iterator[Row]:
        """Yield numbered rows without content."""
        cursor = cursor or Cursor()
        while True:
            for index in range(place.stream, self.length, place.streams)[cursor.drawn :]:
                cursor.drawn += 1
                yield Row({"__key__": f"synthetic-{index}", "index": index}, cursor.turn)
            cursor.next_turn()


Source = ShardSource | RowSource | SyntheticSource  # anything with an endless stream of rows for every place
