"""Test sets given one level off, and test sets of which nothing can be used: told before anything is computed."""

import itertools
import re

import pytest
import wds_folders as wds

from prolip.data.faults import FaultCounter
from prolip.evaluation.datasets.base import DamagedData
from prolip.evaluation.datasets.folders import open_folder
from prolip.evaluation.datasets.specs import open_dataset
from prolip.evaluation.datasets.wds import open_wds

IMAGE = wds.encoded(wds.picture(0))


def write_set(folder, split="test", samples=None, kind="classification"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "classnames.txt").write_text("\n".join(wds.CLASSES))
    (folder / "zeroshot_classification_templates.txt").write_text("a {c}")
    (folder / "dataset_type.txt").write_text(kind)
    wds.write_split(folder / split, samples or [{"png": IMAGE, "cls": b"1"}])


@pytest.fixture
def sets(tmp_path):
    """all/{wds_a, wds_cars_test}/test and all/wds_dev/dev."""
    for name in ("wds_a", "wds_cars_test"):
        write_set(tmp_path / "all" / name)
    write_set(tmp_path / "all" / "wds_dev", split="dev")
    return tmp_path / "all"


@pytest.mark.parametrize(
    "given, wanted",
    [
        ("", "it is one level too high: give {all}/wds_a or another of the 2 data sets in it (wds_a, wds_cars_test)"),
        ("..", "it is one level too high: give {all}/wds_a"),
        ("wds_a/test", "it lies inside a data set: give {all}/wds_a."),
        ("wds_a/test/", "it lies inside a data set: give {all}/wds_a."),
        ("wds_dev/dev", "it is the split 'dev' of a data set: give {all}/wds_dev and --split dev"),
        ("wds_dev", "it has the split dev: give --split dev"),
        ("wds_a/test/0.tar", "is a file: give the folder of the test set, such as {all}/wds_a"),
        ("wds_b", "Did you mean wds_a"),
    ],
)
@pytest.mark.parametrize("word", ["", "wds:"])
def test_a_folder_one_level_off_names_the_one_that_is_meant(sets, given, wanted, word):
    with pytest.raises(FileNotFoundError) as refused:
        open_dataset(f"wds:{sets}/{given}") if word else open_wds(f"{sets}/{given}")
    said = str(refused.value)
    assert wanted.format(all=sets) in said and "\n" not in said
    if found := re.search(r"give (/\S*wds_\w+)( and --split dev)?", said):  # what is named is right
        open_wds(found[1], split="dev" if found[2] else "test")


def test_splits_are_not_taken_for_classes_and_a_class_not_for_the_set(tmp_path):
    for split, name in itertools.product(("train", "val"), ("n01440764", "n01443537")):
        (tmp_path / split / name).mkdir(parents=True)
        (tmp_path / split / name / "a.png").write_bytes(IMAGE)
    with pytest.raises(ValueError, match=rf"one level too high: it holds train, val, .* give {tmp_path}/val$"):
        open_folder(tmp_path)
    with pytest.raises(ValueError, match=rf"it is a class itself, give {tmp_path}/val$"):
        open_folder(tmp_path / "val" / "n01440764")
    assert open_folder(tmp_path / "val").size == 2
    (tmp_path / "pets" / "test" / "cat").mkdir(parents=True)
    (tmp_path / "pets" / "test" / "cat" / "a.png").write_bytes(IMAGE)
    with pytest.raises(ValueError, match=rf"one level too high: .* give {tmp_path}/pets/test$"):
        open_folder(tmp_path / "pets")


# --- nothing that can be used -----------------------------------------------------------------------------------------
KINDS = {
    "classification": ({"png": IMAGE, "cls": b"1"}, "cls"),
    "retrieval": ({"png": IMAGE, "txt": b"a"}, "txt"),
    "multilabel": ({"png": IMAGE, "npy": wds.encoded_array(wds.np.ones(6, dtype=int))}, "npy"),
}
MISTAKES = {
    "dots": (lambda good: {f"v2.{name}": data for name, data in good.items()}, "the key ends at the first dot"),
    "image": (lambda good: {"image" if name == "png" else name: data for name, data in good.items()}, "suffix 'image'"),
    "no image": (lambda good: {name: data for name, data in good.items() if name != "png"}, "labels alone"),
    "image alone": (lambda good: {"png": good["png"]}, "its images have no text beside them"),
    "other": (lambda good: {"png": good["png"], "json": b'{"a": "b"}'}, "members: png, json|no npy member"),
    "html": (lambda good: None, "no tar archive but an HTML page"),
    "empty": (lambda good: None, "no tar archive but an empty file"),
}


@pytest.mark.parametrize("tolerant", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_set_of_which_nothing_can_be_used_is_refused_when_it_is_opened(tmp_path, kind, mistake, tolerant):
    good, member = KINDS[kind]
    spoil, words = MISTAKES[mistake]
    bad = spoil(good)
    write_set(tmp_path / "s", samples=[bad or good] * 3, kind=kind)
    if bad is None:
        (tmp_path / "s/test/0.tar").write_text("<html>404</html>" if mistake == "html" else "")
    with pytest.raises(DamagedData, match=words) as refused:
        open_wds(tmp_path / "s", damage=FaultCounter() if tolerant else None)
    said = str(refused.value)
    assert "\n" not in said and f"{tmp_path}/s/test/0.tar" in said
    if mistake in ("dots", "image", "no image"):
        assert said.endswith(f"wanted: KEY.jpg beside KEY.{member}")
    write_set(tmp_path / "s", samples=[bad or {"txt": b"x"}] * 3 + [good], kind=kind)
    assert open_wds(tmp_path / "s").kind == kind  # one that can be used is enough to begin
