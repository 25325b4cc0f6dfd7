"""Folders of images, rows as shards hold them, and the captions and classes that samples state."""

import json
import os
from pathlib import Path

import pytest
from tiny_tars import png

from prolip.data.captions import CaptionSampler, Selector
from prolip.data.faults import SampleFault
from prolip.data.reading.folders import ImageRow, read_folder
from prolip.data.reading.named import NamedSource
from prolip.data.reading.rows import as_stored, base_of, key_of, stated_by
from prolip.data.samples import caption_parts


def write(root, *names):
    for number, name in enumerate(names):
        (root / name).parent.mkdir(exist_ok=True, parents=True)
        (root / name).write_bytes(png(number))


def found(root):
    return [row.path.removeprefix(f"{root}/") for row in read_folder(str(root)).rows]


def test_a_folder_gives_class_names_or_the_text_beside_the_image(tmp_path):
    write(tmp_path, "free.png", "polar_bear/1.png", "polar_bear/2.png", "polar_bear/deep/3.PNG", "polar_bear/notes.md")
    (tmp_path / "polar_bear/2.txt").write_text("a bear on ice")
    (tmp_path / "polar_bear/2.json").write_text(json.dumps({"keywords": ["ice"]}))
    rows = read_folder(str(tmp_path))
    raws = {rows(i)["__key__"].removeprefix(f"{tmp_path}/"): rows(i) for i in range(len(rows))}
    assert list(raws) == ["free.png", "polar_bear/1.png", "polar_bear/2.png", "polar_bear/deep/3.PNG"]
    assert raws["polar_bear/1.png"]["txt"] == raws["polar_bear/deep/3.PNG"]["txt"] == "polar bear"
    assert raws["polar_bear/2.png"]["txt"] == "a bear on ice"
    assert raws["polar_bear/2.png"]["json"] == {"class": "polar bear", "keywords": ["ice"]}
    assert "txt" not in raws["free.png"] and raws["free.png"]["png"] == png(0)
    assert len(read_folder(str(tmp_path), Selector.parse("keywords=ice"))) == 1


def test_folders_without_images_are_refused_and_hidden_names_are_none(tmp_path):
    (tmp_path / "notes.md").touch()
    with pytest.raises(ValueError, match=r"has no image \(jpg, .*; it contains notes.md"):
        read_folder(str(tmp_path))
    with pytest.raises(FileNotFoundError, match="image folder .* is missing"):
        read_folder(str(tmp_path / "none"))
    write(tmp_path, "cat/1.png", "cat/._1.png", ".cache/2.png", "cat/.thumbs/3.png")
    assert found(tmp_path) == ["cat/1.png"]


def test_links_are_followed_inside_the_folder_unless_they_lead_back_and_refused_if_they_leave_it(tmp_path):
    root = tmp_path / "root"
    write(root, "cat/1.png", ".kept/2.png")
    (tmp_path / "link").symlink_to(root), (root / "cat" / "3.png").symlink_to(root / ".kept" / "2.png")
    (root / "dog").symlink_to(".kept")
    (root / "cat" / "up").symlink_to(root), (root / "cat" / "here").symlink_to(".")
    for place in (root, tmp_path / "link"):  # the folder itself may be a link
        assert found(place) == ["cat/1.png", "cat/3.png", "dog/2.png"]
    write(tmp_path, "root/cat/1.png", "root/cat/2.png", "out/2.png", "secret")
    for link in ("1.txt", "1.json", "2.png", "more"):
        target, place = tmp_path / ("out" if link == "more" else "secret"), tmp_path / "root" / "cat" / link
        place.unlink(missing_ok=True), place.symlink_to(target)
        with pytest.raises(ValueError, match=f"{place} is a link to {target}, outside {tmp_path}/root.*copy the file"):
            read_folder(str(tmp_path / "root"))
        place.unlink()


def test_texts_beside_images_that_cannot_be_read_are_named(tmp_path):
    write(tmp_path, "1.png")
    for name, content, message in (
        ("1.json", b"\xe4", "1.json is not a JSON object: .*utf-8"),
        ("1.json", b"[" * 100_000, "1.json is not a JSON object: it is nested too deeply"),
        ("1.json", b"[1]", "1.json is not a JSON object: a list, expected an object"),
        ("1.txt", b"\xff\xfe", "1.txt is not UTF-8: .*Repair or remove it"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=message):
            read_folder(str(tmp_path))


def test_file_names_that_are_no_utf_8_make_keys_that_can_be_written(tmp_path):
    path = os.fsencode(tmp_path) + b"/k\xe4.png"
    try:
        Path(os.fsdecode(path)).write_bytes(png(4))
    except OSError:
        pytest.skip("this file system has UTF-8 names only")
    raw = read_folder(str(tmp_path))(0)
    assert raw["__key__"] == rf"{tmp_path}/k\udce4.png" and raw["png"] == png(4)


# --- what samples state
@pytest.mark.parametrize(
    "raw, stated",
    [
        ({"txt": b"a cat\n\na dog"}, (["a cat", "a dog"], None)),
        ({"txt": b"a cat", "json": b'{"label": "cat"}'}, (["a cat"], "cat")),
        ({"txt": b"a cat", "json": b"{"}, (["a cat"], None)),
        ({"json": b'{"caption": "one", "captions": ["a", "b"], "Class": 3}'}, (["a", "b"], "3")),
        ({"json": b'{"label": "cat"}'}, ([], "cat")),
        ({"cls": b"7\n"}, ([], "7")),
    ],
)
def test_captions_and_classes_of_a_sample(raw, stated):
    assert stated_by({"__key__": "a", **raw}) == stated
    with pytest.raises(SampleFault, match="bad json"):  # where nothing else states a caption
        stated_by({"__key__": "a", "json": b"{"})


STORED = [("", {}), *((caption, {"txt": b"a cat"}) for caption in ("a cat", ["a cat"]))]
STORED += [("a cat\non a mat", {"captions": ["a cat\non a mat"]}), (["a", "b"], {"captions": ["a", "b"]})]


@pytest.mark.parametrize("caption, members", STORED)
def test_a_stored_row_states_its_captions_to_training_and_to_evaluation(caption, members):
    found = as_stored({"txt": caption, "json": {"label": "cat"}, "png": b"image"}, "sub/a.b c.png")
    record = json.loads(found["json"])
    assert found["__key__"] == "sub/a_b_c" and found["png"] == b"image" and record["label"] == "cat"
    assert {name: found.get(name, record.get(name)) for name in members} == members
    assert found.keys() - {"txt"} == {"__key__", "png", "json"} and ("txt" in found) == ("txt" in members)
    wanted = [caption] if isinstance(caption, str) else caption
    if caption:
        captions = CaptionSampler.parse("txt")
        assert list(captions.chances(*caption_parts(dict(found), captions))) == wanted == list(stated_by(found)[0])


def test_keys_start_from_the_folder_of_the_table_or_the_images(tmp_path):
    (tmp_path / "photos").mkdir()
    row = ImageRow(f"{tmp_path}/photos/a.png", None, {})
    for kind, address, key in (
        ("csv", f"{tmp_path}/t.csv", "photos/a.png"),
        ("images", f"{tmp_path}/photos", "a.png"),
        ("coco", f"{tmp_path}/c.json,{tmp_path}/photos", "a.png"),
        ("csv", f"{tmp_path}/other/t.csv", row.path),
    ):
        assert key_of(row, base_of(NamedSource(kind, address))) == key
