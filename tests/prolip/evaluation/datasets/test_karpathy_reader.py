"""Karpathy's JSON files: the test split in its order, five captions per image, COCO's ids."""

import json

import miniatures as mini
import pytest

from prolip.data.sets import read_set
from prolip.evaluation.datasets.base import DamagedData
from prolip.evaluation.datasets.specs import open_dataset


def open_karpathy(file, images, split="test"):
    return open_dataset(f"coco:{file},{images}", split)


def test_coco_keeps_order_ids_and_five_captions(tmp_path):
    file, images = mini.karpathy(tmp_path, captions=7)
    dataset = open_karpathy(file, images)
    samples = list(dataset.samples())
    chosen = [record for record in json.loads(file.read_text())["images"] if record["split"] == "test"]
    assert dataset.kind == "retrieval" and dataset.size == len(samples) == 6 and dataset.name == "coco_karpathy_test"
    assert [s.key for s in samples] == [str(r["cocoid"]) for r in chosen] == ["400", "399", "397", "396", "395", "394"]
    assert [s.captions for s in samples] == [tuple(x["raw"] for x in r["sentences"][:5]) for r in chosen]
    assert dataset.info["image_ids"] == [r["cocoid"] for r in chosen]
    assert dataset.info["caption_ids"] == [i for r in chosen for i in r["sentids"][:5]]
    assert samples[2].image == mini.picture(3, "JPEG")
    assert all(len(image.captions) == 7 for image in read_set("coco", f"{file},{images}", "test").images)


def test_flickr_files_lie_in_one_folder(tmp_path):
    file, images = mini.karpathy(tmp_path, dataset="flickr30k")
    samples = list(open_karpathy(file, images).samples())
    assert [s.key for s in samples] == ["1000.jpg", "1001.jpg", "1003.jpg", "1004.jpg", "1005.jpg", "1006.jpg"]
    assert len(list(open_karpathy(file, images, split="train").samples())) == 1


def test_the_fingerprint_changes_with_a_caption(tmp_path):
    file, images = mini.karpathy(tmp_path)
    before = open_karpathy(file, images).fingerprint
    assert open_karpathy(file, images).fingerprint == before
    content = json.loads(file.read_text())
    content["images"][0]["sentences"][1]["raw"] += "!"
    file.write_text(json.dumps(content))
    assert open_karpathy(file, images).fingerprint != before


def test_missing_images_are_named_before_anything_is_read(tmp_path):
    file, images = mini.karpathy(tmp_path)
    (images / "val2014" / "COCO_val2014_000000000396.jpg").unlink()
    with pytest.raises(FileNotFoundError, match="1 of 6 files are missing: .*396.jpg"):
        open_karpathy(file, images)
    with pytest.raises(FileNotFoundError, match="no image folder"):
        open_karpathy(file, tmp_path / "pictures")
    with pytest.raises(FileNotFoundError, match="no annotations .*Did you mean dataset_coco.json"):
        open_karpathy(tmp_path / "dataset_cocoo.json", images)


@pytest.mark.parametrize(
    "content, message",
    [
        ('{"annotations": []}', "no file of Karpathy's splits"),
        ("{", "no file of Karpathy's splits"),
        ('{"images": [{"split": "test", "filename": "a.jpg"}]}', "'a.jpg' lacks 'sentences'"),
    ],
)
def test_a_file_of_another_layout_is_refused(tmp_path, content, message):
    file, images = mini.karpathy(tmp_path)
    file.write_text(content)
    with pytest.raises(DamagedData, match=message):
        open_karpathy(file, images)


def test_a_file_of_own_images_keeps_all_captions_where_an_image_has_fewer_than_five(tmp_path):
    file, images = mini.karpathy(tmp_path, captions=7)
    content = json.loads(file.read_text())
    first = next(record for record in content["images"] if record["split"] == "test")
    del first["sentences"][1:]
    file.write_text(json.dumps(content))
    dataset = open_karpathy(file, images)
    assert [len(sample.captions) for sample in dataset.samples()] == [1, 7, 7, 7, 7, 7]
    assert len(dataset.info["caption_ids"]) == 36


def test_empty_captions_and_unknown_splits_are_refused(tmp_path):
    file, images = mini.karpathy(tmp_path)
    content = json.loads(file.read_text())
    content["images"][0]["sentences"][1]["raw"] = " "
    (tmp_path / "empty.json").write_text(json.dumps(content))
    with pytest.raises(DamagedData, match="has 1 empty captions: write them"):
        open_karpathy(tmp_path / "empty.json", images)
    with pytest.raises(ValueError, match="no images of the split 'val': it has test, train"):
        open_karpathy(file, images, split="val")
