"""Own data in an index: tables, folders and shards bring the same images with their captions."""

import pytest
from commands import run

import own_data
from prolip.explorer.thumbnails import Thumbnails
from prolip.search.index import SearchIndex
from prolip.search.sources import files_of


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return own_data.write(tmp_path_factory.mktemp("own"))


def items(folder):
    index = SearchIndex(folder)
    return index.items(range(len(index)))


@pytest.mark.parametrize("kind", ["csv", "bytes", "shards"])
def test_every_form_brings_its_captions_and_its_pictures(made, kind, tmp_path, small_model):
    run("search", "build", tmp_path / "i", "--data", made[kind], "--model", small_model)
    found = items(tmp_path / "i")
    assert [item["captions"] for item in found] == [own_data.captions(number) for number in range(12)]
    assert [Thumbnails().data(item) for item in found] == [own_data.image(number) for number in range(12)]
    if kind == "csv":
        assert [item["key"] for item in found] == [f"photos/{number:02d}.png" for number in range(12)]


def test_classes_stand_in_for_captions(made, tmp_path, small_model):
    run("search", "build", tmp_path / "i", "--data", made["classes"], "--model", small_model)
    assert {item["key"]: item["captions"] for item in items(tmp_path / "i")}["red_car/01.png"] == ["red car"]
    rows = [{"image": row["image"], "label": row["label"]} for row in own_data.records()[:12]]
    table = own_data.write_csv(tmp_path / "labels.csv", rows)
    (tmp_path / "photos").symlink_to(made["csv"].removeprefix("csv:").removesuffix("own.csv") + "photos")
    run("search", "build", tmp_path / "j", "--data", table, "--model", small_model)
    assert [item["captions"] for item in items(tmp_path / "j")] == [[own_data.label(n)] for n in range(12)]


def test_the_explorer_shows_a_table_with_its_captions(made, small_model):
    from prolip.embedder import Embedder
    from prolip.explorer.app import open_source, resolved

    table = made["csv"].removeprefix("csv:")
    assert resolved(small_model, table)[0] == made["csv"]
    opened = open_source(small_model, Embedder.load(small_model), table)
    item = opened.index.items([3])[0]
    assert item["captions"] == own_data.captions(3) and not any("caption" in lack for lack in opened.limitations)
    opened.temporary.cleanup()


@pytest.mark.parametrize(
    "address, names",
    [
        ("shards:{a,b}.tar::c.tar", ["a.tar", "b.tar", "c.tar"]),
        ("csv:my{photos.csv", ["my{photos.csv"]),  # a lone brace, which no file needs to hold
        ("images:{x,y}", ["{x,y}"]),  # a folder of this name is there
        ("", []),
    ],
)
def test_the_files_of_an_address_are_those_that_it_names(tmp_path, monkeypatch, address, names):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "{x,y}").mkdir()
    assert files_of(address) == {str((tmp_path / name).resolve()) for name in names}
