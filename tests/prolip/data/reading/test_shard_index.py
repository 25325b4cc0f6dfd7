import hashlib
import json
import os
import pickle
import re
import tempfile
from pathlib import Path

import fsspec
import pytest
from tiny_tars import members, write_shards, write_tar

from prolip.cli.main import main
from prolip.data.faults import FaultCounter, ShardFault
from prolip.data.reading import shard_index as command
from prolip.data.reading.shard_index import FORMAT, Addresses, Entry, find_index, read_index
from prolip.data.reading.shards import count_samples, expand_shards
from prolip.data.reading.stream import ReadPolicy
from prolip.data.reading.tar import ShardReader


def run(*arguments):
    return main(["data", "index", *map(str, arguments)])


def urls_of(pattern):
    return [shard.url for shard in expand_shards(str(pattern))]


# --- writing
def test_the_command_writes_counts_bytes_and_checksums_beside_the_shards(tmp_path, capsys):
    urls = write_shards(tmp_path, [3, 2])
    assert run(tmp_path, "--processes", 1) == 0
    data = json.loads((tmp_path / "index.json").read_text())
    assert data["format"] == FORMAT and list(data["shards"]) == ["0.tar", "1.tar"]
    content = Path(urls[0]).read_bytes()
    assert data["shards"]["0.tar"] == {
        "samples": 3,
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    out = capsys.readouterr()
    assert f"{tmp_path}/index.json: 2 of 2 shards, 5 samples" in out.out and "of 2 shards" in out.err
    assert sorted(os.listdir(tmp_path)) == ["0.tar", "1.tar", "index.json"]  # nothing is left of the writing


def test_several_processes_write_the_same_index(tmp_path):
    write_shards(tmp_path, [1] * 9)
    for workers in (1, 2):
        assert run(f"{tmp_path}/{{0..8}}.tar", "--output", tmp_path / f"{workers}.json", "--processes", workers) == 0
    assert (tmp_path / "1.json").read_text() == (tmp_path / "2.json").read_text()


def test_an_index_with_checksums_of_blocks_as_they_were_written_before_is_read(tmp_path):
    (url,) = write_shards(tmp_path, [4])
    assert run(tmp_path, "--processes", 1) == 0
    place = tmp_path / "index.json"
    data = json.loads(place.read_text()) | {"block": 2**22}
    data["shards"]["0.tar"]["crc32"] = ["0000abcd"]
    place.write_text(json.dumps(data))
    index = find_index([url])
    assert index[url].samples == 4 == len(list(ShardReader(index=index)(url)))


def test_samples_without_an_image_are_not_counted(tmp_path):
    write_tar(tmp_path / "0.tar", [("a", {"txt": b"no image"}), ("b", members(1))])
    assert run(tmp_path, "--processes", 1) == 0
    assert count_samples([f"{tmp_path}/0.tar"]) == 1
    assert len(list(ShardReader(index=find_index([f"{tmp_path}/0.tar"]))(f"{tmp_path}/0.tar"))) == 2


def test_unreadable_shards_are_named_left_out_and_end_the_command_with_1(tmp_path, capsys):
    a, b, c = write_shards(tmp_path, [2, 2, 2])
    Path(b).write_bytes(Path(b).read_bytes()[:3000])
    assert run(tmp_path, "--processes", 1) == 1
    out = capsys.readouterr()
    assert f"{b}: broken shard" in out.err and "1 of 3 shards cannot be read" in out.out
    assert list(json.loads((tmp_path / "index.json").read_text())["shards"]) == ["0.tar", "2.tar"]
    with pytest.raises(ValueError, match=f"has no entry for {b}: run: prolip data index"):
        count_samples([a, b, c])


def test_nothing_readable_writes_nothing_and_wrong_arguments_end_with_2(tmp_path, capsys):
    (tmp_path / "0.tar").write_bytes(b"")
    assert run(tmp_path, "--processes", 1) == 1
    assert not (tmp_path / "index.json").exists()
    assert run(tmp_path / "no.tar") == 2 and "shards are missing" in capsys.readouterr().err
    assert run("pipe:cat x") == 2 and "--output FILE" in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_refused_before_any_shard_is_read(tmp_path, monkeypatch, capsys):
    write_shards(tmp_path, [2])
    monkeypatch.setattr(command, "index_shards", lambda *_: pytest.fail("shards were read"))
    for arguments, message in (
        (["http://127.0.0.1:9/{0..1}.tar"], "nothing can be written to http://127.0.0.1:9/index.json: .*--output FILE"),
        ([tmp_path, "--output", "https://x/i.json"], "nothing can be written to https://x/i.json"),
        ([tmp_path, "--output", "nonsense://x/i.json"], "'nonsense://x/i.json' is not opened: give a path"),
        ([tmp_path, "--output", tmp_path], f"{tmp_path} is a folder: give a file"),
    ):
        assert run(*arguments) == 2
        assert re.search(f"^error: .*{message}", capsys.readouterr().err)

    def refuse(**_):
        raise PermissionError(13, "Permission denied", str(tmp_path))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    assert run(tmp_path) == 2
    assert "index.json cannot be written (Permission denied in " in capsys.readouterr().err


def test_remote_and_piped_shards_are_indexed(tmp_path):
    urls = write_shards(tmp_path, [2, 3])
    for url in urls:
        fsspec.filesystem("gs").pipe_file(f"/indexed/{Path(url).name}", Path(url).read_bytes())
    assert run("gs://indexed/{0..1}.tar", "--processes", 1) == 0
    index = read_index("gs://indexed/index.json")
    assert count_samples(["gs://indexed/0.tar", "gs://indexed/1.tar"], index=index) == 5
    assert run(f"pipe:cat {urls[1]}", "--output", tmp_path / "piped.json", "--processes", 1) == 0
    index = read_index(str(tmp_path / "piped.json"))
    assert index[f"pipe:cat {urls[1]}"].samples == 3
    assert len(list(ShardReader(ReadPolicy(pipes=True), index)(f"pipe:cat {urls[1]}"))) == 3


# --- counting
def test_an_index_is_believed_before_other_records_and_any_folder_name_works(tmp_path):
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    urls = write_shards(tmp_path / "a", [3, 2]) + write_shards(tmp_path / "b", [4])
    run(tmp_path / "a", "--processes", 1), run(tmp_path / "b", "--processes", 1)
    (tmp_path / "a" / "__len__").write_text("1000")
    assert count_samples(urls) == 9
    assert count_samples([os.path.relpath(urls[0])]) == 3 and count_samples([f"file://{urls[0]}"]) == 3
    assert count_samples(urls, "group=objects") == 2  # an index knows nothing of a selection


def test_equal_names_in_two_folders_are_two_entries(tmp_path):
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    write_shards(tmp_path / "a", [3]), write_shards(tmp_path / "b", [4])
    assert run(tmp_path / "a", tmp_path / "b", "--output", tmp_path / "both.json", "--processes", 1) == 0
    index = read_index(str(tmp_path / "both.json"))
    assert [index[f"{tmp_path}/{name}/0.tar"].samples for name in "ab"] == [3, 4]
    assert run(tmp_path / "a", tmp_path / "b", "--processes", 1) == 2


def test_a_stale_index_is_named_with_what_to_run(tmp_path):
    (url,) = write_shards(tmp_path, [3])
    run(tmp_path, "--processes", 1)
    write_shards(tmp_path, [30])
    with pytest.raises(ValueError) as error:
        count_samples([url])
    for part in ("index.json", url, "has 10240 bytes, it has", f"run: prolip data index '{tmp_path}/*.tar'"):
        assert part in str(error.value)


def test_files_of_others_and_damaged_indices(tmp_path):
    (url,) = write_shards(tmp_path, [3])
    place = tmp_path / "index.json"
    place.write_text('{"wids_version": 1, "shardlist": []}')
    assert find_index([url]) is None and count_samples([url]) == 3  # somebody else's index.json
    with pytest.raises(ValueError, match="is no 'prolip shard index 1': make one by prolip data index"):
        read_index(str(place))
    place.write_text('{"format": "prolip shard index 1", "shards": {"0.tar": {"samples": 3}}}')
    with pytest.raises(ValueError, match=r"is damaged \(KeyError: 'bytes'\): write it again"):
        find_index([url])
    place.write_text("{")
    with pytest.raises(ValueError, match="is no JSON"):
        find_index([url])
    with pytest.raises(ShardFault, match="unreadable shard"):
        read_index(str(tmp_path / "no.json"))


# --- reading
def indexed(tmp_path, count=4):
    (url,) = write_shards(tmp_path, [count])
    run(tmp_path, "--processes", 1)
    return url, find_index([url])


def keys_and_faults(reader, url):
    faults, keys = FaultCounter(), []
    try:
        for raw in reader(url, faults.add):
            keys.append(raw["__key__"])
    except ShardFault as fault:
        faults.add(fault)
    return keys, faults


def test_a_shard_that_ends_between_two_samples_with_valid_end_blocks_is_seen(tmp_path):
    url, index = indexed(tmp_path)
    write_tar(Path(url), [(f"s{i:03d}", members(i)) for i in range(2)])
    assert keys_and_faults(ShardReader(), url)[1].kinds == {}  # nothing tells without an index
    keys, faults = keys_and_faults(ShardReader(index=index), url)
    assert not keys and faults.kinds == {"index mismatch": 1} and "the index says" in faults.examples[0]


def test_a_command_that_goes_on_behind_what_the_index_knows_is_seen(tmp_path):
    url, index = indexed(tmp_path)
    longer = f"pipe:cat {url}; head -c 10240 /dev/zero"  # more padding: for a tar alone nothing is wrong
    piped = type(index).of(index.place, {longer: index[url]})
    assert len(keys_and_faults(ShardReader(ReadPolicy(pipes=True)), longer)[0]) == 4
    keys, faults = keys_and_faults(ShardReader(ReadPolicy(pipes=True), piped), longer)
    assert faults.kinds["index mismatch"] == 1 and "the shard goes on" in faults.examples[0]


def test_a_shard_without_an_entry_is_a_counted_fault_for_the_reader(tmp_path):
    url, index = indexed(tmp_path)
    keys, faults = keys_and_faults(ShardReader(index=type(index).of(index.place, {})), url)
    assert not keys and faults.kinds == {"index mismatch": 1} and "has no entry" in faults.examples[0]


def test_a_reader_raises_what_does_not_fit_its_index(tmp_path):
    url, index = indexed(tmp_path)
    assert len(list(ShardReader(index=index)(url))) == 4
    worse = type(index).of(index.place, {url: Entry(5, *index[url][1:])})
    with pytest.raises(ShardFault, match="index mismatch.*has 4 samples, the index says 5"):
        list(ShardReader(index=worse)(url))


def test_addresses_are_what_they_were_and_stay_so_when_they_are_sent():
    texts = ["", "a", "/data/é/0.tar", "/data/\udcff.tar", "s3://b/0.tar"]
    for found in (Addresses(texts), pickle.loads(pickle.dumps(Addresses(texts)))):
        assert list(found) == texts and len(found) == 5 and found[-1] == texts[-1] and found[1:3] == texts[1:3]
        with pytest.raises(IndexError):
            found[5]
    assert list(Addresses()) == list(pickle.loads(pickle.dumps(Addresses()))) == []


def test_a_part_of_an_index_counts_a_shard_as_often_as_it_is_named(tmp_path):
    a, b, c = write_shards(tmp_path, [1, 2, 3])
    assert run(tmp_path, "--processes", 1) == 0
    part, samples = find_index([a]).only([c, a, c], {})
    assert samples == 7 and list(part.names) == [a, c] and part[c].samples == 3
    with pytest.raises(ValueError, match=f"has no entry for {b}"):
        part[b]


def test_an_index_travels_in_little():
    entries = {f"/d/{n:06d}.tar": (10_000, 350_000_000 + n, f"{n:064x}") for n in range(20_000)}
    part, samples = command.ShardIndex.of("/d/index.json", entries).only(list(entries), {"/d/000007.tar": 350_000_007})
    assert samples == 200_000_000 and part["/d/019999.tar"] == entries["/d/019999.tar"]
    assert len(pickle.dumps(part)) < 20_000 * 85 and len(pickle.dumps(Addresses(entries))) < 20_000 * 5
