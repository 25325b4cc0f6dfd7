"""The bundled shards are what their README says: the counts, the images, and one text per concept in every style."""

from __future__ import annotations

import io
import json
import re
import tarfile
from functools import cache
from pathlib import Path

import pytest
from PIL import Image

FOLDER = Path(__file__).parents[3] / "data/emoji"
COUNTS = {
    shard: int(count)
    for shard, count in re.findall(r"^\| ([\w-]+)\.tar \|[^|]*\| (\d+) \|", (FOLDER / "README.md").read_text(), re.M)
}


@cache
def read(style: str) -> dict[str, dict[str, bytes]]:
    """{key: {suffix: bytes}} of a shard."""
    rows: dict[str, dict[str, bytes]] = {}
    with tarfile.open(FOLDER / f"{style}.tar") as tar:
        for member in tar:
            key, suffix = member.name.split(".", 1)
            assert suffix not in rows.get(key, {}), f"{member.name} twice"
            rows.setdefault(key, {})[suffix] = tar.extractfile(member).read()
    return rows


def test_readme_counts_every_shard_of_the_folder():
    assert sorted(COUNTS) == sorted(path.stem for path in FOLDER.glob("*.tar"))
    assert len(COUNTS) == 7


@pytest.mark.parametrize("style", COUNTS)
def test_every_sample_has_a_picture_a_name_and_an_annotation_that_agree(style):
    rows = read(style)
    assert len(rows) == COUNTS[style]
    for key, files in rows.items():
        assert list(files) == ["webp", "txt", "json"], key
        record = json.loads(files["json"])
        assert list(record) == ["hexcode", "name", "keywords", "subgroup", "group", "style"]
        assert key == f"{style}-{record['hexcode']}" and record["style"] == style
        assert record["name"] == files["txt"].decode() and record["name"].strip()
        assert record["group"] not in ("flags", "component") and record["subgroup"]
        assert record["name"].lower() not in record["keywords"]
        assert len(set(record["keywords"])) == len(record["keywords"])


@pytest.mark.parametrize("style", COUNTS)
def test_every_picture_decodes_to_64_by_64_rgb_that_is_not_blank(style):
    for key, files in read(style).items():
        picture = Image.open(io.BytesIO(files["webp"]))
        picture.load()
        assert (picture.format, picture.size, picture.mode) == ("WEBP", (64, 64), "RGB"), key
        # the palest drawings are white hearts and squares with a grey rim, 31 steps below the paper
        assert max(high - low for low, high in picture.getextrema()) > 16, f"{key} is blank"


def test_a_concept_has_the_same_texts_in_every_style():
    texts: dict[str, dict] = {}
    for style in COUNTS:
        for key, files in read(style).items():
            record = json.loads(files["json"])
            del record["style"]
            assert texts.setdefault(record["hexcode"], record) == record, key
    assert len(texts) == 1644
    names = [record["name"] for record in texts.values()]
    assert len(set(names)) == len(names)


def test_every_licence_that_readme_names_has_its_text():
    readme = (FOLDER / "LICENSES/README.md").read_text()
    named = set(re.findall(r"`([\w.-]+\.txt)`", readme))
    assert named == {path.name for path in (FOLDER / "LICENSES").glob("*.txt")}
    assert all(f"`{style}.tar`" in readme for style in COUNTS)
