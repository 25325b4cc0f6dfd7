import json

import pytest
from tiny_tars import png

from prolip.data.captions import Selector
from prolip.data.faults import SampleFault
from prolip.data.folders import Columns, read_csv, read_folder

COLUMNS = Columns("filepath", "title")


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
        read_csv(url, Columns("path", "name", ("names",)), "\t")
    with pytest.raises(ValueError, match="'style'.*--select"):
        read_csv(url, Columns("path", "name", (), ("style",)), "\t")


def test_a_csv_split_at_the_wrong_character_is_told_the_right_one(tmp_path):
    comma = write_csv(tmp_path / "c.csv", [("a.png", "x", "y")], separator=",")
    with pytest.raises(ValueError, match=r"split at '\\t': .*give --csv-separator ,$"):
        read_csv(comma, COLUMNS, "\t")
    tab = write_csv(tmp_path / "t.csv", [("a.png", "x", "y")])
    with pytest.raises(ValueError, match=r"give --csv-separator '\\t'$"):
        read_csv(tab, COLUMNS, ",")


def test_missing_and_empty_csv_files_are_refused(tmp_path):
    write_csv(tmp_path / "data.csv", [])
    with pytest.raises(FileNotFoundError, match=r"Did you mean data.csv"):
        read_csv(str(tmp_path / "dat.csv"), COLUMNS, "\t")
    with pytest.raises(ValueError, match="gives no sample: it has 0 rows"):
        read_csv(str(tmp_path / "data.csv"), COLUMNS, "\t")


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
