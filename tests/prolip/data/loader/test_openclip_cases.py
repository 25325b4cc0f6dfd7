"""The behaviours that OpenCLIP's data tests ask for, asked of our data module. Its 12 cases and ours:

tests/test_num_shards.py, 8 cases of `test_num_shards` (how many shards a description names):
  one path; a range of one; a range of ten; two ranges in one name  -> test_a_description_names_as_many_shards, first 4
  sources joined by `::`: one and ten; ten and ten                  -> test_a_description_names_as_many_shards, last 2
  lists of one and of two paths                                     -> test_lists_of_shards_are_taken_as_they_are
tests/test_wds.py, 4 cases (shards of 10 and 5 samples, resampled; how often each sample comes):
  test_single_source                    -> test_every_sample_of_one_source_comes_equally_often
  test_two_sources                      -> test_every_sample_of_a_range_of_shards_comes_equally_often
  test_two_sources_same_weights         -> test_equal_factors_change_nothing
  test_two_sources_with_upsampling      -> test_a_source_with_twice_the_factor_comes_twice_as_often

Where we differ on purpose: shards need not exist there and must exist here, so the names are real files. Settings take
the text of --train-data only, so lists go to the functions below it. OpenCLIP only looks at samples that came at all;
we also ask that all of them came. The last tests are about what OpenCLIP does and does not test: how an epoch is split
over ranks and workers. There every sample comes once, where OpenCLIP rounds every worker up on its own.
"""

from collections import Counter
from pathlib import Path

import pytest
from tiny_tars import letters, plain, png, write_tar

from prolip.data.loader import DataConfig, build_loader
from prolip.data.reading.shards import count_samples, expand_shards
from prolip.data.reading.tar import read_shard

SAMPLES = 2000
TOLERANCE = 0.2


# --- tests/test_num_shards.py
@pytest.mark.parametrize(
    ("description", "wanted"),
    [
        ("shard.tar", 1),
        ("shard_{000..000}.tar", 1),
        ("shard_{000..009}.tar", 10),
        ("shard_{000..009}_{000..009}.tar", 100),
        ("shard.tar::other_{000..009}.tar", 11),
        ("shard_{000..009}.tar::other_{000..009}.tar", 20),
    ],
)
def test_a_description_names_as_many_shards(tmp_path, monkeypatch, description, wanted):
    monkeypatch.chdir(tmp_path)
    tens = [f"{i:03d}" for i in range(10)]
    names = ["shard", *(f"shard_{i}" for i in tens), *(f"other_{i}" for i in tens)]
    for name in names + [f"shard_{i}_{j}" for i in tens for j in tens]:
        Path(f"{name}.tar").touch()
    shards = expand_shards(description)
    assert len(shards) == len({shard.url for shard in shards}) == wanted


@pytest.mark.parametrize("count", [1, 2])
def test_lists_of_shards_are_taken_as_they_are(tmp_path, count):
    names = [write_tar(tmp_path / f"{name}.tar", [("0", {"png": png()})]) for name in ("shard", "other_shard")][:count]
    assert count_samples(names) == sum(len(list(read_shard(name))) for name in names) == count


# --- tests/test_wds.py
@pytest.fixture
def shards(tmp_path):
    """test_000.tar with ten samples and test_001.tar with five, of equal keys; the caption tells which."""
    for shard, size in ((0, 10), (1, 5)):
        rows = ((str(i), {"png": png(i), "txt": f"{shard:03d}_{i}".encode()}) for i in range(size))
        write_tar(tmp_path / f"test_{shard:03d}.tar", rows)
    return tmp_path


def shares(train_data, **settings):
    """How often each caption comes in an epoch of SAMPLES, as a fraction of it."""
    config = DataConfig(
        train_data=train_data, train_num_samples=SAMPLES, dataset_resampled=True, batch_size=4, **settings
    )
    loader = build_loader(config, plain, letters)
    captions = Counter("".join(chr(code) for code in row if code) for batch in loader for row in batch["text"].tolist())
    loader.close()
    assert captions.total() == SAMPLES
    return {caption: count / SAMPLES for caption, count in captions.items()}


@pytest.mark.parametrize("workers", [0, 1])
def test_every_sample_of_one_source_comes_equally_often(shards, workers):
    found = shares(f"{shards}/test_000.tar", workers=workers)
    assert len(found) == 10
    assert all(share == pytest.approx(1 / 10, TOLERANCE) for share in found.values())


def test_every_sample_of_a_range_of_shards_comes_equally_often(shards):
    found = shares(f"{shards}/test_{{000..001}}.tar", workers=0)
    assert len(found) == 15
    assert all(share == pytest.approx(1 / 15, TOLERANCE) for share in found.values())


def test_equal_factors_change_nothing(shards):
    data = f"{shards}/test_000.tar::{shards}/test_001.tar"
    found = shares(data, workers=0, train_data_upsampling_factors="1::1")
    assert found == shares(data, workers=0)
    assert len(found) == 15 and all(share == pytest.approx(1 / 15, TOLERANCE) for share in found.values())


def test_a_source_with_twice_the_factor_comes_twice_as_often(shards):
    data = f"{shards}/test_000.tar::{shards}/test_001.tar"
    found = shares(data, workers=0, train_data_upsampling_factors="1::2")
    assert len(found) == 15
    for caption, share in found.items():
        assert share == pytest.approx(1 / 20 if caption.startswith("000") else 1 / 10, TOLERANCE)


# --- how an epoch is split
@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (1, 2), (2, 1), (2, 2), (3, 1)])
def test_an_epoch_is_split_over_ranks_and_workers_so_that_every_sample_comes_once(tmp_path, ranks, workers):
    for shard in range(12):
        write_tar(tmp_path / f"{shard}.tar", ((f"{shard}_{i}", {"png": png(i), "txt": b"x"}) for i in range(4)))
    keys: Counter[str] = Counter()
    steps = set()
    for rank in range(ranks):
        config = DataConfig(train_data=str(tmp_path), batch_size=4, workers=workers)
        loader = build_loader(config, plain, letters, rank=rank, world_size=ranks)
        batches = list(loader)
        loader.close()
        steps.add(len(batches))
        keys.update(key for batch in batches for key in batch["key"])
    assert steps == {48 // (4 * ranks)}
    assert len(keys) == 48 and set(keys.values()) == {1}


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_last_batch_is_filled_up_on_every_rank_alike(tmp_path, ranks):
    for shard in range(4):
        write_tar(tmp_path / f"{shard}.tar", ((f"{shard}_{i}", {"png": png(i), "txt": b"x"}) for i in range(9)))
    config = DataConfig(train_data=str(tmp_path), batch_size=8, workers=0)
    both = [build_loader(config, plain, letters, rank=rank, world_size=ranks) for rank in range(ranks)]
    keys = [key for loader in both for batch in loader for key in batch["key"]]
    assert {loader.num_batches for loader in both} == {-(-36 // (8 * ranks))}
    assert len(keys) == both[0].num_samples >= 36 and len(set(keys)) == 36
