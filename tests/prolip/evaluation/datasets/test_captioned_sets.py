"""COCO, Flickr30k, CUB and IAPR TC-12: splits, captions and labels as their files say, and errors by name."""

import json

import miniatures as mini
import pytest

from prolip.data.captions import stable_hash
from prolip.data.sets import read_set
from prolip.evaluation.datasets.base import DamagedData
from prolip.evaluation.datasets.registry import open_dataset


def open_set(word, *addresses, split="test"):
    return open_dataset(f"{word}:{','.join(map(str, addresses))}", split)


def keys(dataset):
    return [sample.key for sample in dataset.samples()]


# --- Karpathy's splits ------------------------------------------------------------------------------------------------
def test_coco_keeps_order_ids_and_five_captions(tmp_path):
    file, images = mini.karpathy(tmp_path, captions=7)
    dataset = open_set("coco", file, images)
    samples = list(dataset.samples())
    chosen = [record for record in json.loads(file.read_text())["images"] if record["split"] == "test"]
    assert dataset.kind == "retrieval" and dataset.size == len(samples) == 6 and dataset.name == "coco_karpathy_test"
    assert [s.key for s in samples] == [str(r["cocoid"]) for r in chosen] == ["400", "399", "397", "396", "395", "394"]
    assert [s.captions for s in samples] == [tuple(x["raw"] for x in r["sentences"][:5]) for r in chosen]
    assert dataset.info["image_ids"] == [r["cocoid"] for r in chosen]
    assert dataset.info["caption_ids"] == [i for r in chosen for i in r["sentids"][:5]]
    assert samples[2].image == mini.picture(3, "JPEG")
    assert all(len(image.captions) == 7 for image in read_set("coco", f"{file},{images}", "test")[1])
    flickr = open_set("flickr", *mini.karpathy(tmp_path / "flickr", dataset="flickr30k"))
    assert keys(flickr) == [f"{1000 + number}.jpg" for number in (0, 1, 3, 4, 5, 6)]


def test_the_fingerprint_changes_with_a_caption_and_what_is_missing_or_of_another_layout_is_named(tmp_path):
    file, images = mini.karpathy(tmp_path)
    before = open_set("coco", file, images).fingerprint
    content = json.loads(file.read_text())
    content["images"][0]["sentences"][1]["raw"] += "!"
    file.write_text(json.dumps(content))
    assert open_set("coco", file, images).fingerprint != before
    (images / "val2014" / "COCO_val2014_000000000396.jpg").unlink()
    with pytest.raises(FileNotFoundError, match="1 of 6 files are missing: .*396.jpg"):
        open_set("coco", file, images)
    with pytest.raises(FileNotFoundError, match="no annotations .*Did you mean dataset_coco.json"):
        open_set("coco", tmp_path / "dataset_cocoo.json", images)
    lacking = '{"images": [{"split": "test", "filename": "a.jpg"}]}'
    for text, message in (("{", "not a file of Karpathy's splits"), (lacking, "'a.jpg' lacks 'sentences'")):
        file.write_text(text)
        with pytest.raises(DamagedData, match=message):
            open_set("coco", file, images)


def test_all_captions_are_kept_where_an_image_has_fewer_than_five_and_empty_ones_are_refused(tmp_path):
    file, images = mini.karpathy(tmp_path, captions=7)
    content = json.loads(file.read_text())
    first = next(record for record in content["images"] if record["split"] == "test")
    del first["sentences"][1:]
    file.write_text(json.dumps(content))
    dataset = open_set("coco", file, images)
    assert [len(sample.captions) for sample in dataset.samples()] == [1, 7, 7, 7, 7, 7]
    assert len(dataset.info["caption_ids"]) == 36
    first["sentences"][0]["raw"] = " "
    file.write_text(json.dumps(content))
    with pytest.raises(DamagedData, match="has 1 empty captions. Add captions"):
        open_set("coco", file, images)
    with pytest.raises(ValueError, match="no images of the split 'val': it has test, train"):
        open_set("coco", file, images, split="val")


# --- CUB --------------------------------------------------------------------------------------------------------------
def test_the_splits_of_cub_are_those_of_its_lists_and_an_image_has_its_species_and_all_captions(tmp_path):
    captions, images = mini.cub(tmp_path)
    everything = sorted(f"{path.parent.name}/{path.name}" for path in images.rglob("*.jpg"))
    splits = ("train", "test", "unseen", "seen", "trainval")
    of = {split: keys(open_set("cub", captions, images, split=split)) for split in splits}
    assert of["test"] == [key for key in everything if key not in everything[::3]]
    assert of["unseen"] == everything[-3:] and of["seen"] == everything[::3][:-1]
    assert sorted(of["train"] + of["test"]) == sorted(of["trainval"] + of["seen"] + of["unseen"]) == everything
    dataset = open_set("cub", captions, images, split="unseen")
    for sample in dataset.samples():
        assert sample.label == 3 and len(sample.captions) == 10
        assert list(sample.captions) == (captions / sample.key).with_suffix(".txt").read_text().splitlines()
        assert sample.image == (images / sample.key).read_bytes()
    assert dataset.info["relevant_by"] == "label" and dataset.size == 3


def test_what_is_wrong_with_cub_is_known_before_anything_is_read(tmp_path):
    captions, images = mini.cub(tmp_path / "cub")
    lists = tmp_path / "lists"
    lists.mkdir()
    (tmp_path / "cub" / "testclasses.txt").rename(lists / "testclasses.txt")
    with pytest.raises(FileNotFoundError, match="no testclasses.txt in .*give its folder as the third address"):
        open_set("cub", captions, images, split="unseen")
    assert len(keys(open_set("cub", captions, images, lists, split="unseen"))) == 3
    with pytest.raises(ValueError, match="no split 'val': give one of train, test, unseen, trainval, seen"):
        open_set("cub", captions, images, split="val")
    (captions / "004.Bird_3" / "Bird_3_0001.txt").write_text("\n")
    with pytest.raises(DamagedData, match="Bird_3_0001.txt has no caption"):
        open_set("cub", captions, images, lists, split="unseen")


# --- IAPR TC-12 -------------------------------------------------------------------------------------------------------
@pytest.fixture
def iapr(tmp_path):
    return mini.iapr(tmp_path / "iaprtc12", images=20)


def test_sentences_are_captions_and_without_a_list_the_hash_of_its_id_says_where_an_image_is(iapr):
    samples = {sample.key: sample for sample in open_set("iapr", iapr, split="all").samples()}
    assert samples["00/1"].captions == ("a café of Smith & Sons & Co", "a wall behind it")
    assert [len(samples[f"{i // 2:02d}/{i}"].captions) for i in range(2, 6)] == [3, 1, 2, 3]
    assert samples["01/3"].image == (iapr / "images/01/3.jpg").read_bytes()
    assert list(samples)[:3] == ["00/0", "00/1", "01/2"]
    test, train = (keys(open_set("iapr", iapr, split=split)) for split in ("test", "train"))
    assert set(test) == {key for key in train + test if stable_hash("iapr", key) % 10 == 0} and 0 < len(test) < 8
    assert sorted(test + train) == sorted(keys(open_set("iapr", iapr, split="all"))) and len(test + train) == 20


def test_lists_are_followed_and_images_without_a_description_left_out(iapr, tmp_path, caplog):
    with pytest.raises(ValueError, match="no split 'val': give one of train, test, all"):
        open_set("iapr", iapr, split="val")
    (iapr / "iaprtc12_test_list.txt").write_text("03/7\n00/0\n")
    (iapr / "iaprtc12_train_list.txt").write_text("00/1\n")
    assert keys(open_set("iapr", iapr)) == ["00/0", "03/7"] and keys(open_set("iapr", iapr, split="train")) == ["00/1"]
    mine = tmp_path / "mine.txt"
    mine.write_text("05/10.jpg\r\n\r\n05/11.jpg\r\n")
    assert keys(open_set("iapr", iapr, mine)) == ["05/10", "05/11"]
    mine.write_text("99/1\n")
    with pytest.raises(
        DamagedData, match="names 1 images without an annotation, 99/1 first. Give ids of .* such as 00/25"
    ):
        open_set("iapr", iapr, mine)
    other = iapr / "annotations" / "00" / "0.eng"  # fills in
    other.parent.mkdir(parents=True)
    (iapr / "annotations_complete_eng" / "00" / "0.eng").rename(other)
    assert "00/0" in keys(open_set("iapr", iapr))
    other.write_text("<DOC>\n<DESCRIPTION> </DESCRIPTION>\n<IMAGE>images/00/0.jpg</IMAGE>\n</DOC>\n")
    assert "00/0" not in keys(open_set("iapr", iapr, split="all"))
    assert "1 images have no description and are skipped: 00/0" in caplog.text
