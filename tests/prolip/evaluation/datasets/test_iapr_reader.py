"""IAPR TC-12: a caption for each sentence, splits by lists or by the hash of ids, errors by name."""

import miniatures as mini
import pytest

from prolip.data.captions import stable_hash
from prolip.evaluation.datasets.base import DamagedData
from prolip.evaluation.datasets.specs import open_dataset


def open_iapr(folder, lists=None, split="test"):
    return open_dataset(f"iapr:{folder},{lists}" if lists else f"iapr:{folder}", split)


@pytest.fixture
def folder(tmp_path):
    return mini.iapr(tmp_path / "iaprtc12", images=40)


def keys(dataset):
    return [sample.key for sample in dataset.samples()]


def test_sentences_are_captions_in_the_letters_of_their_file(folder):
    samples = {sample.key: sample for sample in open_iapr(folder, split="all").samples()}
    assert samples["00/1"].captions == ("a café of Smith & Sons & Co", "a wall behind it")
    assert [len(samples[f"{i // 2:02d}/{i}"].captions) for i in range(2, 6)] == [3, 1, 2, 3]
    assert samples["01/3"].image == (folder / "images/01/3.jpg").read_bytes()
    assert list(samples)[:3] == ["00/0", "00/1", "01/2"]


def test_without_a_list_the_hash_of_its_id_says_where_an_image_is(folder):
    test, train = (keys(open_iapr(folder, split=split)) for split in ("test", "train"))
    assert set(test) == {key for key in train + test if stable_hash("iapr", key) % 10 == 0} and 0 < len(test) < 12
    assert sorted(test + train) == sorted(keys(open_iapr(folder, split="all"))) and len(test + train) == 40
    for path in folder.glob("annotations_complete_eng/19/*.eng"):  # others do not change places
        path.unlink()
    assert keys(open_iapr(folder)) == [key for key in test if not key.startswith("19/")]


def test_lists_that_lie_there_are_followed(folder, tmp_path):
    (folder / "iaprtc12_test_list.txt").write_text("03/7\n00/0\n")
    (folder / "iaprtc12_train_list.txt").write_text("00/1\n")
    assert keys(open_iapr(folder)) == ["00/0", "03/7"] and keys(open_iapr(folder, split="train")) == ["00/1"]
    mine = tmp_path / "mine.txt"
    mine.write_text("05/10.jpg\r\n\r\n05/11.jpg\r\n")
    assert keys(open_iapr(folder, lists=mine)) == ["05/10", "05/11"]
    with pytest.raises(FileNotFoundError, match="no list .*/lists: give a file of ids, or the folder of iaprtc12_test"):
        open_iapr(folder, lists=tmp_path / "lists")
    mine.write_text("99/1\n")
    with pytest.raises(DamagedData, match="names 1 images without an annotation, 99/1 first: want ids such as 00/25"):
        open_iapr(folder, lists=mine)


def test_what_the_complete_annotations_lack_the_others_may_have(folder):
    other = folder / "annotations" / "00" / "0.eng"
    other.parent.mkdir(parents=True)
    (folder / "annotations_complete_eng" / "00" / "0.eng").rename(other)
    assert "00/0" in keys(open_iapr(folder, split="all"))


def test_an_image_that_nobody_described_is_left_out_and_named(folder, caplog):
    path = folder / "annotations_complete_eng/00/0.eng"
    path.write_text("<DOC>\n<DESCRIPTION> </DESCRIPTION>\n<IMAGE>images/00/0.jpg</IMAGE>\n</DOC>\n")
    assert "00/0" not in keys(open_iapr(folder, split="all"))
    assert "1 images have no description and are left out: 00/0" in caplog.text


def test_what_is_wrong_is_known_before_anything_is_read(folder, tmp_path):
    with pytest.raises(ValueError, match="no split 'val': give one of train, test, all"):
        open_iapr(folder, split="val")
    (folder / "images/00/0.jpg").unlink()
    with pytest.raises(FileNotFoundError, match="images of iapr, all: 1 of 40 files are missing"):
        open_iapr(folder, split="all")
    (folder / "annotations_complete_eng/00/0.eng").write_text("<html>")
    with pytest.raises(DamagedData, match="0.eng has no <DESCRIPTION> and <IMAGE>: fetch it again"):
        open_iapr(folder, split="all")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="holds no folder annotations_complete_eng or ann.*as unpacked"):
        open_iapr(tmp_path / "empty")
    with pytest.raises(FileNotFoundError, match="no folder .*iaprtc: .*Did you mean iaprtc12"):
        open_iapr(tmp_path / "iaprtc")


def test_a_caption_changes_the_fingerprint(folder):
    before = open_iapr(folder, split="all").fingerprint
    path = folder / "annotations_complete_eng/01/2.eng"
    path.write_text(path.read_text(encoding="latin1").replace("Title 2", "Another"), encoding="latin1")
    assert open_iapr(folder, split="all").fingerprint == before
    path.write_text(path.read_text(encoding="latin1").replace(";", "!;", 1), encoding="latin1")
    assert open_iapr(folder, split="all").fingerprint != before
