"""Shards that are kept in memory: the same samples, read once, and never what is stale, damaged or large."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from tiny_tars import members, write_shards, write_tar

from prolip.data.captions import Selector
from prolip.data.faults import FaultCounter
from prolip.data.order import Cursor
from prolip.data.order import KeptShards, Place, ShardSource
from prolip.data.reading.remote import ReadPolicy
from prolip.data.reading.tar import ShardReader


@dataclass(frozen=True)
class Counted(ShardReader):
    """A reader that counts how often it is asked for a shard."""

    times: Counter = field(default_factory=Counter)

    def __call__(self, url: str, on_fault: Any = None) -> Any:
        self.times[url] += 1
        return super().__call__(url, on_fault)


def drawn(source: Any, count: int, faults: FaultCounter | None = None) -> list[dict[str, Any]]:
    stream = source.stream(Place(0, 0, 0, 1), faults if faults is not None else FaultCounter())
    return [row.raw for row in islice(stream, count)]


@pytest.mark.parametrize("kind", ["passes", "by sample", "resampled"])
def test_kept_shards_give_the_samples_that_reading_each_time_gives(tmp_path, kind):
    urls, select = tuple(write_shards(tmp_path, [9] * 3)), Selector.parse("group=objects|food drink")

    def source(room: int) -> tuple[Any, Counter]:
        reader, kept = Counted(), KeptShards(room)
        if kind == "resampled":
            return ShardSource(urls, select, 4, False, reader, kept, (1.0, 2.0, 1.0)), reader.times
        return ShardSource(urls, select, 4, kind == "by sample", reader, kept), reader.times

    (kept, once), (read, often) = source(1 << 20), source(0)
    assert drawn(kept, 180) == drawn(read, 180)
    assert once == dict.fromkeys(urls, 1)
    assert min(often.values()) > 5


def test_what_a_reader_does_to_a_sample_is_not_in_the_next_pass(tmp_path):
    source = ShardSource(tuple(write_shards(tmp_path, [3])), shuffle_buffer=1)
    for raw in drawn(source, 3):
        raw.clear()
    assert all(raw["png"] and raw["__key__"] for raw in drawn(source, 6))


def test_a_shard_that_was_written_again_is_read_again(tmp_path):
    url = write_tar(tmp_path / "0.tar", [("old", members(0))])
    source = ShardSource((url,), shuffle_buffer=1)
    assert [raw["__key__"] for raw in drawn(source, 2)] == ["old"] * 2
    room = source.kept.room
    write_tar(tmp_path / "0.tar", [("new", members(1))])
    os.utime(url, ns=(1, 1))  # within the clock's tick the sizes are the same
    assert [raw["__key__"] for raw in drawn(source, 2)] == ["new"] * 2
    assert abs(source.kept.room - room) < 100  # the old sample is gone: their pictures differ by a few bytes
    os.remove(url)
    faults = FaultCounter()
    assert not list(islice(source.one_pass(Place(0, 0, 0, 1), faults, Cursor()), 1))
    assert faults.kinds == {"unreadable shard": 1}


def test_faults_are_counted_in_every_pass(tmp_path):
    parts = [("a", members(0)), ("b", {**members(1), "json": b"{"}), ("a", members(0)), ("c", members(2))]
    url = write_tar(tmp_path / "0.tar", parts)
    cut = tmp_path / "cut.tar"
    cut.write_bytes(Path(url).read_bytes()[:1000])
    source, counts = ShardSource((url, str(cut)), Selector.parse("group=objects|animals nature"), 1), []
    for _ in range(3):
        faults = FaultCounter()
        list(source.one_pass(Place(0, 0, 0, 1), faults, Cursor()))
        counts.append((faults.kinds, faults.shards, faults.samples))
    assert counts[0] == counts[1] == counts[2]
    assert counts[0][0]["duplicate key"] == counts[0][0]["bad json"] == counts[0][0]["broken shard"] == 1


def test_there_is_a_bound_and_what_is_beyond_it_is_read_each_time(tmp_path):
    urls = tuple(write_shards(tmp_path, [4] * 3))
    size = os.path.getsize(urls[0])
    reader = Counted()
    source = ShardSource(urls, None, 1, False, reader, KeptShards(size))  # a sample takes less than its tar: one fits
    drawn(source, 60)
    assert sorted(reader.times.values())[0] == 1 and sorted(reader.times.values())[1] > 2
    assert 0 <= source.kept.room < size


def test_what_is_no_local_file_is_not_kept(tmp_path):
    url = f"pipe:cat {write_shards(tmp_path, [3])[0]}"
    reader = Counted(ReadPolicy(pipes=True))
    assert len(drawn(ShardSource((url,), None, 1, False, reader), 9)) == 9
    assert reader.times[url] == 3
