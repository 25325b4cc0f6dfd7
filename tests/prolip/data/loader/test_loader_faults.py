"""Samples and shards that cannot be used: counted, replaced, fatal when too many; ranks step equally often."""

import time
from collections import Counter
from pathlib import Path

import pytest
from faulty_servers import FaultyServer
from tiny_loaders import build, epoch, with_bad_images, write_csv
from tiny_tars import letters, plain, write_shards

from prolip.data import faults
from prolip.data.faults import FaultCounter, TooManyBadSamples
from prolip.data.loader import DataConfig, build_loader
from prolip.data.reading.csv import TableError


@pytest.mark.parametrize("workers", [0, 2])
def test_corrupt_images_are_counted_and_replaced_by_other_samples(tmp_path, workers):
    loader = build(with_bad_images(tmp_path, 20, 4), workers=workers, max_bad_fraction=0.9, train_num_samples=40)
    batches = epoch(loader)
    assert len(batches) == 10 and all(key[0] == "g" for batch in batches for key in batch["key"])
    found = loader.faults()
    assert found["samples"] == 40 + found["bad image"] and 4 <= found["bad image"] <= 12
    before = found["bad image"]
    epoch(loader, 1)
    assert loader.faults()["bad image"] > before


def test_too_many_corrupt_images_end_the_epoch_with_kind_key_and_shard(tmp_path, monkeypatch):
    with pytest.raises(TooManyBadSamples) as error:
        epoch(build(with_bad_images(tmp_path, 20, 4)))
    for part in ("bad image", "'b", "bad.tar", "cannot identify image", "the limit is 1.0%", "--max-bad-fraction"):
        assert part in str(error.value)
    monkeypatch.setattr(faults, "LOST_SAMPLES", 1100)
    for limit, said in ((0.01, "1000 of 1000 samples"), (1.0, "1100 consecutive samples were unusable")):
        with pytest.raises(TooManyBadSamples, match=said):  # instead of turning for ever
            epoch(build(with_bad_images(tmp_path, 0, 30), workers=2, max_bad_fraction=limit))


def test_a_csv_without_a_single_image_stops_instead_of_turning_for_ever(tmp_path):
    data = write_csv(tmp_path, 12)
    for image in tmp_path.glob("*.png"):
        image.unlink()
    with pytest.raises(TableError, match="12 of 12 rows name a missing image: rows 2, 3, 4 and 9 more"):
        build(data)
    for workers in (0, 2):
        reason = rf"none of {12 // max(workers, 1)} rows is usable(.|\n)*missing image: .*\.png: No such file"
        with pytest.raises(TooManyBadSamples, match=reason):
            epoch(build(data, workers=workers, max_bad_fraction=1.0))


def test_faults_of_an_epoch_are_judged_over_all_ranks_where_they_are_joined(tmp_path):
    loader = build(with_bad_images(tmp_path, 20, 4))
    seen = []

    def gather(mine, judge):
        seen.append(mine)
        return judge([mine, FaultCounter(samples=10_000).to_dict()])

    loader.gather = gather
    for number in range(2):
        epoch(loader, number)
    assert len(seen) == 2 and all(20 < counts["samples"] < 30 for counts in seen)  # of each epoch alone
    loader.gather = lambda mine, judge: judge([mine, mine])
    with pytest.raises(TooManyBadSamples, match="samples .* are unusable; the limit is 1.0%"):
        epoch(loader)


@pytest.fixture
def impatient(monkeypatch):
    """No waiting between retries, no proxy."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr("prolip.data.reading.stream.time.sleep", lambda _: None)


def loaders(data, ranks=2, workers=0, **settings):
    config = DataConfig(train_data=data, batch_size=4, workers=workers, **settings)
    return [build_loader(config, plain, letters, rank=rank, world_size=ranks) for rank in range(ranks)]


def run(loader, epochs=1):
    """Keys of every batch of every epoch."""
    return [batch["key"] for number in range(epochs) for batch in epoch(loader, number)]


def total(loaders):
    return sum((Counter(loader.faults()) for loader in loaders), Counter())


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("resampled", [False, True])
def test_sources_of_every_kind_of_fault_together(tmp_path, resampled):
    objects = {Path(url).name: Path(url).read_bytes() for url in write_shards(tmp_path, [6] * 8)}
    with FaultyServer(objects) as server:
        modes = ["ok", "cut-once", "missing", "busy", "html", "no-length-half", "changed-etag", "no-range"]
        sources = [server.url(mode, f"{number}.tar") for number, mode in enumerate(modes)]
        sources += [f"{tmp_path}/0.tar", "pipe:exit 3", f"pipe:cat {tmp_path}/2.tar"]
        settings = {"dataset_resampled": resampled, "train_num_samples": 64, "shuffle_buffer": 8}
        both = loaders("::".join(sources), max_bad_fraction=1.0, **settings)
        assert [len(run(loader, epochs=3)) for loader in both] == [24, 24]
    kinds = total(both)
    for kind in ("unreadable shard", "interrupted shard", "broken shard", "resumed read"):
        assert kinds[kind] >= 1
    assert kinds["changed shard"] <= 3  # its first request only is cut so that it shows


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("kind, workers", [("empty", 2), ("missing", 0), ("busy", 0), ("command", 0)])
def test_nothing_but_broken_shards_ends_with_an_error_that_names_them(tmp_path, kind, workers):
    objects = {Path(url).name: Path(url).read_bytes() for url in write_shards(tmp_path, [8] * 4)}
    start = time.monotonic()
    with FaultyServer(objects) as server:
        data = {"empty": str(tmp_path), "command": "pipe:exit {3..6}"}.get(kind) or server.url(kind, "{0..3}.tar")
        for url in tmp_path.glob("*.tar"):
            url.write_bytes(b"")
        name = {"missing": "unreadable shard", "busy": "interrupted shard"}.get(kind, "broken shard")
        if kind == "empty":  # local files are looked at before the first batch, where not any loss is tolerated
            with pytest.raises(ValueError, match="--train-data: none of the first .*broken shard: .*an empty file"):
                loaders(data, workers=workers, train_num_samples=32)
        for loader in loaders(data, workers=workers, train_num_samples=32, max_bad_fraction=1.0):
            with pytest.raises(TooManyBadSamples, match=f"(found no sample|no sample in)(.|\n)*{name}"):
                run(loader)
    assert time.monotonic() - start < 120  # it would never end; a busy machine needs its time to start the workers


def test_too_many_broken_shards_end_the_epoch_on_every_rank(tmp_path):
    urls = write_shards(tmp_path, [8] * 8)
    for url in urls[:4]:
        Path(url).write_bytes(Path(url).read_bytes()[:-9000])
    for loader in loaders(str(tmp_path), train_num_samples=64):
        with pytest.raises(TooManyBadSamples, match=r"of \d+ shards \(\d\d.\d%\) are unusable; the limit is 1.0%"):
            run(loader)
