"""Training on published sets: their images with all of their captions, from the very readers that evaluation has."""

from pathlib import Path

import miniatures as mini
import pytest
from tiny_loaders import build, epoch
from tiny_tars import letters, plain

from prolip.data.captions import caption_id
from prolip.data.config import DataConfig
from prolip.data.sources import captioned_samples, source_of
from prolip.evaluation.datasets.registry import open_dataset


@pytest.fixture
def sets(tmp_path):
    """Word -> (what to train on, the split that evaluation has of it)."""
    coco, flickr = mini.karpathy(tmp_path / "c"), mini.karpathy(tmp_path / "f", dataset="flickr30k")
    birds = mini.cub(tmp_path / "b")
    return {
        "coco": f"coco:{coco[0]},{coco[1]}",
        "flickr": f"flickr:{flickr[0]},{flickr[1]}",
        "cub": f"cub:{birds[0]},{birds[1]}",
        "iapr": f"iapr:{mini.iapr(tmp_path / 'iaprtc12')}",
    }


def read(data, split, size=None, **settings):
    """All batches of an epoch as one."""
    size = size or open_dataset(data, split).size
    loader = build(data, batch_size=size, transform=plain, train_split=split, **settings)
    assert loader.dataset_samples == size
    return epoch(loader)[0]


@pytest.mark.parametrize("word, split", [("coco", "test"), ("cub", "trainval"), ("iapr", "all")])
def test_an_image_comes_with_one_of_its_captions_and_knows_all(sets, word, split):
    batch = read(sets[word], split, known_matches=True)
    samples = {sample.image: sample for sample in open_dataset(sets[word], split).samples()}
    assert len(batch["key"]) == len(samples)
    for key, image, text, ids in zip(batch["key"], batch["image"], batch["text"], batch["caption_ids"]):
        sample = samples.pop(Path(key).read_bytes())
        assert any(letters([caption])[0].equal(text) for caption in sample.captions)
        assert set(ids.tolist()) - {-1} == {caption_id(caption) for caption in sample.captions}
        assert (image.permute(1, 2, 0).numpy() == sample.open()).all()
    assert not samples


def test_every_caption_is_drawn_as_often_as_the_others_and_two_are_different_where_there_are_two(sets):
    config = DataConfig(train_data=sets["iapr"], train_split="all", workers=0, batch_size=4)
    samples = list(captioned_samples(config, plain, 20))
    for sample in samples:
        assert all(chance == pytest.approx(1 / len(sample.chances)) for chance in sample.chances.values())
    assert {len(one.chances) for one in samples} == {1, 2, 3}
    several = {one.key: len(one.chances) > 1 for one in samples}
    loader = build(sets["iapr"], batch_size=20, transform=plain, train_split="all", captions=2)
    for number in range(4):
        (batch,) = epoch(loader, number)
        for key, (first, second) in zip(batch["key"], batch["text"]):
            assert first.equal(second) != several[key]


def test_what_is_trained_on_is_the_split_of_training(sets, tmp_path):
    assert len(read(sets["flickr"], None, 1)["key"]) == 1
    assert len(read(sets["cub"], None, 4)["key"]) == 4
    coco = Path(sets["coco"].removeprefix("coco:").split(",")[0])
    with pytest.raises(ValueError, match="--train-data: .*no images of the split 'restval': it has test, train"):
        build(sets["coco"])
    coco.write_text(coco.read_text().replace('"split": "test"', '"split": "restval"', 4))
    assert len(read(sets["coco"], None, 5)["key"]) == 5
    assert len(read(sets["coco"], "test+restval", 6)["key"]) == 6
    images = Path(sets["flickr"].split(",")[1])
    (images / "1002.jpg").unlink()
    with pytest.raises(FileNotFoundError, match="--train-data: images of flickr, train: 1 of 1 files are missing: "):
        build(sets["flickr"])


def test_facts_choose_and_describe(sets):
    batch = read(sets["cub"], "train+test", 3, select="class=Bird 2")
    assert all("/003.Bird_2/" in key for key in batch["key"])
    batch = read(sets["iapr"], "train", caption_sampling="title")
    titles = {f"{number:02d}/{2 * number + odd}": f"Title {2 * number + odd}" for number in range(10) for odd in (0, 1)}
    for key, text in zip(batch["key"], batch["text"]):
        assert text.equal(letters([titles["/".join(Path(key).with_suffix("").parts[-2:])]])[0])


def test_captions_of_a_list_are_shuffled_by_their_place(sets):
    loader = build(sets["iapr"], batch_size=20, transform=plain, train_split="all", noise_ratio=0.5, known_matches=True)
    slots = sum(len(sample.captions) for sample in open_dataset(sets["iapr"], "all").samples())
    assert loader.noise.slots == slots and len(loader.noise.swaps) == round(slots / 2)
    given = {(swap.slot.owner[1], swap.slot.number): swap.source.text for swap in loader.noise.swaps}
    captions = {sample.key: sample.captions for sample in open_dataset(sets["iapr"], "all").samples()}
    (batch,) = epoch(loader)
    for key, ids in zip(batch["key"], batch["caption_ids"]):
        own = captions["/".join(Path(key).with_suffix("").parts[-2:])]
        wanted = {caption_id(given.get((key, number), text)) for number, text in enumerate(own)}
        assert set(ids.tolist()) - {-1} == wanted


def test_a_word_or_the_flag_says_what_it_is_and_other_forms_are_refused(sets):
    for data, settings, message in (
        ("coco:a.json", {}, r"'coco:a.json' has 1 address\(es\): write coco:JSON,IMAGES"),
        ("cub:a,b,c,d", {}, r"write cub:CAPTIONS,IMAGES\[,LISTS\]"),
        ("cocoo:a.json,b", {}, "Did you mean coco:JSON,IMAGES"),
        ("a.csv", {"train_split": "train"}, "--train-split train, but --train-data has no splits: .*coco:"),
        ("coco:a,b", {"dataset_resampled": True}, "draws shards, .* is of the kind coco"),
    ):
        with pytest.raises(ValueError, match=message):
            build(data, **settings)
    for word, data in sets.items():
        assert source_of(DataConfig(train_data=data)).kind == word
    assert source_of(DataConfig(train_data="a.json,b", dataset_type="coco")) == ("coco", "a.json,b")
    bare = sets["flickr"].removeprefix("flickr:")
    loader = build(bare, batch_size=6, transform=plain, dataset_type="flickr", train_split="test")
    assert loader.dataset_samples == 6
