"""What samples state of their images, and rows as shards hold them."""

import json

import pytest

from prolip.data.captions import CaptionSampler
from prolip.data.faults import SampleFault
from prolip.data.reading.folders import ImageRow
from prolip.data.reading.named import NamedSource
from prolip.data.reading.rows import as_stored, base_of, key_of, stated_by
from prolip.data.samples import caption_parts


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


def test_a_json_that_cannot_be_read_is_a_fault_where_nothing_else_states_a_caption():
    with pytest.raises(SampleFault, match="bad json"):
        stated_by({"__key__": "a", "json": b"{"})


@pytest.mark.parametrize(
    "caption, members",
    [
        ("a cat", {"txt": b"a cat"}),
        (["a cat"], {"txt": b"a cat"}),
        ("", {}),
        ("a cat\non a mat", {"captions": ["a cat\non a mat"]}),
        (["a", "b"], {"captions": ["a", "b"]}),
    ],
)
def test_a_stored_row_states_its_captions_to_training_and_to_evaluation(caption, members):
    found = as_stored({"txt": caption, "json": {"label": "cat"}, "png": b"image"}, "sub/a.b c.png")
    record = json.loads(found["json"])
    assert found["__key__"] == "sub/a_b_c" and found["png"] == b"image" and record["label"] == "cat"
    assert {name: found.get(name, record.get(name)) for name in members} == members
    assert found.keys() - {"txt"} == {"__key__", "png", "json"} and ("txt" in found) == ("txt" in members)
    wanted = [caption] if isinstance(caption, str) else caption
    if caption:
        captions = CaptionSampler.parse("txt")
        assert list(captions.chances(*caption_parts(dict(found), captions))) == wanted
        assert list(stated_by(found)[0]) == wanted


def test_keys_start_from_the_folder_of_the_table_or_the_images(tmp_path):
    (tmp_path / "photos").mkdir()
    row = ImageRow(f"{tmp_path}/photos/a.png", None, {})
    assert key_of(row, base_of(NamedSource("csv", f"{tmp_path}/t.csv"))) == "photos/a.png"
    assert key_of(row, base_of(NamedSource("images", f"{tmp_path}/photos"))) == "a.png"
    assert key_of(row, base_of(NamedSource("coco", f"{tmp_path}/c.json,{tmp_path}/photos"))) == "a.png"
    assert key_of(row, base_of(NamedSource("csv", f"{tmp_path}/other/t.csv"))) == row.path
