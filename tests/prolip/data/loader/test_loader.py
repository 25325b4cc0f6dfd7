"""The batches of an epoch: their samples for any number of ranks and workers, and the content of each sample."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_loaders import build, epoch, gathered, same, write_csv
from tiny_tars import letters, members, plain, png, write_shards, write_tar

from prolip.data.captions import caption_id
from prolip.data.loader import DataConfig, build_loader
from prolip.data.samples import seed_rng


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


def test_an_epoch_holds_every_sample_rounds_up_may_be_left_early_and_is_as_long_on_every_rank(tmp_path):
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


def test_several_captions_are_drawn_the_first_as_for_one_and_unpaired_texts_are_of_no_image_beside_them(tmp_path):
    write_shards(tmp_path, [4, 4])
    one, three = (epoch(build(tmp_path, workers=2, captions=n, caption_sampling="keywords")) for n in (1, 3))
    for single, several in zip(one, three, strict=True):
        assert several["text"].shape[:2] == (4, 3) and torch.equal(several["text"][:, 0], single["text"])
        assert torch.equal(several["image"], single["image"])
        for key, row in zip(several["key"], several["text"]):
            words = letters([f"word {int(key[1:])} {i}" for i in range(3)])
            assert {tuple(text.tolist()) for text in row} <= {tuple(word.tolist()) for word in words}
    assert len({tuple(text.tolist()) for batch in three for row in batch["text"] for text in row}) > 8
    pairs, apart = (epoch(build(tmp_path, workers=2, unpaired=unpaired)) for unpaired in (False, True))
    for pair, other in zip(pairs, apart, strict=True):
        assert torch.equal(pair["image"], other["image"]) and pair["key"] == other["key"]
        assert not (pair["text"] == other["text"]).all(1).any()
        assert sorted(pair["text"].tolist()) == sorted(other["text"].tolist())


def test_words_are_dropped_anew_each_epoch_the_same_for_ranks_and_workers_and_identities_stay(tmp_path):
    write_tar(tmp_path / "a.tar", [(f"k{i}", {"png": png(i), "txt": f"a b c d e f {i}".encode()}) for i in range(8)])
    settings = {"batch_size": 8, "known_matches": True, "word_drop": 0.5}
    loader = build(tmp_path, workers=4, **settings)
    first, second = (epoch(loader, number)[0] for number in (0, 1))
    loader.close()
    shared = [build(tmp_path, workers=2, rank=rank, world_size=2, **settings | {"batch_size": 4}) for rank in range(2)]
    (step,) = zip(*(epoch(one) for one in shared))
    for one in shared:
        one.close()
    assert same(gathered(step), first)
    texts = ["".join(map(chr, row)).rstrip("\0") for row in first["text"].tolist()]
    wholes = [f"a b c d e f {key[1:]}" for key in first["key"]]
    assert all(text and set(text) <= set(whole) for text, whole in zip(texts, wholes))
    assert sum(len(text.split()) for text in texts) < 7 * 8 * 0.75
    assert first["caption_id"].tolist() == [caption_id(whole) for whole in wholes]
    other = dict(zip(second["key"], second["text"].tolist()))
    assert any(other[key] != row for key, row in zip(first["key"], first["text"].tolist()))
    two = epoch(build(tmp_path, batch_size=8, word_drop=0.5, captions=2))[0]["text"]
    assert (two[:, 0] != two[:, 1]).any(1).sum() > 4  # of one caption, each loses other words


def test_images_without_texts_are_read_where_none_is_wanted(tmp_path):
    write_tar(tmp_path / "bare.tar", [(f"b{i}", {"png": png(i)}) for i in range(4)])
    with pytest.raises(ValueError, match="images have no text with the same key"):
        build(tmp_path)
    (batch,) = epoch(build(tmp_path, captions=0))
    assert batch.keys() == {"image", "key"} and len(batch["image"]) == 4


def test_known_matches_name_the_drawn_and_all_captions(tmp_path):
    write_shards(tmp_path, [4, 4])
    loader = build(tmp_path, workers=2, known_matches=True, caption_sampling="name,keywords")
    (batch, _) = epoch(loader)
    assert batch["caption_id"].dtype == batch["caption_ids"].dtype == torch.int64
    for key, text, drawn, every in zip(batch["key"], batch["text"], batch["caption_id"], batch["caption_ids"]):
        index = int(key[1:])
        captions = [f"name {index}", *(f"word {index} {i}" for i in range(3))]
        assert every.tolist() == [caption_id(caption) for caption in captions]
        caption = next(caption for caption in captions if caption_id(caption) == drawn)
        assert torch.equal(letters([caption])[0], text)
    config = DataConfig(train_data=str(tmp_path), batch_size=8, workers=0)
    (batch,) = build_loader(config, plain, letters, context_length=9)
    assert batch["text"].shape == (8, 9)


def test_ids_are_padded_over_workers_with_minus_one(tmp_path):
    def shard(name, words):
        record = f'{{"keywords": {words}}}'.encode()
        write_tar(tmp_path / name, [(f"{name[0]}{i}", {**members(i), "json": record}) for i in range(4)])

    shard("a.tar", '["one"]')
    shard("b.tar", '["one", "two", "three"]')
    (batch, _) = epoch(build(tmp_path, workers=2, known_matches=True, caption_sampling="keywords"))
    assert batch["caption_ids"].shape == (4, 3)
    for key, ids in zip(batch["key"], batch["caption_ids"]):
        assert (ids == -1).sum() == (2 if key[0] == "a" else 0)


def test_reading_leaves_the_global_generators_alone(tmp_path):
    write_shards(tmp_path, [8, 8])
    for workers in (0, 2):
        seed_rng(3)
        before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
        epoch(build(tmp_path, workers=workers))
        assert torch.equal(before[0], torch.get_rng_state()) and random.getstate() == before[1]
        assert np.random.get_state()[1].tolist() == before[2]  # noqa: NPY002
