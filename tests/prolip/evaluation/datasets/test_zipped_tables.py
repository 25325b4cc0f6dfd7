"""Tables with zipped images: DataComp's retrieval sets and WinoGAViL as they lie on the hub."""

import csv
import json

import miniatures as mini
import pytest

from prolip.data.faults import FaultCounter
from prolip.evaluation.datasets.base import DamagedData
from prolip.evaluation.datasets.published import open_caption_table, open_winogavil


def rows_of(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("dataset, table", [("flickr", "test_1k_flickr.csv"), ("coco", "test_5k_mscoco_2014.csv")])
def test_captions_belong_to_their_images_packed_or_not(tmp_path, dataset, table, caplog):
    for packed in (True, False):
        root = mini.caption_table(tmp_path / str(packed), dataset, packed=packed)
        rows = rows_of(root / table)
        (root / table).write_bytes(b"\xef\xbb\xbf" + (root / table).read_bytes())
        with caplog.at_level("INFO", "prolip.data.reading"):
            found = open_caption_table(root)
        samples = list(found.samples())
        assert found.kind == "retrieval" and found.size == len(samples) == 5
        assert [s.key for s in samples] == [row["filename"] for row in rows]
        assert [list(s.captions) for s in samples] == [json.loads(row["raw"]) for row in rows]
        assert [s.image for s in samples] == [mini.picture(i, "JPEG") for i in range(5)]
    counted = f"{table}: 5 rows from 6 lines (header included, 0 rows span several lines)"
    assert [record.getMessage() for record in caplog.records] == 2 * [counted]


def test_images_of_several_instances_are_one_sample(tmp_path):
    dataset, rows = open_winogavil(mini.winogavil(tmp_path)), rows_of(tmp_path / "winogavil_dataset.csv")
    assert dataset.kind == "association" and len(dataset.associations) == 5
    for row, instance in zip(rows, dataset.associations):
        assert instance.cue == row["cue"] and list(instance.images) == json.loads(row["candidates"])
        assert instance.associated == set(json.loads(row["associations"]))
    keys = [sample.key for sample in dataset.samples()]
    assert len(keys) == len(set(keys)) == dataset.size
    assert set(keys) == {name for row in rows for name in json.loads(row["candidates"])}
    assert {s.key: s.image for s in dataset.samples()}["thing3"] == mini.picture(3, "JPEG")


def test_missing_images_and_broken_zips_are_refused_and_bytes_that_changed_inside_are_damage(tmp_path):
    table = mini.caption_table(tmp_path / "table", packed=False)
    (table / "images_flickr_1k_test" / "2001.jpg").unlink()
    with pytest.raises(FileNotFoundError, match="1 of 5 images of the table are not in .*: 2001.jpg"):
        open_caption_table(table)
    wino = mini.winogavil(tmp_path / "wino")
    archive = wino / "winogavil_images.zip"
    archive.write_bytes(archive.read_bytes()[:-100])
    with pytest.raises(DamagedData, match="winogavil_images.zip is not a complete zip"):
        open_winogavil(wino)
    archive.unlink()
    with pytest.raises(FileNotFoundError, match="neither winogavil_images.zip nor winogavil_images/ in"):
        open_winogavil(wino)
    with pytest.raises(FileNotFoundError, match="no test_1k_flickr.csv or test_5k_mscoco_2014.csv in"):
        open_caption_table(wino)
    archive = mini.caption_table(tmp_path) / "images_flickr_1k_test.zip"
    data = bytearray(archive.read_bytes())
    data[data.find(mini.picture(2, "JPEG")) + 50] ^= 1
    archive.write_bytes(data)
    with pytest.raises(DamagedData, match="'2002.jpg': missing image: .*zip: Bad CRC-32"):
        list(open_caption_table(tmp_path).samples())
    damage = FaultCounter()
    assert len(list(open_caption_table(tmp_path, damage=damage).samples())) == 4 and damage.bad_samples == 1


def test_an_instance_that_makes_no_sense_is_named_by_its_row(tmp_path):
    table = mini.winogavil(tmp_path) / "winogavil_dataset.csv"
    for change, message in (
        ({"associations": ["nothing"]}, r"row 3: associations \['nothing'\] of"),
        ({"associations": []}, r"row 3: associations \[\] of"),
        ({"candidates": '"bison"'}, "row 3: candidates is not a JSON list of texts"),
    ):
        mini.winogavil(tmp_path)
        rows = rows_of(table)
        rows[1] |= change
        mini.write_table(table, rows)
        with pytest.raises(DamagedData, match=message):
            open_winogavil(tmp_path)


@pytest.mark.parametrize(
    "change, message",
    [
        ((b'"[""', b'[""'), r"line 2 has \d+ cells, the header 3 columns, .*; or fetch it again"),
        ((b"raw,", b"text,"), "has no column raw; it has text, split, filename"),
        ((b'"[""', b'"[""\xff'), r"is not UTF-8 \(.*0xff.*; or fetch it again"),
    ],
)
def test_a_damaged_table_is_refused_by_line(tmp_path, change, message):
    table = mini.caption_table(tmp_path) / "test_1k_flickr.csv"
    table.write_bytes(table.read_bytes().replace(*change, 1))
    with pytest.raises(DamagedData, match=message):
        open_caption_table(tmp_path)
