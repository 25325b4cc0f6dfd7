"""A stream that is stopped anywhere and started again from its cursor goes on as if nothing had happened."""

import random
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import pytest
from tiny_tars import write_shards

from prolip.data.captions import Selector
from prolip.data.faults import FaultCounter, SampleFault
from prolip.data.order import Cursor
from prolip.data.order import Place, RowSource, ShardSource
from prolip.data.reading import tar
from prolip.data.order import SyntheticSource

SIZES = [5, 1, 7, 4, 2, 6]


def read_row(row):
    if row % 7 == 3:
        raise SampleFault("missing image", "gone")
    return {"__key__": row}


def sources(folder):
    urls = tuple(write_shards(folder, SIZES))
    select = Selector.parse("group=objects|food drink")
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


def drawn(source, place, count, cursor=None):
    """The first rows of a stream, each counted as good when it is read, as the loader counts them."""
    faults, found = FaultCounter(), []
    for row in islice(source.stream(place, faults, cursor), count):
        faults.use_sample()
        found.append((row.raw["__key__"], row.occurrence))
    return found


@pytest.mark.parametrize("stream, streams_", [(0, 1), (1, 2), (2, 3)])
@pytest.mark.parametrize(
    "kind", ["shards", "no buffer", "large buffer", "selected", "by sample", "resampled", "rows", "synthetic"]
)
def test_a_stream_stopped_anywhere_goes_on_with_the_same_rows(tmp_path, kind, stream, streams_):
    source, place = sources(tmp_path)[kind], Place(3, 1, stream, streams_)
    whole = drawn(source, place, 70)
    for stop in (0, 1, 5, 11, 12, 24, 25, 26, 40):
        cursor = Cursor()
        assert len(drawn(source, place, stop, cursor)) == stop
        assert drawn(source, place, 70 - stop, Cursor(**asdict(cursor))) == whole[stop:], stop


def test_a_stream_may_be_stopped_again_and_again(tmp_path):
    source, place = sources(tmp_path)["shards"], Place(0, 0, 0, 1)
    whole = [row.raw["__key__"] for row in islice(source.stream(place, FaultCounter()), 60)]
    found, cursor, rng = [], Cursor(), random.Random(1)
    while len(found) < 60:
        cursor = Cursor(**asdict(cursor))
        found += [row.raw["__key__"] for row in islice(source.stream(place, FaultCounter(), cursor), rng.randint(1, 6))]
    assert found[:60] == whole


def test_only_shards_with_samples_in_the_buffer_are_opened_again(tmp_path, monkeypatch):
    source, place = ShardSource(tuple(write_shards(tmp_path, [10] * 12)), shuffle_buffer=4), Place(0, 0, 0, 1)
    cursor = Cursor()
    rows = list(islice(source.stream(place, FaultCounter(), cursor), 100))
    waiting = sum(cursor.shards) - len(rows)
    assert 0 < waiting <= 4
    opened, read_shard = [], tar.read_shard

    def spy(url, *rest):
        opened.append(Path(url).name)
        return read_shard(url, *rest)

    monkeypatch.setattr(tar, "read_shard", spy)
    again = source.stream(place, FaultCounter(), Cursor(**asdict(cursor)))
    next(again)
    assert len(opened) <= waiting + 1


def test_faults_before_the_interruption_are_not_counted_again(tmp_path):
    urls = write_shards(tmp_path, [8] * 4)
    for url in urls[:2]:
        Path(url).write_bytes(Path(url).read_bytes()[:9000])
    source, place = ShardSource(tuple(urls), shuffle_buffer=5), Place(0, 0, 0, 1)
    whole = FaultCounter()
    list(islice(source.stream(place, whole), 19))
    assert whole.kinds == {"broken shard": 2, "half sample": 2} and whole.shards == 4
    for stop in range(19):
        faults, cursor = FaultCounter(), Cursor()
        list(islice(source.stream(place, faults, cursor), stop))
        list(islice(source.stream(place, faults, Cursor(**asdict(cursor))), 19 - stop))
        assert (faults.kinds, faults.shards) == (whole.kinds, whole.shards), stop


def test_a_sample_that_is_gone_from_the_buffers_shard_is_named_and_counted(tmp_path):
    urls = write_shards(tmp_path, [8] * 4)
    source, place, cursor = ShardSource(tuple(urls), shuffle_buffer=8), Place(0, 0, 0, 1), Cursor()
    before = [row.raw["__key__"] for row in islice(source.stream(place, FaultCounter(), cursor), 20)]
    for url in urls:
        Path(url).write_bytes(b"")
    faults = FaultCounter()
    rest = list(islice(source.one_pass(place, faults, Cursor(**asdict(cursor))), 12))
    assert len(before) == 20 and not rest
    assert faults.kinds["lost at restart"] == sum(cursor.shards) - 20 > 0
    assert "was in the shuffle buffer" in faults.examples[0]
