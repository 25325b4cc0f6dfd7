import json
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
import torch
from tiny_tars import members, write_shards, write_tar

from prolip.data.captions import Selector
from prolip.data.faults import FaultCounter, SampleFault, TooManyBadSamples
from prolip.data.order import Cursor
from prolip.data.order import Groups, Place, RowSource, ShardSource


def read(source, count, stream=0, streams=1, epoch=0, seed=0, faults=None):
    rows = source.stream(Place(seed, epoch, stream, streams), faults if faults is not None else FaultCounter())
    return [(row.raw["__key__"], row.occurrence) for row in islice(rows, count)]


def keys(*args, **kwargs):
    return [key for key, _ in read(*args, **kwargs)]


@pytest.mark.parametrize("by_sample", [False, True])
@pytest.mark.parametrize("streams", [1, 2, 4])
def test_a_pass_gives_every_sample_to_one_stream(tmp_path, streams, by_sample):
    source = ShardSource(tuple(write_shards(tmp_path, [6] * 4)), shuffle_buffer=5, by_sample=by_sample)
    found = [key for stream in range(streams) for key in keys(source, 24 // streams, stream, streams)]
    assert sorted(found) == [f"s{i:03d}" for i in range(24)]
    assert found != sorted(found)


def test_stream_s_reads_every_s_th_shard_of_the_permutation(tmp_path):
    source = ShardSource(tuple(write_shards(tmp_path, [2] * 6)), shuffle_buffer=1)
    whole = keys(source, 12)
    shards = [whole[i : i + 2] for i in range(0, 12, 2)]
    for stream in range(3):
        wanted = [key for shard in shards[stream::3] for key in shard]
        assert keys(source, 4, stream, 3) == wanted


def test_passes_are_counted_and_differ(tmp_path):
    source = ShardSource(tuple(write_shards(tmp_path, [5] * 4)), shuffle_buffer=8)
    rows = read(source, 60)
    passes = [[key for key, occurrence in rows if occurrence == turn] for turn in range(3)]
    assert [len(one) for one in passes] == [20, 20, 20]
    assert len({tuple(one) for one in passes}) == 3 and len({tuple(sorted(one)) for one in passes}) == 1


def test_order_follows_seed_and_epoch(tmp_path):
    source = ShardSource(tuple(write_shards(tmp_path, [5] * 4)), shuffle_buffer=8)
    assert keys(source, 20) == keys(source, 20)
    assert keys(source, 20) != keys(source, 20, epoch=1)
    assert keys(source, 20) != keys(source, 20, seed=1)
    alone = ShardSource(source.urls[:1], shuffle_buffer=8)  # only the buffer is left to tell these apart
    assert len({tuple(keys(alone, 5, epoch=epoch, seed=seed)) for epoch in (0, 1) for seed in (0, 1)}) > 2
    rows = RowSource(20, lambda row: {"__key__": row})
    assert keys(rows, 20) == keys(rows, 20) != keys(rows, 20, epoch=1)
    assert keys(rows, 20) != keys(rows, 20, seed=1)


def test_rows_go_to_streams_in_turn():
    source = RowSource(10, lambda row: {"__key__": row})
    whole = keys(source, 10)
    assert sorted(whole) == list(range(10))
    assert keys(source, 5, 0, 2) == whole[::2] and keys(source, 5, 1, 2) == whole[1::2]


@pytest.mark.parametrize("streams", [1, 2])
def test_passes_over_rows_within_an_epoch_have_orders_of_their_own(streams):
    source = RowSource(50, lambda row: {"__key__": row})
    of_streams = [read(source, 150 // streams, stream, streams) for stream in range(streams)]
    passes = [[key for rows in of_streams for key, occurrence in rows if occurrence == turn] for turn in range(3)]
    assert all(sorted(one) == list(range(50)) for one in passes)
    assert len({tuple(one) for one in passes}) == 3
    first = [[key for key, turn in of_streams[0] if turn == wanted] for wanted in (0, 1)]
    assert streams == 1 or set(first[0]) != set(first[1])  # a row changes streams, too


def test_rows_that_cannot_be_read_are_counted_and_passed_over():
    def read_row(row):
        if row == 3:
            raise SampleFault("missing image", "gone")
        return {"__key__": row}

    faults = FaultCounter()
    assert sorted(keys(RowSource(5, read_row), 4, faults=faults)) == [0, 1, 2, 4]
    keys(RowSource(5, read_row), 5, faults=faults)
    assert faults.kinds["missing image"] >= 1


def test_resampling_draws_shards_by_their_weights_with_replacement(tmp_path):
    urls = tuple(write_shards(tmp_path, [1, 1, 1]))
    source = ShardSource(urls, shuffle_buffer=1, weights=(1.0, 1.0, 4.0))
    rows = read(source, 1200)
    counts = Counter(key for key, _ in rows)
    for key, share in (("s000", 1 / 6), ("s001", 1 / 6), ("s002", 4 / 6)):
        assert abs(counts[key] / 1200 - share) < 5 * (share * (1 - share) / 1200) ** 0.5
    assert [occurrence for key, occurrence in rows if key == "s000"] == list(range(counts["s000"]))
    assert rows == read(source, 1200)
    assert rows != read(source, 1200, stream=1, streams=2)
    assert rows != read(source, 1200, epoch=1)


@pytest.mark.parametrize("by_sample", [False, True])
def test_selection_comes_before_the_split(tmp_path, by_sample):
    select = Selector.parse("group=objects")
    source = ShardSource(tuple(write_shards(tmp_path, [12] * 2)), select, 1, by_sample)
    found = [key for stream in range(2) for key in keys(source, 4, stream, 2)]
    assert sorted(found) == [f"s{i:03d}" for i in range(2, 24, 3)]


@pytest.mark.parametrize("by_sample", [False, True])
def test_faults_are_counted_once_over_all_streams(tmp_path, by_sample):
    good = write_shards(tmp_path, [2])[0]
    bad = write_tar(tmp_path / "bad.tar", [("a", members(0)), ("b", {"png": b"", "json": b"{"}), ("c", members(2))])
    cut = tmp_path / "cut.tar"
    cut.write_bytes(Path(good).read_bytes()[:1000])
    source = ShardSource((good, bad, str(cut)), Selector.parse("group=objects|animals nature"), 1, by_sample)
    total = FaultCounter()
    passes = [source.one_pass(Place(0, 0, stream, 2), total, Cursor()) for stream in range(2)]
    found = [raw["__key__"] for one in passes for raw, _ in one]
    assert sorted(found) == ["a", "c", "s000"]
    assert total.kinds == {"bad json": 1, "broken shard": 1, "half sample": 1}
    assert total.shards == 3


def test_a_source_without_a_single_sample_stops_instead_of_turning_for_ever(tmp_path):
    urls = tuple(write_shards(tmp_path, [4, 4]))
    select = Selector.parse("group=nothing")
    for source in (ShardSource(urls, select), ShardSource(urls, select, weights=(1.0, 1.0))):
        with pytest.raises(TooManyBadSamples, match="stream 0 of 1 found no sample"):
            read(source, 1)
    (tmp_path / "empty.tar").write_bytes(b"")
    with pytest.raises(TooManyBadSamples, match="broken shard 10"):
        read(ShardSource((str(tmp_path / "empty.tar"),)), 1)


def test_a_stream_whose_shards_are_deselected_in_one_pass_finds_others_in_the_next(tmp_path):
    def shard(number, group):
        record = json.dumps({"group": group}).encode()
        return write_tar(tmp_path / f"{number}.tar", [(f"k{number}", {**members(number), "json": record})])

    urls = tuple(shard(number, "yes" if number == 0 else "no") for number in range(4))
    source = ShardSource(urls, Selector.parse("group=yes"), 1)
    for stream in range(2):
        assert keys(source, 1, stream, 2) == ["k0"]


def test_a_source_that_is_down_is_not_asked_for_all_its_shards(tmp_path):
    urls = tuple(f"{tmp_path}/gone-{number}.tar" for number in range(1000))
    faults = FaultCounter()
    with pytest.raises(TooManyBadSamples, match="20 shards in a row gave no sample, the last one was .*gone-"):
        read(ShardSource(urls), 1, faults=faults)
    assert faults.shards == 20


def test_single_shards_that_are_lost_do_not_end_a_stream(tmp_path):
    good = write_shards(tmp_path, [2] * 30)
    urls = tuple(good + [f"{tmp_path}/gone-{number}.tar" for number in range(30)])
    assert len(keys(ShardSource(urls, shuffle_buffer=1), 60)) == 60


def test_rows_of_a_group_are_read_together_where_a_process_keeps_few():
    groups = Groups(torch.arange(60) // 5, torch.full((12,), 0.4, dtype=torch.float64))
    rows = RowSource(60, lambda row: {"__key__": str(row)}, None, groups)
    passes = [
        [int(row.raw["__key__"]) for row in islice(rows.stream(Place(0, epoch, 0, 1), FaultCounter()), 60)]
        for epoch in range(3)
    ]
    for order in passes:
        assert sorted(order) == list(range(60))
        blocks = [len({row // 5 for row in order[at : at + 10]}) for at in range(0, 60, 10)]
        assert blocks == [2] * 6 and any(order[at : at + 5] != sorted(order[at : at + 5]) for at in range(0, 60, 5))
    assert passes[0] != passes[1] != passes[2]
    whole = RowSource(60, rows.read, None, Groups(groups.of_row, groups.sizes / 12))
    alone = RowSource(60, rows.read)
    for place in (Place(0, 0, 0, 2), Place(0, 0, 1, 2)):
        found = [
            [row.raw["__key__"] for row in islice(source.stream(place, FaultCounter()), 60)]
            for source in (whole, alone)
        ]
        assert found[0] == found[1]  # all fit, and the order is that of any other rows
