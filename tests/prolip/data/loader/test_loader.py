"""The order of the batches: what an epoch holds, whatever ranks and workers share it."""

from pathlib import Path

import pytest
import torch
from tiny_loaders import build, epoch, gathered, same, write_csv
from tiny_tars import members, write_shards, write_tar


def data_of(kind, tmp_path):
    if kind == "csv":
        return write_csv(tmp_path, 22), {"caption_sampling": "name,txt,group"}
    sizes = {"shards": [3, 9, 5, 7], "one shard": [23], "resampled": [3, 9, 5]}[kind]
    write_shards(tmp_path, sizes)
    bad = write_tar(tmp_path / "9.tar", [("x", {**members(90), "png": b"x"}), ("y", members(91))])
    assert Path(bad).exists()
    settings = {"caption_sampling": "name,keywords:2,txt", "max_bad_fraction": 0.5, "shuffle_buffer": 6}
    if kind == "one shard":
        return tmp_path / "0.tar", settings
    return tmp_path, {**settings, "dataset_resampled": kind == "resampled"}


@pytest.mark.parametrize("kind", ["shards", "one shard", "csv", "resampled"])
def test_two_ranks_with_one_worker_read_what_one_rank_reads_with_two(tmp_path, kind):
    data, settings = data_of(kind, tmp_path)
    settings["known_matches"] = True
    one = build(data, batch_size=8, workers=2, **settings)
    two = [build(data, batch_size=4, workers=rank, rank=rank, world_size=2, **settings) for rank in (0, 1)]
    assert one.num_batches == two[0].num_batches == two[1].num_batches >= 3
    for number in (0, 1):
        batches = epoch(one, number)
        parts = [epoch(loader, number) for loader in two]
        assert len(batches) == one.num_batches
        for whole, *locals_ in zip(batches, *parts, strict=True):
            assert same(gathered(locals_), whole)


def test_batches_follow_seed_and_epoch_and_can_be_read_again(tmp_path):
    write_shards(tmp_path, [8, 8])
    loader = build(tmp_path)
    first, second = epoch(loader, 0), epoch(loader, 1)
    for again in (epoch(loader, 0), epoch(build(tmp_path), 0)):
        assert all(map(same, first, again))
    for other in (second, epoch(build(tmp_path, seed=1), 0)):
        assert not any(map(same, first, other))


def test_an_epoch_holds_every_sample_and_rounds_up_and_may_be_left_early(tmp_path):
    write_shards(tmp_path, [9, 5, 6])
    loader = build(tmp_path)
    keys = [key for batch in epoch(loader) for key in batch["key"]]
    assert loader.num_batches == 5 and len(set(keys)) == len(keys) == 20
    loader = build(tmp_path, batch_size=6)
    keys = [key for batch in epoch(loader) for key in batch["key"]]
    assert (loader.num_batches, loader.num_samples, loader.dataset_samples) == (4, 24, 20)
    assert len(set(keys[:20])) == 20 and len(keys) == 24
    assert [len(epoch(build(tmp_path, train_num_samples=count))) for count in (8, 41)] == [2, 11]
    wanted, loader = epoch(build(tmp_path, workers=2), 1), build(tmp_path, workers=2)
    next(iter(loader))
    assert all(map(same, wanted, epoch(loader, 1)))


def test_augmentation_and_captions_do_not_depend_on_streams(tmp_path):
    write_shards(tmp_path, [8, 8, 8, 8])
    settings = {"caption_sampling": "keywords", "train_num_samples": 32}

    def views(**place):
        batches = epoch(build(tmp_path, **place, **settings), 3)
        return {
            key: (image, text)
            for batch in batches
            for key, image, text in zip(batch["key"], batch["image"], batch["text"])
        }

    one, two = views(), views(workers=2)
    assert one.keys() == two.keys() and len(one) == 32
    assert all(torch.equal(one[key][0], two[key][0]) and torch.equal(one[key][1], two[key][1]) for key in one)


def test_every_rank_has_the_same_number_of_batches_however_uneven_the_shards_are(tmp_path):
    write_shards(tmp_path, [1, 1, 30, 2])
    for rank in range(4):
        loader = build(tmp_path, batch_size=2, rank=rank, world_size=4)
        for number in range(3):
            batches = epoch(loader, number)
            assert len(batches) == loader.num_batches == 5  # ceil(34 / 8)
            assert all(len(batch["key"]) == 2 for batch in batches)


def test_an_epoch_of_resampled_sources_keeps_their_proportions(tmp_path):
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    a = write_tar(tmp_path / "a" / "a.tar", [(f"a{i}", members(i)) for i in range(4)])
    b = write_tar(tmp_path / "b" / "b.tar", [(f"b{i}", members(i)) for i in range(4)])
    settings = {"dataset_resampled": True, "train_num_samples": 1600, "batch_size": 160}
    loader = build(f"{a}::{b}", train_data_upsampling_factors="3::1", **settings)
    keys = [key[0] for batch in epoch(loader) for key in batch["key"]]
    assert abs(keys.count("a") / len(keys) - 0.75) < 0.11  # 400 shards drawn: five standard deviations
