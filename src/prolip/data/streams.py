"""The order of the data: what each of the S = ranks x workers streams reads in an epoch.

An epoch is a sequence of passes. Pass p of epoch e has one permutation, a function of (seed, e, p), and stream s takes
its elements s, s + S, s + 2 S... A stream that reaches the end of its pass before the epoch ends goes on with the next.
"""
from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple, Protocol

import torch
import webdataset as wds

from prolip.data.captions import Selector, stable_hash
from prolip.data.faults import FaultCounter, SampleFault, ShardFault
from prolip.data.samples import Raw, Row, is_selected
from prolip.data.shards import read_shard

#: A stream that finds no sample in this many passes is stopped: with `select`, single passes may well be empty.
EMPTY_PASSES = 10


class Place(NamedTuple):
    """Which stream of which epoch: stream = worker * ranks + rank, of `streams` = ranks * workers."""

    seed: int
    epoch: int
    stream: int
    streams: int


class Source(Protocol):
    """Anything that has an endless stream of rows for every place."""

    def stream(self, place: Place, faults: FaultCounter) -> Iterator[Row]:
        """Rows in order; what cannot be read is counted in `faults`."""


@dataclass(frozen=True)
class ShardSource:
    """Webdataset shards, in passes.

    by_sample: there are fewer shards than streams, so every stream reads all shards and keeps every S-th sample.
    """

    urls: tuple[str, ...]
    selector: Selector | None = None
    shuffle_buffer: int = 5000
    by_sample: bool = False

    def stream(self, place: Place, faults: FaultCounter) -> Iterator[Row]:
        """Passes over this stream's share, each through its own seeded shuffle buffer."""
        empty = 0
        for turn in count():
            rng = random.Random(stable_hash(place.seed, place.epoch, turn, place.stream, "buffer"))
            rows = self.one_pass(place, turn, faults)
            empty += 1
            for raw in shuffled(rows, self.shuffle_buffer, rng):
                empty = 0
                yield Row(raw, turn)
            if empty == EMPTY_PASSES:
                faults.fail(f"stream {place.stream} of {place.streams} found no sample in {empty} passes over the data")

    def one_pass(self, place: Place, turn: int, faults: FaultCounter) -> Iterator[Raw]:
        """The samples of a stream's share of pass `turn`, in the order of the shards."""
        order = permuted_shards(self.urls, place, turn)
        if not self.by_sample:
            for url in order[place.stream :: place.streams]:
                yield from checked_samples(url, self.selector, faults)
            return
        position = count()
        for index, url in enumerate(order):
            # every stream meets every fault: it is counted by the one whose turn it is
            mine = faults if index % place.streams == place.stream else FaultCounter()
            for raw in checked_samples(url, self.selector, mine):
                if next(position) % place.streams == place.stream:
                    yield raw


@dataclass(frozen=True)
class ResampledSource:
    """Webdataset shards drawn with replacement, in proportion to their upsampling factors; there are no passes."""

    urls: tuple[str, ...]
    weights: tuple[float, ...]
    selector: Selector | None = None
    shuffle_buffer: int = 5000

    def stream(self, place: Place, faults: FaultCounter) -> Iterator[Row]:
        """Rows of shards drawn by a generator of (seed, epoch, stream), through a seeded shuffle buffer."""
        rng = random.Random(stable_hash(place.seed, place.epoch, place.stream, "resampled buffer"))
        yield from shuffled(self._rows(place, faults), self.shuffle_buffer, rng)

    def _rows(self, place: Place, faults: FaultCounter) -> Iterator[Row]:
        rng = random.Random(stable_hash(place.seed, place.epoch, place.stream, "resampled shards"))
        times: Counter[str] = Counter()
        empty = 0
        while empty < EMPTY_PASSES * len(self.urls):
            url = rng.choices(self.urls, self.weights)[0]
            empty += 1
            for raw in checked_samples(url, self.selector, faults):
                empty = 0
                yield Row(raw, times[url])
            times[url] += 1
        faults.fail(f"stream {place.stream} of {place.streams} found no sample in {empty} shards")


@dataclass(frozen=True)
class RowSource:
    """Rows that are known beforehand (CSV, image folders): row i of the permutation goes to stream i % S.

    read: row number -> raw sample, SampleFault where its file is missing.
    """

    length: int
    read: Callable[[int], Raw]

    def stream(self, place: Place, faults: FaultCounter) -> Iterator[Row]:
        """Passes over this stream's share of the permutation."""
        if place.stream >= self.length:
            raise ValueError(f"{self.length} rows for {place.streams} streams: use fewer ranks or workers")
        for turn in count():
            generator = torch.Generator().manual_seed(stable_hash(place.seed, place.epoch, turn, "rows", bits=63))
            order = torch.randperm(self.length, generator=generator)[place.stream :: place.streams]
            for row in order.tolist():
                try:
                    raw = self.read(row)
                except SampleFault as fault:
                    faults.samples += 1
                    faults.add(fault, f"row {row}")
                    continue
                yield Row(raw, turn)


def permuted_shards(urls: Sequence[str], place: Place, turn: int) -> list[str]:
    """The shards in the order of one pass, the same on every stream."""
    order = list(urls)
    random.Random(stable_hash(place.seed, place.epoch, turn, "shards")).shuffle(order)
    return order


def checked_samples(url: str, selector: Selector | None, faults: FaultCounter) -> Iterator[Raw]:
    """The samples of a shard that the selector keeps; what goes wrong is counted, and ends no more than the shard."""
    faults.shards += 1
    try:
        for raw in read_shard(url, lambda fault: faults.add(fault, url=url)):
            try:
                keep = is_selected(raw, selector)
            except SampleFault as fault:
                faults.samples += 1
                faults.add(fault, raw["__key__"], url)
                continue
            if keep:
                yield raw
    except ShardFault as fault:
        faults.add(fault, url=url)


def shuffled(rows: Iterator, size: int, rng: random.Random) -> Iterator:
    """webdataset's shuffle buffer: hands out from a fifth of its size on (OpenCLIP's 1000 of 5000), then fills up."""
    return wds.filters.shuffle(size, initial=max(1, size // 5), rng=rng)(rows) if size > 1 else rows
