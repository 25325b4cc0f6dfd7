import csv
import json
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_loaders import read_csv
from tiny_tars import png

from prolip.data.captions import Selector
from prolip.data.config import DataConfig
from prolip.data.faults import SampleFault
from prolip.data.reading.folders import ImageRow, ImageRows, read_folder
from prolip.data.reading.tables import TableColumns
from prolip.data.sources import table_columns

COLUMNS = TableColumns("filepath", "title")


def write_csv(path, rows, separator="\t", header=("filepath", "title", "name")):
    path.write_text("\n".join(separator.join(row) for row in [header, *rows]) + "\n")
    return str(path)


def test_csv_rows_give_bytes_caption_and_the_wanted_columns(tmp_path):
    (tmp_path / "a.png").write_bytes(png(1))
    url = write_csv(tmp_path / "d.csv", [("a.png", "a cat", "cat")])
    rows = read_csv(url, COLUMNS._replace(captions=("name",)), "\t")
    assert len(rows) == 1
    raw = rows(0)
    assert (raw["png"], raw["txt"], raw["json"]) == (png(1), "a cat", {"name": "cat"})
    assert raw["__key__"] == f"{tmp_path}/a.png"


def test_csv_paths_start_from_the_working_directory_if_they_are_there(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a.png").write_bytes(png(2))
    url = write_csv(tmp_path / "d.csv", [("a.png", "x", "")])
    with pytest.raises(SampleFault, match=f"missing image: {tmp_path}/a.png: No such file"):
        read_csv(url, COLUMNS, "\t")(0)
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert read_csv(url, COLUMNS, "\t")(0)["png"] == png(2)


def test_a_csv_without_the_named_column_says_which_there_are(tmp_path):
    url = write_csv(tmp_path / "d.csv", [("a.png", "x", "y")], header=("path", "titel", "name"))
    with pytest.raises(ValueError, match=r"no column 'filepath': its columns are path, titel, name; .* --csv-img-key"):
        read_csv(url, COLUMNS, "\t")
    with pytest.raises(ValueError, match=r"'title'.*--csv-caption-key \(did you mean 'titel'\?\)"):
        read_csv(url, COLUMNS._replace(image="path"), "\t")
    with pytest.raises(ValueError, match="'names'.*--caption-sampling"):
        read_csv(url, TableColumns("path", "name", ("names",)), "\t")
    with pytest.raises(ValueError, match="'style'.*--select"):
        read_csv(url, TableColumns("path", "name", (), ("style",)), "\t")


def test_a_csv_split_at_the_wrong_character_is_reported_the_right_one(tmp_path):
    for right, wrong in (",\t", "\t,"):
        path = write_csv(tmp_path / "c.csv", [("a.png", "x", "y")], separator=right)
        with pytest.raises(ValueError, match="no column 'filepath': .*or give the right --csv-separator$"):
            read_csv(path, COLUMNS, wrong)


def test_missing_and_empty_csv_files_are_refused(tmp_path):
    write_csv(tmp_path / "data.csv", [])
    with pytest.raises(FileNotFoundError, match=r"Did you mean data.csv"):
        read_csv(str(tmp_path / "dat.csv"), COLUMNS, "\t")
    with pytest.raises(ValueError, match="gives no sample: it has 0 rows"):
        read_csv(str(tmp_path / "data.csv"), COLUMNS, "\t")


@pytest.mark.parametrize(("name", "what"), [("", "a folder"), ("https://host/d.csv", "a URL")])
def test_a_csv_that_is_no_local_file_is_refused(tmp_path, name, what):
    with pytest.raises(ValueError, match=f"is {what}, and a csv table is a local file"):
        read_csv(name or str(tmp_path), COLUMNS, "\t")


def test_csv_rows_can_be_selected(tmp_path):
    url = write_csv(tmp_path / "d.csv", [("a.png", "x", "cat"), ("b.png", "y", "dog"), ("c.png", "z", "cat")])
    columns = COLUMNS._replace(conditions=("name",))
    assert [row.caption for row in read_csv(url, columns, "\t", Selector.parse("name=cat")).rows] == ["x", "z"]
    with pytest.raises(ValueError, match=r"gives no sample: it has 3 rows, with the fields name"):
        read_csv(url, columns, "\t", Selector.parse("name=cow"))


def test_a_folder_gives_class_names_or_the_text_beside_the_image(tmp_path):
    for name in ("polar_bear/1.png", "polar_bear/2.png", "polar_bear/deep/3.PNG", "free.png", "polar_bear/notes.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_bytes(png(3))
    (tmp_path / "polar_bear/2.txt").write_text("a bear on ice")
    (tmp_path / "polar_bear/2.json").write_text(json.dumps({"keywords": ["ice"]}))
    rows = read_folder(str(tmp_path))
    raws = {rows(i)["__key__"].removeprefix(f"{tmp_path}/"): rows(i) for i in range(len(rows))}
    assert list(raws) == ["free.png", "polar_bear/1.png", "polar_bear/2.png", "polar_bear/deep/3.PNG"]
    assert raws["polar_bear/1.png"]["txt"] == raws["polar_bear/deep/3.PNG"]["txt"] == "polar bear"
    assert raws["polar_bear/2.png"]["txt"] == "a bear on ice"
    assert raws["polar_bear/2.png"]["json"] == {"class": "polar bear", "keywords": ["ice"]}
    assert "txt" not in raws["free.png"] and raws["free.png"]["png"] == png(3)
    assert len(read_folder(str(tmp_path), Selector.parse("keywords=ice"))) == 1


def test_folders_without_images_are_refused(tmp_path):
    (tmp_path / "notes.md").touch()
    with pytest.raises(ValueError, match=r"holds no image \(jpg, .*; it holds notes.md"):
        read_folder(str(tmp_path))
    with pytest.raises(FileNotFoundError, match="image folder .* is missing"):
        read_folder(str(tmp_path / "none"))


def test_a_csv_with_a_byte_order_mark_is_read_and_other_encodings_are_named(tmp_path):
    text = "filepath\ttitle\na.png\tcäfé\n"
    (tmp_path / "d.csv").write_bytes(text.encode("utf-8-sig"))
    assert read_csv(str(tmp_path / "d.csv"), COLUMNS, "\t").rows[0].caption == "cäfé"
    (tmp_path / "d.csv").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"d.csv is no UTF-8 \(.*0xe4.*\): convert it, e.g. iconv -f LATIN1"):
        read_csv(str(tmp_path / "d.csv"), COLUMNS, "\t")


def test_paths_may_hold_any_bytes_and_line_breaks_of_files_that_are_there(tmp_path):
    names = ("caf\udce9.png", "a\nb.png", "a\x1b[31m.png", "\u202e\u2028.png", '"q".png')
    for name in names:
        (tmp_path / name).write_bytes(b"")
    with open(tmp_path / "d.csv", "w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        csv.writer(file).writerows([("filepath", "title"), *((name, "a caption") for name in names)])
    found = read_csv(str(tmp_path / "d.csv"), COLUMNS, ",").rows
    assert [row.path for row in found] == [str(tmp_path / name) for name in names]
    (tmp_path / "a\nb.png").unlink()
    with pytest.raises(ValueError, match="1 of 5 rows name no image that is there: row 3"):
        read_csv(str(tmp_path / "d.csv"), COLUMNS, ",", max_bad=0.1)


def test_the_plain_caption_column_may_be_absent_where_captions_come_from_others(tmp_path):
    url = write_csv(tmp_path / "d.csv", [("a.png", "cat")], header=("filepath", "name"))
    config = DataConfig(train_data=url, caption_sampling="name")
    assert read_csv(url, table_columns(config), "\t").rows[0].record == {"name": "cat"}
    with pytest.raises(ValueError, match="no column 'title'.*--csv-caption-key"):
        read_csv(url, table_columns(replace(config, caption_sampling="name,txt", csv_caption_key="title")), "\t")


def test_one_missing_image_does_not_decide_where_relative_paths_start(tmp_path, monkeypatch):
    (tmp_path / "work").mkdir(), (tmp_path / "lists").mkdir()
    (tmp_path / "work" / "b.png").write_bytes(png(2))
    url = write_csv(tmp_path / "lists" / "d.csv", [("a.png", "x", ""), ("b.png", "y", "")])
    monkeypatch.chdir(tmp_path / "work")
    assert read_csv(url, COLUMNS, "\t")(1)["png"] == png(2)


def test_rows_of_one_image_are_several_captions_of_it(tmp_path):
    """COCO and Flickr30k have five captions per image: five samples of it would stand in one batch."""
    (tmp_path / "a.png").write_bytes(png(1)), (tmp_path / "b.png").write_bytes(png(2))
    table = [("a.png", "x", "n"), ("b.png", "y", "m"), ("a.png", "z", "o"), ("a.png", "x", "")]
    rows = read_csv(write_csv(tmp_path / "d.csv", table), COLUMNS._replace(captions=("name",)))
    assert [(row.caption, row.record["name"]) for row in rows.rows] == [(["x", "z"], ["n", "o"]), ("y", "m")]
    assert [rows(i)["__key__"] for i in range(2)] == [f"{tmp_path}/{name}.png" for name in "ab"]


def test_paths_that_cannot_be_are_missing_images(tmp_path):
    rows = read_csv(write_csv(tmp_path / "d.csv", [("x" * 5000, "x", ""), ("", "y", "")]), COLUMNS, "\t")
    for reader, row in ((rows, 0), (rows, 1), (ImageRows([ImageRow("a\0b.png", "x", {})]), 0)):
        with pytest.raises(SampleFault, match="missing image"):
            reader(row)


def test_absolute_paths_do_not_decide_where_relative_ones_start(tmp_path, monkeypatch):
    """Any that is there was taken for one in the working directory, and all relative ones behind it were missing."""
    (tmp_path / "lists").mkdir(), (tmp_path / "work").mkdir(), (tmp_path / "far").mkdir()
    (tmp_path / "far" / "a.png").write_bytes(png(1)), (tmp_path / "lists" / "b.png").write_bytes(png(2))
    absolute = [(f"{tmp_path}/far/{'./' * number}a.png", "x", "") for number in range(150)]
    url = write_csv(tmp_path / "lists" / "d.csv", [*absolute, ("b.png", "y", "")])
    monkeypatch.chdir(tmp_path / "work")
    rows = read_csv(url, COLUMNS, "\t")
    assert rows(0)["png"] == png(1) and rows(150)["png"] == png(2)


def test_relative_paths_start_where_more_of_them_are(tmp_path, monkeypatch):
    (tmp_path / "lists").mkdir(), (tmp_path / "work").mkdir()
    names = [f"{i}.png" for i in range(5)]
    for folder, there in (("lists", names), ("work", names[:1])):  # a leftover of one name in the working directory
        for name in there:
            (tmp_path / folder / name).write_bytes(png(1))
    url = write_csv(tmp_path / "lists" / "d.csv", [(name, "x", "") for name in names])
    monkeypatch.chdir(tmp_path / "work")
    assert {row.path for row in read_csv(url, COLUMNS, "\t").rows} == {str(tmp_path / "lists" / n) for n in names}
    for name in names:
        (tmp_path / "work" / name).write_bytes(png(1))
    assert {row.path for row in read_csv(url, COLUMNS, "\t").rows} == set(names)  # as many: as OpenCLIP takes them


def test_hidden_files_and_folders_are_no_images(tmp_path):
    for name in ("cat/1.png", "cat/._1.png", ".cache/2.png", "cat/.thumbs/3.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_bytes(png(3))
    assert [row.path for row in read_folder(str(tmp_path)).rows] == [f"{tmp_path}/cat/1.png"]


def test_links_are_followed_inside_the_folder_unless_they_lead_back(tmp_path):
    root = tmp_path / "root"
    (root / "cat").mkdir(parents=True), (root / ".kept").mkdir(), (tmp_path / "link").symlink_to(root)
    (root / "cat" / "1.png").write_bytes(png(1)), (root / ".kept" / "2.png").write_bytes(png(2))
    (root / "cat" / "3.png").symlink_to(root / ".kept" / "2.png")
    (root / "dog").symlink_to(".kept")
    (root / "cat" / "up").symlink_to(root), (root / "cat" / "here").symlink_to(".")
    for place in (root, tmp_path / "link"):  # the folder itself may be a link
        found = [row.path.removeprefix(f"{place}/") for row in read_folder(str(place)).rows]
        assert found == ["cat/1.png", "cat/3.png", "dog/2.png"]


def test_folders_that_link_to_each_other_are_read_once_on_each_way(tmp_path):
    for name, other in (("a", "b"), ("b", "a")):
        (tmp_path / name).mkdir(), (tmp_path / name / f"{name}.png").write_bytes(png(1))
        (tmp_path / name / "other").symlink_to(tmp_path / other)
    found = [row.path.removeprefix(f"{tmp_path}/") for row in read_folder(str(tmp_path)).rows]
    assert found == ["a/a.png", "a/other/b.png", "b/b.png", "b/other/a.png"]


@pytest.mark.parametrize("link", ["1.png", "1.txt", "1.json", "more"])
def test_links_that_leave_the_folder_are_refused_by_name(tmp_path, link):
    (tmp_path / "root" / "cat").mkdir(parents=True), (tmp_path / "out").mkdir()
    (tmp_path / "root" / "cat" / "1.png").write_bytes(png(1))
    target = tmp_path / "out" if link == "more" else tmp_path / "secret"
    target.is_dir() or target.write_text("{}")
    place = tmp_path / "root" / "cat" / link
    place.unlink(missing_ok=True), place.symlink_to(target)
    with pytest.raises(ValueError, match=f"{place} is a link to {target}, outside {tmp_path}/root.*put the file"):
        read_folder(str(tmp_path / "root"))


def test_a_folder_that_cannot_be_listed_is_no_silent_loss(tmp_path, monkeypatch):
    (tmp_path / "cat").mkdir()
    (tmp_path / "free.png").write_bytes(png(1))
    scandir = os.scandir

    def refuse(path):
        if str(path).endswith("cat"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(PermissionError, match="Permission denied: .*cat"):
        read_folder(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("1.txt", b"\xff\xfe", "1.txt is no UTF-8"),
        ("1.json", b"\xe4", "1.json is no JSON object: .*utf-8"),
        ("1.json", b"{", "1.json is no JSON object"),
        ("1.json", b"[" * 100_000, "1.json is no JSON object: it is nested too deeply"),
        ("1.json", b"[1]", "1.json is no JSON object: a list, wanted an object"),
    ],
)
def test_texts_beside_images_that_cannot_be_read_are_named(tmp_path, name, content, message):
    (tmp_path / "1.png").write_bytes(png(1))
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


PLAIN_MARKS = (
    '"No," he said',
    'he said "no"',
    '"',
    '""',
    'a 5" nail',
    '"quoted"',
    '"a "b" c',
    'a "" b',
    '"open',
    'shut"',
    ' "x',
)


@pytest.mark.parametrize("separator", ["\t", ",", "|"])
def test_quotation_marks_that_are_plain_text_are_read_as_they_stand_where_asked_for(tmp_path, separator):
    rng, refused = random.Random(0), 0
    for number in range(40):
        truth = [(f"{i}.jpg", rng.choice(PLAIN_MARKS).replace(",", ";"), "x") for i in range(rng.randint(1, 6))]
        path = write_csv(tmp_path / f"{number}.tsv", truth, separator=separator)
        rows = read_csv(path, COLUMNS, separator, quoting=False).rows
        assert [(os.path.basename(row.path), row.caption) for row in rows] == [row[:2] for row in truth]
        try:
            read_csv(path, COLUMNS, separator)
        except ValueError as error:
            assert str(error).endswith("give --csv-quoting none")
            refused += 1
    assert refused > 20
    enclosed = write_csv(tmp_path / "enclosed.tsv", [('"a.jpg"', '"x"')], separator, header=('"filepath"', '"title"'))
    with pytest.raises(ValueError, match="leave out --csv-quoting none"):
        read_csv(enclosed, COLUMNS, separator, quoting=False)
    short = write_csv(tmp_path / "short.tsv", [("a.jpg", '"x', "y"), ("b.jpg", "c")], separator=separator)
    with pytest.raises(ValueError, match=r"line 3 has 2 cells, the header 3 .* read as plain text"):
        read_csv(short, COLUMNS, separator, quoting=False)
