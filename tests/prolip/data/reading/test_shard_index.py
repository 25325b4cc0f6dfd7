"""The index of shards: its command, what it counts, and what a reader sees by it."""

import hashlib
import json
import os
import pickle
import re
import tempfile
from pathlib import Path

import fsspec
import pytest
from tiny_tars import members, read_counted, write_shards, write_tar

from prolip.cli.main import main
from prolip.data.config import DataConfig
from prolip.data.faults import ShardFault
from prolip.data.reading import shard_index as command
from prolip.data.reading.shard_index import FORMAT, Addresses, Entry, ShardIndex, find_index, from_json, read_index
from prolip.data.reading.stream import ReadPolicy
from prolip.data.reading.tar import ShardReader
from prolip.data.sources import build_source

PIPES = ReadPolicy(pipes=True)


def run(*arguments):
    return main(["data", "index", *map(str, arguments), "--processes", "1"])


def counted(data, **settings):
    """The samples of an epoch."""
    return build_source(DataConfig(train_data=str(data), **settings), 1)[1]


# --- writing
def test_the_command_writes_counts_bytes_and_checksums_beside_the_shards(tmp_path, capsys):
    urls = write_shards(tmp_path, [3, 2])
    assert run(tmp_path) == 0
    data = json.loads((tmp_path / "index.json").read_text())
    assert data["format"] == FORMAT and list(data["shards"]) == ["0.tar", "1.tar"]
    content = Path(urls[0]).read_bytes()
    entry = {"samples": 3, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert data["shards"]["0.tar"] == entry
    out = capsys.readouterr()
    assert f"{tmp_path}/index.json: 2 of 2 shards, 5 samples" in out.out and "of 2 shards" in out.err
    assert sorted(os.listdir(tmp_path)) == ["0.tar", "1.tar", "index.json"]  # nothing is left of the writing
    assert run(tmp_path, "--output", tmp_path / "2.json", "--processes", "2") == 0
    assert (tmp_path / "2.json").read_text() == (tmp_path / "index.json").read_text()
    data["shards"]["0.tar"]["crc32"] = ["0000abcd"]  # checksums of blocks, as they were written before
    (tmp_path / "index.json").write_text(json.dumps(data | {"block": 2**22}))
    assert find_index(urls)[urls[0]].samples == 3


def test_unreadable_shards_are_named_left_out_and_end_the_command_with_1(tmp_path, capsys):
    _, b, _ = write_shards(tmp_path, [2, 2, 2])
    Path(b).write_bytes(Path(b).read_bytes()[:3000])
    assert run(tmp_path) == 1
    out = capsys.readouterr()
    assert f"{b}: broken shard" in out.err and "1 of 3 shards are unreadable" in out.out
    assert list(json.loads((tmp_path / "index.json").read_text())["shards"]) == ["0.tar", "2.tar"]
    with pytest.raises(ValueError, match=f"has no entry for {b}: run: prolip data index"):
        counted(tmp_path)
    (tmp_path / "none").mkdir(), (tmp_path / "none" / "0.tar").write_bytes(b"")
    assert run(tmp_path / "none") == 1 and not (tmp_path / "none" / "index.json").exists()


def test_a_place_that_cannot_be_written_is_refused_before_any_shard_is_read(tmp_path, monkeypatch, capsys):
    write_shards(tmp_path, [2])
    monkeypatch.setattr(command, "index_shards", lambda *_: pytest.fail("shards were read"))
    (tmp_path / "b").mkdir(), write_shards(tmp_path / "b", [1])
    for arguments, message in (
        (["http://127.0.0.1:9/{0..1}.tar"], "cannot write to http://127.0.0.1:9/index.json.*--output FILE"),
        ([tmp_path, "--output", "https://x/i.json"], "cannot write to https://x/i.json"),
        ([tmp_path, "--output", "nonsense://x/i.json"], "'nonsense://x/i.json' is not allowed; give a path"),
        ([tmp_path, "--output", tmp_path], f"{tmp_path} is a folder: give a file"),
        ([tmp_path / "no.tar"], "shards are missing"),
        (["pipe:cat x"], "come from a command.*--output FILE"),
        ([tmp_path, tmp_path / "b"], r"come from 2 folders \(.*--output FILE"),
    ):
        assert run(*arguments) == 2
        assert re.search(f"^error: .*{message}", capsys.readouterr().err)

    def refuse(**_):
        raise PermissionError(13, "Permission denied", str(tmp_path))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    assert run(tmp_path) == 2
    assert "index.json (Permission denied in " in capsys.readouterr().err


def test_remote_and_piped_shards_are_indexed(tmp_path):
    urls = write_shards(tmp_path, [2, 3])
    for url in urls:
        fsspec.filesystem("gs").pipe_file(f"/indexed/{Path(url).name}", Path(url).read_bytes())
    assert run("gs://indexed/{0..1}.tar") == 0
    index = read_index("gs://indexed/index.json")
    assert index.only(["gs://indexed/0.tar", "gs://indexed/1.tar"], {})[1] == 5
    assert run(f"pipe:cat {urls[1]}", "--output", tmp_path / "piped.json") == 0
    index = read_index(str(tmp_path / "piped.json"))
    assert index[f"pipe:cat {urls[1]}"].samples == 3
    assert len(list(ShardReader(PIPES, index)(f"pipe:cat {urls[1]}"))) == 3


# --- counting
def test_an_index_is_believed_before_other_records_and_any_folder_name_works(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    urls = write_shards(tmp_path / "a", [3, 2]) + write_shards(tmp_path / "b", [4])
    run(tmp_path / "a"), run(tmp_path / "b")
    (tmp_path / "a" / "__len__").write_text("1000")
    assert counted("::".join(urls)) == 9
    monkeypatch.chdir(tmp_path)
    assert counted("a/0.tar") == 3 and counted(f"file://{urls[0]}") == 3
    assert counted("a", select="group=objects") == 1  # an index knows nothing of a selection
    assert run("a", "b", "--output", "b/both.json") == 0
    index = read_index("b/both.json")  # where equal names in two folders are two entries
    assert [index[f"{tmp_path}/{name}/0.tar"].samples for name in "ab"] == [3, 4]
    write_tar(tmp_path / "0.tar", [("a", {"txt": b"no image"}), ("b", members(1))])
    assert run(tmp_path / "0.tar") == 0 and counted("0.tar") == 1
    assert len(list(ShardReader(index=find_index(["0.tar"]))("0.tar"))) == 2
    write_shards(tmp_path, [30])
    with pytest.raises(
        ValueError, match=r"index.json says that 0.tar has \d+ bytes, but it has \d+: .*run: prolip .*tar'"
    ):
        counted("0.tar")


def test_files_of_others_and_damaged_indices(tmp_path):
    (url,) = write_shards(tmp_path, [3])
    place = tmp_path / "index.json"
    place.write_text('{"wids_version": 1, "shardlist": []}')
    assert find_index([url]) is None and counted(url) == 3  # somebody else's index.json
    with pytest.raises(ValueError, match="is not a 'prolip shard index 1': write one with prolip data index"):
        read_index(str(place))
    place.write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        find_index([url])
    with pytest.raises(ShardFault, match="unreadable shard"):
        read_index(str(tmp_path / "no.json"))


@pytest.mark.parametrize(
    "shards",
    [[], {"0.tar": 3}, {"0.tar": {"samples": 3}}]
    + [
        {"0.tar": {"samples": 3, "bytes": 10, "sha256": ""} | wrong}
        for wrong in ({"samples": -1}, {"samples": True}, {"samples": "3"}, {"bytes": 1e400}, {"sha256": None})
    ],
)
def test_an_index_of_values_that_cannot_be_is_damaged(shards):
    with pytest.raises(ValueError, match="i.json is damaged .*Write it again$"):
        from_json(json.dumps({"format": FORMAT, "shards": shards}).encode(), "/data/i.json")


# --- reading
@pytest.fixture
def indexed(tmp_path):
    """A shard of four samples and its index."""
    (url,) = write_shards(tmp_path, [4])
    run(tmp_path)
    return url, find_index([url])


def test_a_shard_without_an_entry_with_another_count_or_with_another_end_than_the_index_knows_is_seen(indexed):
    url, index = indexed
    longer = f"pipe:cat {url}; head -c 10240 /dev/zero"  # more padding: for a tar alone nothing is wrong
    assert len(read_counted(longer, PIPES)[0]) == 4
    _, faults = read_counted(longer, reader=ShardReader(PIPES, ShardIndex.of(index.place, {longer: index[url]})))
    assert faults.kinds["index mismatch"] == 1 and "the shard is longer" in faults.examples[0]
    for entries, said in (
        ({}, "has no entry"),
        ({url: Entry(5, *index[url][1:])}, "has 4 samples, but the index says 5"),
    ):
        _, faults = read_counted(url, reader=ShardReader(index=ShardIndex.of(index.place, entries)))
        assert faults.kinds["index mismatch"] == 1 and said in faults.examples[0]
    assert len(list(ShardReader(index=index)(url))) == 4
    write_tar(Path(url), [(f"s{i:03d}", members(i)) for i in range(2)])
    assert read_counted(url)[1].kinds == {}  # unknown without an index
    samples, faults = read_counted(url, reader=ShardReader(index=index))
    assert not samples and faults.kinds == {"index mismatch": 1} and "the index says" in faults.examples[0]


def test_addresses_are_what_they_were_and_stay_so_when_they_are_sent():
    texts = ["", "a", "/data/é/0.tar", "/data/\udcff.tar", "s3://b/0.tar"]
    for found in (Addresses(texts), pickle.loads(pickle.dumps(Addresses(texts)))):
        assert list(found) == texts and len(found) == 5 and found[-1] == texts[-1] and found[1:3] == texts[1:3]
        with pytest.raises(IndexError):
            found[5]
    assert list(Addresses()) == list(pickle.loads(pickle.dumps(Addresses()))) == []


def test_a_part_of_an_index_counts_a_shard_as_often_as_it_is_named_and_travels_in_little():
    entries = {f"/d/{n:06d}.tar": (10_000, 350_000_000 + n, f"{n:064x}") for n in range(20_000)}
    a, b, *rest = entries
    part, samples = ShardIndex.of("/d/index.json", entries).only([*rest, a, a], {"/d/000007.tar": 350_000_007})
    assert samples == 200_000_000 and part["/d/019999.tar"] == entries["/d/019999.tar"]
    assert list(part.names) == [a, *rest] and part.entries()[a] == entries[a]
    with pytest.raises(ValueError, match=f"has no entry for {b}"):
        part[b]
    assert len(pickle.dumps(part)) < 20_000 * 85 and len(pickle.dumps(Addresses(entries))) < 20_000 * 5
