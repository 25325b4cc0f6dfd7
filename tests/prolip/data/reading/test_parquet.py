"""Parquet tables with paths and with images inside, which are read by row groups when they are wanted."""

import json
import pickle

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiny_loaders import build, epoch
from tiny_tars import png

from prolip.data.faults import SampleFault
from prolip.data.reading import parquet
from prolip.data.reading.csv import TableError
from prolip.data.reading.named import parse_source
from prolip.data.reading.rows import read_rows


def images(rows):
    return [next(value for value in rows(i).values() if isinstance(value, bytes)) for i in range(len(rows))]


def write(path, numbers, group=4, image=lambda data, n: {"bytes": data, "path": None}, **columns):
    columns = {"text": [f"caption {n}" for n in numbers], **columns}
    pq.write_table(pa.table({"image": [image(png(n), n) for n in numbers], **columns}), path, row_group_size=group)
    return str(path)


@pytest.mark.parametrize(
    "image",
    [
        lambda data, n: data,
        lambda data, n: {"bytes": data, "path": None},
        lambda data, n: {"bytes": data, "path": "a.png"},
        lambda data, n: {"bytes": data},
    ],
    ids=["bytes", "no path", "one path", "bytes alone"],
)
def test_images_inside_a_table_are_read_when_they_are_wanted(tmp_path, image):
    rows = read_rows(parse_source(write(tmp_path / "a.parquet", range(10), image=image)))
    assert [row.caption for row in rows.rows] == [f"caption {n}" for n in range(10)]
    assert len({rows(i)["__key__"] for i in range(10)}) == 10 and rows.rows[9].inside == (0, 2, 1)
    assert images(rows) == images(pickle.loads(pickle.dumps(rows))) == [png(n) for n in range(10)]  # noqa: S301


@pytest.mark.parametrize(
    "image", [lambda data, n: f"{n}.png", lambda data, n: {"bytes": None, "path": f"{n}.png"}], ids=["path", "no bytes"]
)
def test_images_beside_a_table_are_files(tmp_path, image):
    for number in range(6):
        (tmp_path / f"{number}.png").write_bytes(png(number))
    rows = read_rows(parse_source(write(tmp_path / "a.parquet", range(6), image=image)))
    assert images(rows) == [png(n) for n in range(6)] and rows.rows[5].path == f"{tmp_path}/5.png"
    (tmp_path / "5.png").unlink()
    with pytest.raises(TableError, match="1 of 6 rows name no image that is there: row 6 "):
        read_rows(parse_source(str(tmp_path / "a.parquet")))


def test_a_folder_of_tables_is_one_source_with_captions_and_classes_by_name(tmp_path):
    several = [["a", "b"], ["c"]]
    for number in range(2):
        write(tmp_path / f"train-{number}.parquet", [2 * number, 2 * number + 1], text=several, label=[0, 1])
    rows = read_rows(parse_source(str(tmp_path)))
    assert images(rows) == [png(n) for n in range(4)] and [row.caption for row in rows.rows] == several * 2
    assert rows.rows[3].record == {"label": 1} and rows.rows[3].path == f"{tmp_path}/train-1.parquet#2"
    schema = pa.schema({"image": pa.binary(), "label": pa.int64()}).with_metadata(
        {
            "huggingface": json.dumps(
                {
                    "info": {
                        "features": {
                            "image": {"_type": "Image"},
                            "label": {"names": ["cat", "dog"], "_type": "ClassLabel"},
                        }
                    }
                }
            )
        }
    )
    pq.write_table(pa.table({"image": [png(0), png(1)], "label": [1, 0]}, schema), tmp_path / "z.parquet")
    rows = read_rows(parse_source(str(tmp_path / "z.parquet")))
    assert [row.caption for row in rows.rows] == ["dog", "cat"]
    with pytest.raises(TableError, match="z.parquet has no column 'text', which .*train-0.parquet has"):
        read_rows(parse_source(str(tmp_path)))


def test_a_process_keeps_row_groups_within_its_room(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "ROOM", 4 * len(png(0)) * 2)
    rows = read_rows(parse_source(write(tmp_path / "a.parquet", range(40))))
    for index in (*range(40), *range(39, -1, -7)):
        assert images(rows)[index] == png(index)
        assert sum(kept.nbytes for kept in rows.embedded._kept.values()) <= max(parquet.ROOM, 8 * len(png(0)))


def test_rows_without_bytes_and_files_that_are_no_tables_are_named(tmp_path):
    path = write(tmp_path / "a.parquet", [0, 1], image=lambda data, n: data if n == 0 else None)
    rows = read_rows(parse_source(path))
    with pytest.raises(SampleFault, match=r"missing image: .*a.parquet holds no bytes in column 'image'"):
        rows(1)
    (tmp_path / "b.parquet").write_bytes(b"PAR1 and more")
    with pytest.raises(TableError, match="b.parquet is no Parquet table"):
        read_rows(parse_source(str(tmp_path / "b.parquet")))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_table_with_images_inside_is_trained_on(tmp_path, workers):
    loader = build(write(tmp_path / "a.parquet", range(16)), workers=workers)
    read_rows(parse_source(str(tmp_path / "a.parquet")))(0)  # the parent has read of the file before the workers start
    keys = sorted(key.rpartition("#")[2] for batch in epoch(loader) for key in batch["key"])
    assert keys == sorted(map(str, range(1, 17)))
    loader.close()
