"""The position of a stream in its epoch, from which it resumes exactly, reading little of the used shards."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, NamedTuple

import webdataset as wds

from prolip.data.faults import FaultCounter, SampleFault
from prolip.data.samples import Raw


@dataclass
class Cursor:
    """The position of a stream in its epoch.

    turn: its pass; drawn: rows of this pass that it has handed out, good or bad; shards: samples that each shard opened
    in this pass has given; ended: the last of them was read to its end, and no other follows in this pass.
    """

    turn: int = 0
    drawn: int = 0
    shards: list[int] = field(default_factory=list)
    ended: bool = False

    def next_turn(self) -> None:
        """Begin the next pass."""
        self.turn, self.drawn, self.shards, self.ended = self.turn + 1, 0, [], False


class Opened(NamedTuple):
    """A shard in the order of a stream. occurrence: how often the stream had opened it before, this epoch."""

    url: str
    occurrence: int


class Ticket(NamedTuple):
    """A sample by its place: the number of its shard in the stream's order, and its own in the shard."""

    shard: int
    sample: int


#: (number of the shard in the stream's order, its URL, where to count faults) -> those of its samples that are ours
ReadShard = Callable[[int, str, FaultCounter], Iterator[Raw]]


@dataclass
class ShuffledShards:
    """The samples of a sequence of shards through a shuffle buffer, from `cursor` on, which moves along.

    The buffer's order depends on the number of samples, not on their content. So it is run again on tickets, up to
    `cursor.drawn`, which opens no shard; then only the shards of the tickets left in it are read once more.
    """

    order: Iterator[Opened]
    read: ReadShard
    cursor: Cursor
    buffer: int
    rng: random.Random
    faults: FaultCounter

    def __post_init__(self) -> None:
        self.passed = list(islice(self.order, len(self.cursor.shards)))
        self.waiting: set[Ticket] = set()

    def __iter__(self) -> Iterator[tuple[Raw, int]]:
        """(raw sample, occurrence of its shard), endless if `order` is."""
        rows: Iterator[Any] = chain(self._tickets(), self._fresh())
        if self.buffer > 1:  # it starts at a fifth of its size (OpenCLIP's 1000 of 5000), then fills up
            rows = wds.filters.shuffle(self.buffer, initial=max(1, self.buffer // 5), rng=self.rng)(rows)
        for ticket in islice(rows, self.cursor.drawn):
            self.waiting.remove(ticket)
        recovered = self._recover()
        for row in rows:
            self.cursor.drawn += 1
            if not isinstance(row, Ticket):
                yield row
            elif row in recovered:
                yield recovered.pop(row), self.passed[row.shard].occurrence
            else:
                self.faults.samples += 1
                lost = SampleFault("lost at restart", f"sample {row.sample} was in the shuffle buffer, now it is gone")
                self.faults.add(lost, url=self.passed[row.shard].url)

    def _tickets(self) -> Iterator[Ticket]:
        """The samples that the buffer had received."""
        for shard, given in enumerate(list(self.cursor.shards)):
            for sample in range(given):
                ticket = Ticket(shard, sample)
                self.waiting.add(ticket)
                yield ticket

    def _fresh(self) -> Iterator[tuple[Raw, int]]:
        """The samples after them: the rest of the last shard, then the shards that follow."""
        if self.cursor.ended:
            return
        if self.passed:
            number, (url, occurrence) = len(self.passed) - 1, self.passed[-1]
            known = self.faults.drain()
            rest = self.read(number, url, self.faults)
            for _ in islice(rest, self.cursor.shards[-1]):
                pass
            self.faults.drain()  # these were counted before the interruption
            self.faults.merge(known)
            yield from self._count(rest, occurrence)
        for number, (url, occurrence) in enumerate(self.order, len(self.passed)):
            self.cursor.shards.append(0)
            yield from self._count(self.read(number, url, self.faults), occurrence)
        self.cursor.ended = True

    def _count(self, samples: Iterable[Raw], occurrence: int) -> Iterator[tuple[Raw, int]]:
        for raw in samples:
            self.cursor.shards[-1] += 1
            yield raw, occurrence

    def _recover(self) -> dict[Ticket, Raw]:
        found: dict[Ticket, Raw] = {}
        for number in sorted({ticket.shard for ticket in self.waiting}):
            last = max(ticket.sample for ticket in self.waiting if ticket.shard == number)
            samples = self.read(number, self.passed[number].url, FaultCounter())
            for index, raw in enumerate(islice(samples, last + 1)):
                if Ticket(number, index) in self.waiting:
                    found[Ticket(number, index)] = raw
        return found
