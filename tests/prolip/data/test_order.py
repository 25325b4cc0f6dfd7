"""The order of rows by seed, epoch and stream; a stream resumes from any point; small shards are kept."""

import json
import os
from collections import Counter
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_tars import members, write_shards, write_tar

from prolip.data.captions import Selector
from prolip.data.faults import FaultCounter, SampleFault, TooManyBadSamples
from prolip.data.order import Cursor, Groups, KeptShards, Place, RowSource, ShardSource, SyntheticSource
from prolip.data.reading import tar
from prolip.data.reading.remote import ReadPolicy
from prolip.data.reading.tar import ShardReader

FIRST = Place(0, 0, 0, 1)
EVERY_ROW = RowSource(50, lambda row: {"__key__": row})


def read(source, count, place=FIRST, faults=None, cursor=None):
    """The first rows of a stream, each counted as good when it is read, as the loader counts them."""
    faults, found = FaultCounter() if faults is None else faults, []
    for row in islice(source.stream(place, faults, cursor), count):
        faults.use_sample()
        found.append((row.raw["__key__"], row.occurrence))
    return found


def keys(source, count, stream=0, streams=1, epoch=0, seed=0):
    return [key for key, _ in read(source, count, Place(seed, epoch, stream, streams))]


def passes_of(rows, count):
    return [[key for key, occurrence in rows if occurrence == turn] for turn in range(count)]


@pytest.mark.parametrize("by_sample", [False, True])
@pytest.mark.parametrize("streams", [1, 2, 4])
def test_a_pass_gives_every_sample_to_one_stream(tmp_path, streams, by_sample):
    source = ShardSource(tuple(write_shards(tmp_path, [6] * 4)), shuffle_buffer=5, by_sample=by_sample)
    found = [key for stream in range(streams) for key in keys(source, 24 // streams, stream, streams)]
    assert sorted(found) == [f"s{i:03d}" for i in range(24)] != found


def test_stream_s_reads_every_s_th_shard_or_row_of_the_permutation(tmp_path):
    source = ShardSource(tuple(write_shards(tmp_path, [2] * 6)), shuffle_buffer=1)
    whole, rows = keys(source, 12), keys(EVERY_ROW, 50)
    shards = [whole[i : i + 2] for i in range(0, 12, 2)]
    for stream in range(3):
        assert keys(source, 4, stream, 3) == [key for shard in shards[stream::3] for key in shard]
    assert sorted(rows) == list(range(50)) and all(keys(EVERY_ROW, 25, s, 2) == rows[s::2] for s in (0, 1))


def test_passes_are_counted_and_differ_and_order_follows_seed_and_epoch(tmp_path):
    source = ShardSource(tuple(write_shards(tmp_path, [5] * 4)), shuffle_buffer=8)
    rows = read(source, 60)
    of_streams = [read(EVERY_ROW, 75, Place(0, 0, stream, 2)) for stream in (0, 1)]
    for found in (rows, sum(of_streams, []), read(EVERY_ROW, 150)):
        passes = passes_of(found, 3)
        assert len({tuple(one) for one in passes}) == 3 and len({tuple(sorted(one)) for one in passes}) == 1
        assert len(set(passes[0])) == len(passes[0]) == len(found) // 3
    first, second = passes_of(of_streams[0], 2)
    assert set(first) != set(second)  # a row changes streams, too
    for one in (source, EVERY_ROW):
        assert keys(one, 20) == keys(one, 20) != keys(one, 20, epoch=1)
        assert keys(one, 20) != keys(one, 20, seed=1)
    alone = ShardSource(source.urls[:1], shuffle_buffer=8)  # only the buffer distinguishes these
    assert len({tuple(keys(alone, 5, epoch=epoch, seed=seed)) for epoch in (0, 1) for seed in (0, 1)}) > 2


def test_rows_and_shards_are_in_the_order_that_checkpoints_count_on(tmp_path):
    source = ShardSource(tuple(write_shards(tmp_path, [2] * 3)), shuffle_buffer=3)
    drawn = ShardSource(source.urls, shuffle_buffer=1, weights=(1.0, 2.0, 1.0))
    found = ["".join(key[-1] for key in keys(one, 6, seed=3, epoch=1)) for one in (source, drawn)]
    assert found == ["124035", "014523"]
    assert keys(EVERY_ROW, 6, 1, 2, epoch=1, seed=3) == [5, 14, 48, 41, 13, 21]


def test_rows_that_cannot_be_read_are_counted_and_passed_over():
    faults = FaultCounter()
    assert sorted(key for key, _ in read(RowSource(10, read_row), 9, faults=faults)) == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    read(RowSource(10, read_row), 10, faults=faults)
    assert faults.kinds["missing image"] >= 1


def test_resampling_draws_shards_by_their_weights_with_replacement(tmp_path):
    source = ShardSource(tuple(write_shards(tmp_path, [1, 1, 1])), shuffle_buffer=1, weights=(1.0, 1.0, 4.0))
    rows = read(source, 1200)
    counts = Counter(key for key, _ in rows)
    for key, share in (("s000", 1 / 6), ("s001", 1 / 6), ("s002", 4 / 6)):
        assert abs(counts[key] / 1200 - share) < 5 * (share * (1 - share) / 1200) ** 0.5
    assert [occurrence for key, occurrence in rows if key == "s000"] == list(range(counts["s000"]))
    assert rows == read(source, 1200) != read(source, 1200, Place(0, 0, 1, 2))
    assert rows != read(source, 1200, Place(0, 1, 0, 1))


@pytest.mark.parametrize("by_sample", [False, True])
def test_selection_comes_before_the_split_and_faults_are_counted_once_over_all_streams(tmp_path, by_sample):
    urls = write_shards(tmp_path, [12] * 2)
    source = ShardSource(tuple(urls), Selector.parse("group=objects"), 1, by_sample)
    found = [key for stream in range(2) for key in keys(source, 4, stream, 2)]
    assert sorted(found) == [f"s{i:03d}" for i in range(2, 24, 3)]
    bad = write_tar(tmp_path / "bad.tar", [("a", members(0)), ("b", {"png": b"", "json": b"{"}), ("c", members(2))])
    cut = tmp_path / "cut.tar"
    cut.write_bytes(Path(urls[0]).read_bytes()[:1000])
    source = ShardSource((urls[0], bad, str(cut)), Selector.parse("group=objects|animals nature"), 1, by_sample)
    total = FaultCounter()
    passes = [source.one_pass(Place(0, 0, stream, 2), total, Cursor()) for stream in range(2)]
    found = [raw["__key__"] for one in passes for raw, _ in one]
    assert sorted(found) == ["a", "c", *(f"s{i:03d}" for i in range(12) if i % 3 != 1)]
    assert total.kinds == {"bad json": 1, "broken shard": 1, "half sample": 1} and total.shards == 3


def test_sources_without_samples_stop_early_and_with_few_samples_or_some_lost_shards_go_on(tmp_path):
    urls, select = tuple(write_shards(tmp_path, [4, 4])), Selector.parse("group=nothing")
    for source in (ShardSource(urls, select), ShardSource(urls, select, weights=(1.0, 1.0))):
        with pytest.raises(TooManyBadSamples, match="stream 0 of 1 found no sample"):
            read(source, 1)
    (tmp_path / "empty.tar").write_bytes(b"")
    with pytest.raises(TooManyBadSamples, match="broken shard 10"):
        read(ShardSource((str(tmp_path / "empty.tar"),)), 1)
    group = [json.dumps({"group": "yes" if number == 0 else "no"}).encode() for number in range(4)]
    parts = [[(f"k{n}", {**members(n), "json": group[n]})] for n in range(4)]
    mixed = tuple(write_tar(tmp_path / f"m{n}.tar", parts[n]) for n in range(4))
    for stream in range(2):  # its shards are deselected in one pass, and others in the next
        assert keys(ShardSource(mixed, Selector.parse("group=yes"), 1), 1, stream, 2) == ["k0"]
    gone, faults = [f"{tmp_path}/gone-{number}.tar" for number in range(1000)], FaultCounter()
    with pytest.raises(TooManyBadSamples, match="no sample in 20 consecutive shards, the last of which was .*gone-"):
        read(ShardSource(tuple(gone)), 1, faults=faults)
    assert faults.shards == 20
    urls = tuple(write_shards(tmp_path, [2] * 30) + gone[:30])
    assert len(keys(ShardSource(urls, shuffle_buffer=1), 60)) == 60


def test_rows_of_a_group_are_read_together_where_a_process_keeps_few():
    groups = Groups(torch.arange(60) // 5, torch.full((12,), 0.4, dtype=torch.float64))
    rows = RowSource(60, lambda row: {"__key__": row}, None, groups)
    passes = [keys(rows, 60, epoch=epoch) for epoch in range(3)]
    for order in passes:
        assert sorted(order) == list(range(60))
        blocks = [len({row // 5 for row in order[at : at + 10]}) for at in range(0, 60, 10)]
        assert blocks == [2] * 6 and any(order[at : at + 5] != sorted(order[at : at + 5]) for at in range(0, 60, 5))
    assert passes[0] != passes[1] != passes[2]
    whole = RowSource(60, rows.read, None, Groups(groups.of_row, groups.sizes / 12))
    for stream in (0, 1):  # all fit, and the order is that of any other rows
        assert keys(whole, 60, stream, 2) == keys(RowSource(60, rows.read), 60, stream, 2)


# --- stopped anywhere ------------------------------------------------------------------------------------------------
def read_row(row):
    if row % 7 == 3:
        raise SampleFault("missing image", "gone")
    return {"__key__": row}


def sources(folder):
    urls, select = tuple(write_shards(folder, [5, 1, 7, 4, 2, 6])), Selector.parse("group=objects|food drink")
    return {
        "shards": ShardSource(urls, shuffle_buffer=6),
        "no buffer": ShardSource(urls, shuffle_buffer=1),
        "large buffer": ShardSource(urls, shuffle_buffer=100),
        "selected": ShardSource(urls, select, 6),
        "by sample": ShardSource(urls[:2], shuffle_buffer=3, by_sample=True),
        "resampled": ShardSource(urls, shuffle_buffer=6, weights=(1.0, 3.0, 1.0, 1.0, 2.0, 1.0)),
        "rows": RowSource(23, read_row),
        "synthetic": SyntheticSource(23),
    }


def resumed(cursor):
    return Cursor(**asdict(cursor))


@pytest.mark.parametrize("stream, streams", [(0, 1), (2, 3)])
def test_a_stream_stopped_anywhere_goes_on_with_the_same_rows(tmp_path, stream, streams):
    place = Place(3, 1, stream, streams)
    for kind, source in sources(tmp_path).items():
        whole = read(source, 70, place)
        for stop in (0, 1, 5, 11, 12, 24, 25, 26, 40):
            cursor = Cursor()
            assert len(read(source, stop, place, cursor=cursor)) == stop
            assert read(source, 70 - stop, place, cursor=resumed(cursor)) == whole[stop:], (kind, stop)


def test_only_shards_with_samples_in_the_buffer_are_opened_again(tmp_path, monkeypatch):
    source, cursor = ShardSource(tuple(write_shards(tmp_path, [10] * 12)), shuffle_buffer=4), Cursor()
    waiting = -len(read(source, 100, cursor=cursor)) + sum(cursor.shards)
    opened, read_shard = [], tar.read_shard
    monkeypatch.setattr(tar, "read_shard", lambda url, *rest: opened.append(url) or read_shard(url, *rest))
    assert len(read(source, 1, cursor=resumed(cursor))) == 1
    assert 0 < waiting <= 4 and len(opened) <= waiting + 1


def test_faults_before_the_interruption_are_not_counted_again_and_lost_samples_are_named(tmp_path):
    urls = write_shards(tmp_path, [8] * 4)
    for url in urls[:2]:
        Path(url).write_bytes(Path(url).read_bytes()[:9000])
    source, whole = ShardSource(tuple(urls), shuffle_buffer=5), FaultCounter()
    read(source, 19, faults=whole)
    assert whole.kinds == {"broken shard": 2, "half sample": 2} and whole.shards == 4
    for stop in range(0, 19, 2):
        faults, cursor = FaultCounter(), Cursor()
        read(source, stop, faults=faults, cursor=cursor)
        read(source, 19 - stop, faults=faults, cursor=resumed(cursor))
        assert (faults.kinds, faults.shards) == (whole.kinds, whole.shards), stop
    faults, cursor = FaultCounter(), Cursor()
    read(source, 10, cursor=cursor)
    for url in urls:
        Path(url).write_bytes(b"")
    assert not list(islice(source.one_pass(FIRST, faults, resumed(cursor)), 12))
    assert faults.kinds["lost at restart"] == sum(cursor.shards) - 10 > 0
    assert any("was in the shuffle buffer" in example for example in faults.examples)


# --- kept in memory --------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Counted(ShardReader):
    """A reader that counts how often it is asked for a shard."""

    times: Counter = field(default_factory=Counter)

    def __call__(self, url: str, on_fault: Any = None) -> Any:
        self.times[url] += 1
        return super().__call__(url, on_fault)


def drawn(source, count):
    return [row.raw for row in islice(source.stream(FIRST, FaultCounter()), count)]


@pytest.mark.parametrize("kind", ["passes", "by sample", "resampled"])
def test_kept_shards_give_the_samples_that_reading_each_time_gives(tmp_path, kind):
    urls, select = tuple(write_shards(tmp_path, [9] * 3)), Selector.parse("group=objects|food drink")
    weights = (1.0, 2.0, 1.0) if kind == "resampled" else None
    readers = [Counted(), Counted()]
    keeping = zip(readers, (KeptShards(1 << 20), KeptShards(0)))
    kept, often = (ShardSource(urls, select, 4, kind == "by sample", *both, weights) for both in keeping)
    assert drawn(kept, 180) == drawn(often, 180)
    assert readers[0].times == dict.fromkeys(urls, 1) and min(readers[1].times.values()) > 5
    for raw in drawn(kept, 9):
        raw.clear()
    assert all(raw["png"] and raw["__key__"] for raw in drawn(kept, 9))  # what a reader does to a sample is its own


def test_a_shard_that_was_written_again_is_read_again(tmp_path):
    url = write_tar(tmp_path / "0.tar", [("old", members(0))])
    source = ShardSource((url,), shuffle_buffer=1)
    assert [raw["__key__"] for raw in drawn(source, 2)] == ["old"] * 2
    room = source.kept.room
    write_tar(tmp_path / "0.tar", [("new", members(1))])
    os.utime(url, ns=(1, 1))  # within the clock's tick the sizes are the same
    assert [raw["__key__"] for raw in drawn(source, 2)] == ["new"] * 2
    assert abs(source.kept.room - room) < 100  # the old sample is gone: their images differ by a few bytes
    os.remove(url)
    faults = FaultCounter()
    assert not list(source.one_pass(FIRST, faults, Cursor())) and faults.kinds == {"unreadable shard": 1}


def test_damaged_large_and_remote_shards_are_read_in_every_pass(tmp_path):
    parts = [("a", members(0)), ("b", {**members(1), "json": b"{"}), ("a", members(0)), ("c", members(2))]
    url, cut = write_tar(tmp_path / "0.tar", parts), tmp_path / "cut.tar"
    cut.write_bytes(Path(url).read_bytes()[:1000])
    source, counts = ShardSource((url, str(cut)), Selector.parse("group=objects|animals nature"), 1), []
    for _ in range(2):
        faults = FaultCounter()
        list(source.one_pass(FIRST, faults, Cursor()))
        counts.append((faults.kinds, faults.shards, faults.samples))
    assert counts[0] == counts[1]
    assert counts[0][0]["duplicate key"] == counts[0][0]["bad json"] == counts[0][0]["broken shard"] == 1
    urls = tuple(write_shards(tmp_path, [4] * 3))
    size, reader = os.path.getsize(urls[0]), Counted(ReadPolicy(pipes=True))
    source = ShardSource(urls, None, 1, False, reader, KeptShards(size))  # a sample takes less than its tar: one fits
    drawn(source, 60)
    assert sorted(reader.times.values())[0] == 1 and sorted(reader.times.values())[1] > 2
    assert 0 <= source.kept.room < size
    drawn(ShardSource((pipe := f"pipe:cat {urls[0]}",), None, 1, False, reader), 12)
    assert reader.times[pipe] == 3
