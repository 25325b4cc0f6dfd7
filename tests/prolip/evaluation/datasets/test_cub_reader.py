"""CUB captions: the three splits, ten captions each, and errors by name."""

import miniatures as mini
import pytest

from prolip.evaluation.datasets.base import DamagedData
from prolip.evaluation.datasets.registry import open_dataset


def open_cub(captions, images, lists=None, split="test"):
    return open_dataset(f"cub:{captions},{images}" + (f",{lists}" if lists else ""), split)


def keys(dataset):
    return [sample.key for sample in dataset.samples()]


def test_the_splits_are_those_of_the_lists(tmp_path):
    captions, images = mini.cub(tmp_path)
    everything = sorted(f"{path.parent.name}/{path.name}" for path in images.rglob("*.jpg"))
    first_of_each = everything[::3]
    assert keys(open_cub(captions, images)) == [key for key in everything if key not in first_of_each]
    assert keys(open_cub(captions, images, split="unseen")) == everything[-3:]
    assert keys(open_cub(captions, images, split="seen")) == first_of_each[:-1]


def test_the_pictures_of_training_are_those_that_no_test_has(tmp_path):
    captions, images = mini.cub(tmp_path)
    everything = {f"{path.parent.name}/{path.name}" for path in images.rglob("*.jpg")}
    splits = ("train", "test", "unseen", "seen", "trainval")
    of = {split: set(keys(open_cub(captions, images, split=split))) for split in splits}
    assert of["train"] | of["test"] == everything and not of["train"] & of["test"]
    assert of["trainval"] | of["seen"] | of["unseen"] == everything
    assert sum(map(len, (of["trainval"], of["seen"], of["unseen"]))) == len(everything)


def test_a_picture_has_its_species_and_all_its_captions(tmp_path):
    captions, images = mini.cub(tmp_path)
    dataset = open_cub(captions, images, split="unseen")
    for sample in dataset.samples():
        assert sample.label == 3 and len(sample.captions) == 10
        assert list(sample.captions) == (captions / sample.key).with_suffix(".txt").read_text().splitlines()
        assert sample.image == (images / sample.key).read_bytes()
    assert dataset.info["relevant_by"] == "label" and dataset.size == 3


def test_lists_may_lie_elsewhere(tmp_path):
    captions, images = mini.cub(tmp_path / "cub")
    lists = tmp_path / "lists"
    lists.mkdir()
    (tmp_path / "cub" / "testclasses.txt").rename(lists / "testclasses.txt")
    with pytest.raises(FileNotFoundError, match="no testclasses.txt in .*give its folder as the third address"):
        open_cub(captions, images, split="unseen")
    assert len(keys(open_cub(captions, images, split="unseen", lists=lists))) == 3


def test_what_is_wrong_is_known_before_anything_is_read(tmp_path):
    captions, images = mini.cub(tmp_path)
    with pytest.raises(ValueError, match="no split 'val': give one of train, test, unseen, trainval, seen"):
        open_cub(captions, images, split="val")
    text = captions / "004.Bird_3" / "Bird_3_0001.txt"
    text.write_text("\n")
    with pytest.raises(DamagedData, match="Bird_3_0001.txt holds no caption"):
        open_cub(captions, images, split="unseen")
    text.unlink()
    with pytest.raises(FileNotFoundError, match="captions of the split 'unseen' of CUB: 1 of 3 files are missing"):
        open_cub(captions, images, split="unseen")
    (tmp_path / "train_test_split.txt").write_text("1 0\n")
    with pytest.raises(DamagedData, match="images.txt and train_test_split.txt with .* do not fit"):
        open_cub(captions, images)
