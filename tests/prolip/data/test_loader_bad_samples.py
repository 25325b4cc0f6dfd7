"""Samples that cannot be used: counted, replaced, fatal when there are too many."""
import multiprocessing
from pathlib import Path

import pytest
from tiny_loaders import build, epoch, with_bad_images, write_csv
from tiny_tars import write_shards

from prolip.data.faults import TooManyBadSamples


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


@pytest.mark.parametrize("workers", [0, 2])
def test_too_many_corrupt_images_end_the_epoch_with_kind_key_and_shard(tmp_path, workers):
    loader = build(with_bad_images(tmp_path, 20, 4), workers=workers)
    with pytest.raises(TooManyBadSamples) as error:
        epoch(loader)
    for part in ("bad image", "'b", "bad.tar", "cannot identify image", "the limit is 1.0%", "--max-bad-fraction"):
        assert part in str(error.value)


@pytest.mark.parametrize("workers", [0, 2])
def test_nothing_but_corrupt_images_stops_instead_of_turning_for_ever(tmp_path, workers):
    loader = build(with_bad_images(tmp_path, 0, 30), workers=workers)
    with pytest.raises(TooManyBadSamples, match="1000 of 1000 samples"):
        epoch(loader)


def test_a_truncated_shard_is_reported_and_fatal_at_the_end_of_the_epoch(tmp_path):
    urls = write_shards(tmp_path, [8, 8])
    Path(urls[0]).write_bytes(Path(urls[0]).read_bytes()[:-9000])
    tolerant = build(tmp_path, max_bad_fraction=1.0)
    epoch(tolerant)
    assert tolerant.faults()["broken shard"] >= 1
    with pytest.raises(TooManyBadSamples, match=r"of \d shards"):
        epoch(build(tmp_path))


def test_a_shard_behind_a_failing_command_is_reported(tmp_path):
    (url,) = write_shards(tmp_path, [8])
    loader = build(f"pipe:cat {url}; exit 7", max_bad_fraction=1.0, train_num_samples=8)
    epoch(loader)
    assert loader.faults()["broken shard"] >= 1
    piped = build(f"pipe:cat {url}", train_num_samples=8)
    assert sorted(key for batch in epoch(piped) for key in batch["key"]) == [f"s{i:03d}" for i in range(8)]


def test_csv_images_that_are_gone_are_faults(tmp_path):
    data = write_csv(tmp_path, 12)
    (tmp_path / "3.png").unlink()
    loader = build(data, max_bad_fraction=0.5)
    assert "3.png" not in {Path(key).name for batch in epoch(loader) for key in batch["key"]}
    assert loader.faults()["missing image"] >= 1


def test_workers_end_when_the_data_is_too_bad(tmp_path):
    before = set(multiprocessing.active_children())
    loader = build(with_bad_images(tmp_path, 0, 30), workers=2)
    with pytest.raises(TooManyBadSamples):
        epoch(loader)
    assert set(multiprocessing.active_children()) == before
