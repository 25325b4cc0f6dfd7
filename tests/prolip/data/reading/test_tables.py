"""Tables of any common form: their separators, columns and paths are recognised, and all problems told at once."""

import csv
import json

import pytest
from tiny_loaders import read_csv
from tiny_tars import png

from prolip.data.captions import Selector
from prolip.data.faults import SampleFault
from prolip.data.reading.csv import TableError
from prolip.data.reading.named import NamedSource, parse_source
from prolip.data.reading.rows import read_rows
from prolip.data.reading.tables import TableColumns, TableProblems


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of six images, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    for number in range(6):
        (tmp_path / f"{number}.png").write_bytes(png(number))
    return tmp_path


def found(rows):
    return [(row.path.rpartition("/")[2], row.caption) for row in rows.rows]


TRUTH = [(f"{number}.png", f"a caption, of {number}") for number in range(3)]


@pytest.mark.parametrize("separator", [",", "\t", ";", "|"])
@pytest.mark.parametrize(
    "header",
    [
        ("image", "caption"),
        ("Image Path", "Caption"),
        (" filename ", " text"),
        ("file_name", "description"),
        ("FILE", "Title"),
        ("img", "sentence"),
        ("datei", "beschreibung"),
        ("caption_file", "words"),
    ],
)
def test_separators_and_columns_are_recognised(folder, separator, header, caplog):
    with open("a.csv", "w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file, delimiter=separator).writerows([header, *TRUTH])
    with caplog.at_level("INFO"):
        assert found(read_rows(parse_source("a.csv"))) == TRUTH
    image, caption = map(str.strip, header)
    columns = f"images from column {image!r}, captions from column {caption!r}"
    assert f"a.csv: recognised the separator {separator!r}, {columns}" in caplog.messages


def test_the_columns_of_a_wider_table_are_recognised_by_name_and_content(folder):
    rows = [(f"{n}", f"{n}.png", f"caption {n}", "cats" if n % 2 else "dogs", f"{n / 7}") for n in range(4)]
    with open("a.csv", "w", newline="") as file:
        csv.writer(file).writerows([("id", "where", "text", "Label", "score"), *rows])
    read = read_rows(parse_source("a.csv"))
    assert found(read) == [row[1:3] for row in rows]
    assert [row.record for row in read.rows] == [{"label": row[3]} for row in rows] and read.rows[0].number == 2


def test_of_a_table_of_classes_the_class_is_the_caption(folder):
    (folder / "a.csv").write_text("image,class\n0.png,cat\n1.png,dog\n")
    read = read_rows(parse_source("a.csv"))
    assert found(read) == [("0.png", "cat"), ("1.png", "dog")] and read.rows[1].record == {"class": "dog"}


def test_a_table_of_images_alone_is_read_where_no_caption_is_needed(folder):
    (folder / "a.csv").write_text("image\n0.png\n1.png\n")
    read = read_rows(parse_source("a.csv"), TableColumns(needs_caption=False))
    assert found(read) == [("0.png", None), ("1.png", None)] and "txt" not in read(0)
    with pytest.raises(ValueError, match="no column seems to hold the captions; .* are image: .*--csv-caption-key"):
        read_rows(parse_source("a.csv"))


def test_where_several_choices_fit_the_flag_is_named(folder):
    (folder / "a.csv").write_text("image,title,description\n0.png,x,y\n")
    with pytest.raises(ValueError, match="columns title, description may all hold the captions.*--csv-caption-key"):
        read_rows(parse_source("a.csv"))
    assert found(read_csv("a.csv", TableColumns(caption="description"))) == [("0.png", "y")]
    (folder / "b.csv").write_text("left,right,text\n0.png,1.png,x\n")
    with pytest.raises(ValueError, match=r"the columns left, right may all hold the images.*--csv-img-key"):
        read_rows(parse_source("b.csv"))
    (folder / "c.csv").write_text("image;caption,file\n0.png;x,y\n")
    with pytest.raises(ValueError, match=r"can be split at ',' or at ';': name the right one with --csv-separator"):
        read_rows(parse_source("c.csv"))


def test_a_caption_that_holds_other_separators_does_not_mislead(folder):
    (folder / "a.csv").write_text("image;caption\n0.png;a cat, a dog, and more\n1.png;one, two\n")
    assert found(read_rows(parse_source("a.csv")))[0] == ("0.png", "a cat, a dog, and more")


def test_every_problem_of_a_table_is_told_at_once_by_its_row(folder):
    (folder / "pictures").mkdir()
    rows = ["0.png,x", "no.png,y", "1.png,", "", "2.png,a,b", "gone.png,z", "3.png, ", "4.png,w", "5.png,v,u"]
    (folder / "a.csv").write_text("\n".join(["image,caption", *rows]) + "\n")
    with pytest.raises(TableProblems) as refused:
        read_rows(parse_source("a.csv"), max_bad=0.01)
    first, *lines = str(refused.value).splitlines()
    assert first == "a.csv (the header is row 1):"
    assert lines[0].startswith("  2 of 6 rows name no image that is there: rows 3, 7 (")
    assert f"relative paths start from {folder}; --image-root FOLDER sets another start" in lines[0]
    assert lines[1] == "  2 of 6 rows have no caption: rows 4, 8"
    assert lines[2].startswith("  2 rows are damaged: rows 6, 10: line 6 has 3 cells, the header 2 columns")
    assert lines[3] == "  Correct the table." and len(lines) == 4
    assert not {"shard", "sample"} & set(str(refused.value).split())


def test_what_is_tolerated_is_told_and_left_for_the_loader(folder, caplog):
    rows = [f"{n % 6}.png,x{n}" for n in range(20)] + ["no.png,y"]
    (folder / "a.csv").write_text("\n".join(["image,caption", *rows]))
    with pytest.raises(TableError, match=r"1 of 21 rows name no image that is there: row 22 .*--max-bad-fraction$"):
        read_rows(parse_source("a.csv"), max_bad=0.04)
    read = read_rows(parse_source("a.csv"), max_bad=0.05)
    assert "these rows are left out: 1 of 21 rows name no image that is there: row 22" in caplog.text
    with pytest.raises(SampleFault, match=r"missing image: .*no.png: .* \(row 22 of the table\)"):
        read(len(read) - 1)


def test_rows_that_are_not_selected_may_lack_their_image(folder):
    (folder / "a.csv").write_text("image,caption,group\n0.png,x,a\nno.png,y,b\n")
    columns = TableColumns(conditions=("group",))
    assert found(read_rows(parse_source("a.csv"), columns, Selector.parse("group=a"))) == [("0.png", "x")]


def test_of_many_rows_some_that_are_spread_evenly_are_looked_for(folder, monkeypatch):
    monkeypatch.setattr("prolip.data.reading.tables.LOOKED_FOR", 10)
    (folder / "a.csv").write_text("image,caption\n" + "".join(f"no{n}.png,x\n" for n in range(1000)))
    with pytest.raises(TableError, match=r"10 of 10 rows that were looked for, of 1,000 name no image"):
        read_rows(parse_source("a.csv"))


def test_relative_paths_start_from_the_image_root(folder):
    (folder / "lists").mkdir()
    (folder / "lists" / "a.csv").write_text("image,caption\n0.png,x\n")
    (folder / "deep").mkdir(), (folder / "deep" / "0.png").write_bytes(png(5))
    read = read_rows(parse_source("lists/a.csv"), TableColumns(image_root="deep"))
    assert read(0)["png"] == png(5)
    with pytest.raises(FileNotFoundError, match="--image-root 'none' is no folder"):
        read_rows(parse_source("lists/a.csv"), TableColumns(image_root="none"))


def test_addresses_in_a_table_are_named_as_such(folder):
    (folder / "a.csv").write_text("image,caption\nhttps://h/0.png,x\n")
    with pytest.raises(TableError, match="addresses are no files: fetch the images first"):
        read_rows(parse_source("a.csv"))


def test_json_lines_are_read_strictly_with_several_captions_an_image(folder):
    lines = [
        {"file_name": "0.png", "text": ["x", "y"], "label": 3},
        {"file_name": "1.png", "text": "z"},
        {"file_name": "1.png", "text": "w"},
    ]
    (folder / "a.jsonl").write_text("\n\n".join(map(json.dumps, lines)))
    read = read_rows(parse_source("a.jsonl"))
    assert found(read) == [("0.png", ["x", "y"]), ("1.png", ["z", "w"])] and read.rows[0].record == {"label": 3}
    broken = ['{"file_name": "0.png", "text": "x"}', "{", "[1]", '{"text": "a", "text": "b"}', '{"text": "y"}']
    (folder / "a.jsonl").write_text("\n".join(broken))
    with pytest.raises(TableProblems) as refused:
        read_rows(parse_source("a.jsonl"))
    assert "the first is row 1" in str(refused.value) and "3 rows are damaged: rows 2, 3, 4: " in str(refused.value)
    assert "1 of 2 rows name no image that is there: row 5 (an empty cell)" in str(refused.value)


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_a_table_that_is_not_there_is_refused(folder, kind):
    with pytest.raises(FileNotFoundError):
        read_rows(NamedSource(kind, "none"))
    with pytest.raises(ValueError, match="is a URL, and a .* table is a local file"):
        read_rows(NamedSource(kind, "https://h/a"))
