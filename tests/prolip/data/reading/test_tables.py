"""Tables of any form: separators, columns and paths are recognised, cells read strictly, all problems reported."""

import csv
import json
import pickle

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiny_loaders import build, epoch, read_csv
from tiny_tars import png

from prolip.data.captions import Selector
from prolip.data.config import DataConfig
from prolip.data.faults import SampleFault
from prolip.data.reading import parquet
from prolip.data.reading.csv import TableError
from prolip.data.reading.folders import ImageRow, ImageRows
from prolip.data.reading.named import NamedSource, parse_source
from prolip.data.reading.rows import RECOGNISED, read_rows
from prolip.data.reading.tables import TableColumns, TableProblems
from prolip.data.sources import table_columns

COLUMNS = TableColumns("filepath", "title")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of six images, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    for number in range(6):
        (tmp_path / f"{number}.png").write_bytes(png(number))
    return tmp_path


def found(rows):
    return [(row.path.rpartition("/")[2], row.caption) for row in rows.rows]


def read(path, text=None, columns=RECOGNISED, **options):
    """The rows of a table, written before if there is a text."""
    if text is not None:
        path = str(path)
        with open(path, "w", newline="", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)
    return read_rows(parse_source(str(path)), columns, **options)


def write_csv(path, rows, separator="\t", header=("filepath", "title", "name")):
    path.write_text("\n".join(separator.join(row) for row in [header, *rows]) + "\n")
    return str(path)


TRUTH = [(f"{number}.png", f"a caption, of {number}") for number in range(3)]
HEADERS = [("image", "caption"), ("Image Path", "Caption"), (" filename ", " text"), ("file_name", "description")]
HEADERS += [("FILE", "Title"), ("datei", "beschreibung"), ("caption_file", "words")]


# --- what is recognised
@pytest.mark.parametrize("separator", [",", "\t", ";", "|"])
def test_separators_and_columns_are_recognised(folder, separator, caplog):
    caplog.set_level("INFO")
    for header in HEADERS:
        with open("a.csv", "w", newline="", encoding="utf-8-sig") as file:
            csv.writer(file, delimiter=separator).writerows([header, *TRUTH])
        assert found(read("a.csv")) == TRUTH
        image, caption = map(str.strip, header)
        columns = f"images from column {image!r}, captions from column {caption!r}"
        assert f"a.csv: recognised the separator {separator!r}, {columns}" in caplog.messages


def test_the_columns_of_a_wider_table_are_recognised_by_name_and_content(folder):
    rows = [(f"{n}", f"{n}.png", f"caption {n}", "cats" if n % 2 else "dogs", f"{n / 7}") for n in range(4)]
    wider = read(write_csv(folder / "a.csv", rows, ",", ("id", "where", "text", "Label", "score")))
    assert found(wider) == [row[1:3] for row in rows]
    assert [row.record for row in wider.rows] == [{"label": row[3]} for row in rows] and wider.rows[0].number == 2
    classes = read("b.csv", "image,class\n0.png,cat\n1.png,dog\n")  # the class is the caption
    assert found(classes) == [("0.png", "cat"), ("1.png", "dog")] and classes.rows[1].record == {"class": "dog"}
    assert found(read("c.csv", "image;caption\n0.png;a cat, a dog\n1.png;one, two\n"))[0] == ("0.png", "a cat, a dog")
    assert found(read("d.csv", "file,where,text\nx,0.png,a\ny,1.png,b\n")) == [("0.png", "a"), ("1.png", "b")]
    alone = read("d.csv", "image\n0.png\n1.png\n", TableColumns(needs_caption=False))
    assert found(alone) == [("0.png", None), ("1.png", None)] and "txt" not in alone(0)


def test_columns_that_are_absent_or_ambiguous_are_named_with_the_flag(folder):
    named = "image,title,description\n0.png,x,y\n"
    present = "path\ttitel\tname\n0.png\tx\ty\n"
    drawn = table_columns(DataConfig(caption_sampling="name,txt", csv_caption_key="title"))
    for text, columns, said in (
        ("image\n0.png\n", RECOGNISED, "no column seems to be the captions; .* are image: .*--csv-caption-key"),
        (named, RECOGNISED, "columns title, description may all be the captions.*-caption-key"),
        ("left,right,text\n0.png,1.png,x\n", RECOGNISED, "columns left, right may all be the images.*--csv-img-key"),
        ("image;caption,file\n0.png;x,y\n", RECOGNISED, "can be split at ',' or at ';': choose .* --csv-separator"),
        (present, COLUMNS, "no column 'filepath': its columns are path, titel, name; .* --csv-img-key"),
        (present, COLUMNS._replace(image="path"), r"'title'.*--csv-caption-key \(did you mean 'titel'\?\)"),
        (present, TableColumns("path", "name", ("names",)), "'names'.*--caption-sampling"),
        (present, TableColumns("path", "name", (), ("style",)), "'style'.*--select"),
        (present, drawn, "'title'.*--csv-caption-key"),
        (present, COLUMNS._replace(separator=","), "'filepath': .*or give the right --csv-separator$"),
        ("image,image\n0.png,x\n", TableColumns("image", ""), "line 1 has several columns 'image': rename"),
    ):
        with pytest.raises(ValueError, match=said):
            read("a.csv", text, columns)
    assert found(read("a.csv", named, TableColumns(caption="description"))) == [("0.png", "y")]
    drawn = table_columns(DataConfig(caption_sampling="name"))
    assert read("a.csv", present, drawn).rows[0].record == {"name": "y"}


# --- rows
def test_rows_give_bytes_caption_and_the_wanted_columns(folder):
    url = write_csv(folder / "d.csv", [("1.png", "a cat", "cat"), ("2.png", "y", "dog"), ("3.png", "z", "cat")])
    columns = COLUMNS._replace(captions=("name",), conditions=("name",))
    raw = read_csv(url, columns, "\t")(0)
    assert (raw["png"], raw["txt"], raw["json"], raw["__key__"]) == (png(1), "a cat", {"name": "cat"}, "1.png")
    assert [row.caption for row in read_csv(url, columns, "\t", Selector.parse("name=cat")).rows] == ["a cat", "z"]
    with pytest.raises(ValueError, match=r"has no selected sample: it has 3 rows, with the fields name"):
        read_csv(url, columns, "\t", Selector.parse("name=cow"))
    table = [("0.png", "x", "n"), ("1.png", "y", "m"), ("0.png", "z", "o"), ("0.png", "x", "")]
    rows = read_csv(write_csv(folder / "d.csv", table), columns).rows  # those of one image are captions of it
    assert [(row.caption, row.record["name"]) for row in rows] == [(["x", "z"], ["n", "o"]), ("y", "m")]


def test_relative_paths_start_where_more_of_them_are(tmp_path, monkeypatch):
    (tmp_path / "lists").mkdir(), (tmp_path / "work").mkdir(), (tmp_path / "far").mkdir()
    names = [f"{i}.png" for i in range(5)]
    for name in ("far/a.png", "work/0.png", *(f"lists/{name}" for name in names)):  # work's is a leftover
        (tmp_path / name).write_bytes(png(1))
    absolute = [(f"{tmp_path}/far/{'./' * number}a.png", "x", "") for number in range(150)]  # which decide nothing
    url = write_csv(tmp_path / "lists" / "d.csv", [*absolute, *((name, "x", "") for name in names)])
    monkeypatch.chdir(tmp_path / "work")
    assert [row.path for row in read(url).rows][150:] == [str(tmp_path / "lists" / name) for name in names]
    for name in names:
        (tmp_path / "work" / name).write_bytes(png(1))
    assert [row.path for row in read(url).rows][150:] == names  # as many: as OpenCLIP takes them
    rooted = read(url, columns=COLUMNS._replace(image_root=str(tmp_path / "lists")))
    assert rooted.rows[-1].path == str(tmp_path / "lists" / "4.png")
    with pytest.raises(FileNotFoundError, match="--image-root 'none' is not a folder"):
        read(url, columns=TableColumns(image_root="none"))


def test_paths_that_cannot_be_are_missing_images(tmp_path):
    rows = read_csv(write_csv(tmp_path / "d.csv", [("x" * 5000, "x", ""), ("", "y", "")]), COLUMNS, "\t")
    for reader, row in ((rows, 0), (rows, 1), (ImageRows([ImageRow("a\0b.png", "x", {})]), 0)):
        with pytest.raises(SampleFault, match="missing image"):
            reader(row)


# --- problems
def test_every_problem_of_a_table_is_reported_at_once_by_its_row(folder):
    rows = ["0.png,x", "no.png,y", "1.png,", "", "2.png,a,b", "gone.png,z", "3.png, ", "4.png,w", "5.png,v,u"]
    with pytest.raises(TableProblems) as refused:
        read("a.csv", "\n".join(["image,caption", *rows]) + "\n", max_bad=0.01)
    first, *lines = str(refused.value).splitlines()
    assert first == "a.csv (the header is row 1):"
    assert lines[0].startswith("  2 of 6 rows name a missing image: rows 3, 7 (")
    assert f"relative paths start from {folder}; --image-root FOLDER sets another start" in lines[0]
    assert lines[1] == "  2 of 6 rows have no caption: rows 4, 8"
    assert lines[2].startswith("  2 rows are damaged: rows 6, 10: line 6 has 3 cells, the header 2 columns")
    assert lines[3] == "  Correct the table." and len(lines) == 4


def test_a_missing_image_names_the_two_remedies_of_commands_without_max_bad_fraction(folder):
    with pytest.raises(TableError) as refused:
        read("a.csv", "image,caption\n0.png,x\nno.png,y\n")
    assert str(refused.value).endswith("; correct or delete these rows, or add --skip-damaged")
    assert "row 3 (" in str(refused.value) and "--image-root" not in str(refused.value)


def test_tolerated_problems_are_logged_and_left_for_the_loader(folder, caplog):
    text = "\n".join(["image,caption", *(f"{n % 6}.png,x{n}" for n in range(20)), "no.png,y"])
    with pytest.raises(TableError, match=r"1 of 21 rows name a missing image: row 22 .*--max-bad-fraction$"):
        read("a.csv", text, max_bad=0.04)
    rows = read("a.csv", max_bad=0.05)
    assert "these rows are skipped: 1 of 21 rows name a missing image: row 22" in caplog.text
    with pytest.raises(SampleFault, match=r"missing image: .*no.png: .* \(row 22 of the table\)"):
        rows(len(rows) - 1)
    with pytest.raises(TableError, match="1 of 3 rows have no caption: row 3; .* raise --max-bad-fraction"):
        read("a.csv", "image,caption\n0.png,x\n1.png,\n2.png,y\n", max_bad=0.2)
    text = "image,caption,group\n0.png,x,a\nno.png,y,b\n"  # what is not selected may lack its image
    assert found(read("a.csv", text, TableColumns(conditions=("group",)), selector=Selector.parse("group=a")))


def test_of_many_rows_some_that_are_spread_evenly_are_looked_for(folder, monkeypatch):
    monkeypatch.setattr("prolip.data.reading.tables.LOOKED_FOR", 10)
    with pytest.raises(TableError, match=r"10 of 10 rows that were looked for, of 1,000 name a missing image"):
        read("a.csv", "image,caption\n" + "".join(f"no{n}.png,x\n" for n in range(1000)))
    with pytest.raises(TableError, match="URLs are not files. Fetch the images first"):
        read("a.csv", "image,caption\nhttps://h/0.png,x\n")


def test_json_lines_are_read_strictly_with_several_captions_an_image(folder):
    lines = [{"file_name": "0.png", "text": ["x", "y"], "label": 3}]
    lines += [{"file_name": "1.png", "text": "z"}, {"file_name": "1.png", "text": "w"}]
    rows = read("a.jsonl", "\n\n".join(map(json.dumps, lines)))
    assert found(rows) == [("0.png", ["x", "y"]), ("1.png", ["z", "w"])] and rows.rows[0].record == {"label": 3}
    broken = ['{"file_name": "0.png", "text": "x"}', "{", "[1]", '{"text": "a", "text": "b"}', '{"text": "y"}']
    with pytest.raises(TableProblems) as refused:
        read("a.jsonl", "\n".join(broken))
    assert "the first is row 1" in str(refused.value) and "3 rows are damaged: rows 2, 3, 4: " in str(refused.value)
    assert "1 of 2 rows name a missing image: row 5 (an empty cell)" in str(refused.value)


def test_a_table_that_is_missing_or_no_local_file_is_refused(folder):
    write_csv(folder / "data.csv", [])
    for kind in ("csv", "jsonl", "parquet"):
        for address, error, said in (("dat.csv", FileNotFoundError, "dat"), ("https://h/a", ValueError, "is a URL")):
            with pytest.raises(error, match=said):
                read_rows(NamedSource(kind, address))
    with pytest.raises(ValueError, match="has no selected sample: it has 0 rows"):
        read_csv("data.csv", COLUMNS, "\t")


# --- encodings and quotation marks
def test_byte_order_marks_are_read_other_encodings_named_and_paths_may_hold_any_bytes(tmp_path):
    text, path = "filepath\ttitle\na.png\tcäfé\n", tmp_path / "d.csv"
    path.write_bytes(text.encode("utf-8-sig"))
    assert read_csv(path, COLUMNS, "\t").rows[0].caption == "cäfé"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"d.csv is not UTF-8 \(.*0xe4.*\): convert it, e.g. iconv -f LATIN1"):
        read_csv(path, COLUMNS, "\t")
    names = ("caf\udce9.png", "a\nb.png", "a\x1b[31m.png", "\u202e\u2028.png", '"q".png')
    for name in names:
        (tmp_path / name).write_bytes(b"")
    with open(tmp_path / "d.csv", "w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        csv.writer(file).writerows([("filepath", "title"), *((name, "a caption") for name in names)])
    assert [row.path for row in read_csv(tmp_path / "d.csv", COLUMNS, ",").rows] == [str(tmp_path / n) for n in names]


def test_quotation_marks_that_are_plain_text_are_read_as_they_are_where_asked_for(tmp_path):
    marks = ['"No," he said', 'he said "no"', '"', '""', 'a 5" nail', '"quoted"', '"a "b" c', '"open', 'shut"', ' "x']
    path = write_csv(tmp_path / "a.tsv", [(f"{n}.jpg", mark, "x") for n, mark in enumerate(marks)])
    assert [row.caption for row in read_csv(path, COLUMNS, "\t", quoting=False).rows] == marks
    for mark in ('"No," he said', '"', '"a "b" c', '"open', '"short"'):
        row = ("a.jpg", mark, "x")[: 2 if mark == '"short"' else 3]
        path = write_csv(tmp_path / "a.tsv", [row, ("b.jpg", "c", "y")])
        with pytest.raises(
            TableError, match=r" line 2.*; if all quotation marks .* are plain text, give --csv-quoting none$"
        ):
            read_csv(path, COLUMNS, "\t")
    path = write_csv(tmp_path / "a.tsv", [("a.jpg", '"x', "y"), ("b.jpg", "c")])
    with pytest.raises(TableError, match=r"line 3 has 2 cells, the header 3 .* read as plain text"):
        read_csv(path, COLUMNS, "\t", quoting=False)


# --- Parquet
def images(rows):
    return [next(value for value in rows(i).values() if isinstance(value, bytes)) for i in range(len(rows))]


def in_struct(number):
    return {"bytes": png(number), "path": None}


def write(path, numbers, group=4, image=in_struct, **columns):
    columns = {"image": [image(n) for n in numbers], "text": [f"caption {n}" for n in numbers], **columns}
    pq.write_table(pa.table(columns), path, row_group_size=group)
    return str(path)


@pytest.mark.parametrize(
    "image", [png, in_struct, lambda n: {"bytes": png(n), "path": "a.png"}, lambda n: {"bytes": png(n)}]
)
def test_images_inside_a_table_are_read_when_they_are_wanted(tmp_path, image):
    rows = read(write(tmp_path / "a.parquet", range(10), image=image, box=[{"x": n} for n in range(10)]))
    assert [row.caption for row in rows.rows] == [f"caption {n}" for n in range(10)]
    assert len({rows(i)["__key__"] for i in range(10)}) == 10 and rows.rows[9].inside == (0, 2, 1)
    assert images(rows) == images(pickle.loads(pickle.dumps(rows))) == [png(n) for n in range(10)]  # noqa: S301


@pytest.mark.parametrize("image", [lambda n: f"{n}.png", lambda n: {"bytes": None, "path": f"{n}.png"}])
def test_images_beside_a_table_are_files(folder, image):
    rows = read(write(folder / "a.parquet", range(6), image=image))
    assert images(rows) == [png(n) for n in range(6)] and rows.rows[5].path == "5.png"
    (folder / "5.png").unlink()
    with pytest.raises(TableError, match="1 of 6 rows name a missing image: row 6 "):
        read("a.parquet")


def test_a_folder_of_tables_is_one_source_with_captions_and_classes_by_name(tmp_path):
    several = [["a", "b"], ["c"]]
    for number in range(2):
        write(tmp_path / f"train-{number}.parquet", [2 * number, 2 * number + 1], text=several, label=[0, 1])
    rows = read(tmp_path)
    assert images(rows) == [png(n) for n in range(4)] and [row.caption for row in rows.rows] == several * 2
    assert rows.rows[3].record == {"label": 1} and rows.rows[3].path == f"{tmp_path}/train-1.parquet#2"
    features = {"image": {"_type": "Image"}, "label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}
    schema = pa.schema({"image": pa.binary(), "label": pa.int64()})
    schema = schema.with_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pq.write_table(pa.table({"image": [png(0), png(1)], "label": [1, 0]}, schema), tmp_path / "z.parquet")
    assert [row.caption for row in read(tmp_path / "z.parquet").rows] == ["dog", "cat"]
    with pytest.raises(TableError, match="z.parquet has no column 'text', which .*train-0.parquet has"):
        read(tmp_path)


def test_a_process_keeps_row_groups_within_its_room(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "ROOM", 4 * len(png(0)) * 2)
    rows = read(write(tmp_path / "a.parquet", range(40)))
    for index in (*range(40), *range(39, -1, -7)):
        assert rows(index)["jpg"] == png(index)
        assert sum(kept.nbytes for kept in rows.embedded._kept.values()) <= max(parquet.ROOM, 8 * len(png(0)))


def test_rows_without_bytes_and_files_that_are_no_tables_are_named(tmp_path):
    rows = read(write(tmp_path / "a.parquet", [0, 1], image=lambda n: png(n) if n == 0 else None))
    with pytest.raises(SampleFault, match=r"missing image: .*a.parquet has no bytes there in column 'image'"):
        rows(1)
    with pytest.raises(TableError, match="b.parquet is not a Parquet table"):
        read(tmp_path / "b.parquet", "PAR1 and more")


def test_a_table_with_images_inside_is_trained_on(tmp_path):
    path = write(tmp_path / "a.parquet", range(16))
    loader = build(path, workers=2)
    read(path)(0)  # the parent has read of the file before the workers start
    keys = sorted(key.rpartition("#")[2] for batch in epoch(loader) for key in batch["key"])
    loader.close()
    assert keys == sorted(map(str, range(1, 17)))
