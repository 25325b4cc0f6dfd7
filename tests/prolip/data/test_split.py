"""Splits by content: a copy under another name, in a folder, a table or a shard, is on the same side."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiny_loaders import build, epoch
from tiny_tars import members, png, write_tar

from prolip.data.reading.named import parse_source
from prolip.data.reading.rows import read_rows
from prolip.data.reading.tar import ShardReader
from prolip.data.split import Split, parse_split

HELD, REST = Split(0.3), Split(0.3, "rest")


def test_bytes_and_the_file_that_holds_them_are_on_one_side(tmp_path):
    sides = []
    for number in range(200):
        (tmp_path / "a.png").write_bytes(png(number))
        sides.append(HELD.takes(png(number)))
        assert HELD.takes(tmp_path / "a.png") == HELD.takes(str(tmp_path / "a.png")) == sides[-1]
        assert sides[-1] != REST.takes(png(number))
        assert not sides[-1] or Split(0.5).takes(png(number))  # a larger share holds out more of them, and none fewer
    assert 40 <= sum(sides) <= 80


def test_a_number_is_a_share_and_a_word_a_split():
    assert parse_split("0.1") == Split(0.1, "held-out") and parse_split("test") == "test" and parse_split(None) is None
    for text in ("0", "1", "1.5", "-0.1", "nan"):
        with pytest.raises(ValueError, match=f"--split {text}: give the share .* between 0 and 1"):
            parse_split(text)


def test_a_copy_under_another_name_stays_on_its_side_in_every_kind_of_source(tmp_path):
    every = [png(number) for number in range(40)]
    held = {data for data in every if HELD.takes(data)}
    for number, data in enumerate(every * 2):
        (tmp_path / "folder" / "cats").mkdir(parents=True, exist_ok=True)
        (tmp_path / "folder" / "cats" / f"{number}.png").write_bytes(data)
    (tmp_path / "a.csv").write_text("image,caption\n" + "".join(f"folder/cats/{n}.png,c{n}\n" for n in range(80)))
    pq.write_table(pa.table({"image": every * 2, "text": [f"c{n}" for n in range(80)]}), tmp_path / "a.parquet")
    for name in ("folder", "a.csv", "a.parquet"):
        parts = [read_rows(parse_source(str(tmp_path / name)), split=split) for split in (HELD, REST)]
        raws = [[part(i) for i in range(len(part))] for part in parts]
        images = [[next(value for value in raw.values() if isinstance(value, bytes)) for raw in part] for part in raws]
        assert set(images[0]) == held and set(images[1]) == set(every) - held
        assert len(images[0]) == 2 * len(held) and len(images[0]) + len(images[1]) == 80
    shard = write_tar(tmp_path / "0.tar", [(f"k{n}", {**members(n), "png": data}) for n, data in enumerate(every * 2)])
    for split, wanted in ((HELD, held), (REST, set(every) - held)):
        assert {raw["png"] for raw in ShardReader(split=split)(str(shard))} == wanted


def test_training_takes_the_rest_of_rows_and_of_shards(tmp_path):
    (tmp_path / "a.csv").write_text("image,caption\n" + "".join(f"{n}.png,c{n}\n" for n in range(40)))
    for number in range(40):
        (tmp_path / f"{number}.png").write_bytes(png(number))
    rest = {number for number in range(40) if not HELD.takes(png(number))}
    loader = build(tmp_path / "a.csv", split=0.3)
    assert loader.dataset_samples == len(rest)
    keys = {key.rpartition("/")[2].removesuffix(".png") for batch in epoch(loader) for key in batch["key"]}
    assert keys == set(map(str, rest))
    write_tar(tmp_path / "0.tar", [(str(number), {**members(number), "png": png(number)}) for number in range(40)])
    loader = build(tmp_path / "0.tar", split=0.3)
    assert loader.dataset_samples == 28  # as many as are expected
    batches = [batch for number in range(3) for batch in epoch(loader, number)]
    assert {key for batch in batches for key in batch["key"]} == set(map(str, rest))


def test_an_image_that_cannot_be_read_is_among_the_rest_and_no_side_is_empty(tmp_path):
    (tmp_path / "a.csv").write_text("image,caption\n" + "".join(f"{n}.png,c{n}\n" for n in range(30)))
    for number in range(29):
        (tmp_path / f"{number}.png").write_bytes(png(number))
    parts = [read_rows(parse_source(str(tmp_path / "a.csv")), split=split, max_bad=1.0) for split in (HELD, REST)]
    lost = [sum(row.path.endswith("/29.png") for row in part.rows) for part in parts]
    assert lost == [0, 1] and sum(map(len, parts)) == 30
    with pytest.raises(ValueError, match="1e-09 holds out none of 29 images. Give a larger share, such as --split 0.1"):
        read_rows(parse_source(str(tmp_path)), split=Split(1e-9))
    with pytest.raises(ValueError, match="leaves none of 29 images. Give a smaller share, such as --split 0.1"):
        read_rows(parse_source(str(tmp_path)), split=Split(0.999999999, "rest"))
