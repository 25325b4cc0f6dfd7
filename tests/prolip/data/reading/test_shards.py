import bz2
import gc
import gzip
import io
import json
import lzma
import os
import subprocess
import tarfile
from pathlib import Path

import fsspec
import pytest
from tiny_tars import members, write_shards, write_tar
from webdataset.tariterators import group_by_keys

from prolip.data.captions import Selector
from prolip.data.faults import FaultCounter, SampleFault, ShardFault
from prolip.data.reading.remote import ReadPolicy
from prolip.data.reading.shards import Shard, count_samples, count_shard, expand_shards
from prolip.data.reading.tar import StrictHeader, read_shard

PIPES = ReadPolicy(pipes=True)


def keys(url, **options):
    return [raw["__key__"] for raw in read_shard(url, policy=PIPES, **options)]


# --- what to read
def test_braces_wildcards_folders_and_sources_expand_in_order(tmp_path):
    a, b, c = write_shards(tmp_path, [1, 1, 1])
    assert [s.url for s in expand_shards(f"{tmp_path}/{{0..2}}.tar")] == [a, b, c]
    assert [s.url for s in expand_shards(f"{tmp_path}/{{2,0}}.tar")] == [c, a]
    assert [s.url for s in expand_shards(f"{tmp_path}/*.tar")] == [a, b, c]
    assert [s.url for s in expand_shards(str(tmp_path))] == [a, b, c]
    assert [s.url for s in expand_shards(f"file://{a}")] == [a]
    assert expand_shards(f"{tmp_path}/{{0..1}}.tar::{c}", "2::0.5") == [Shard(a, 2), Shard(b, 2), Shard(c, 0.5)]


def test_addresses_are_looked_at_when_braces_are_expanded():
    pytest.importorskip("s3fs")
    assert [s.url for s in expand_shards("{s3,gs}://b/0.tar")] == ["s3://b/0.tar", "gs://b/0.tar"]
    assert [s.url for s in expand_shards("{http://h/0.tar,pipe:cat x}", pipes=True)] == ["http://h/0.tar", "pipe:cat x"]
    for hidden in ("{http://h/0.tar,pipe:cat x}", "{p,q}ipe:touch x", "{memory,s3}://b/0.tar"):
        with pytest.raises(ValueError, match="is not opened"):
            expand_shards(hidden)


def test_wildcards_of_object_stores_are_listed(monkeypatch):
    system = fsspec.filesystem("gs")
    for name in ("listed/b.tar", "listed/a.tar", "listed/c.txt"):
        system.pipe_file(f"/{name}", b"x")
    assert [s.url for s in expand_shards("gs://listed/*.tar")] == ["gs://listed/a.tar", "gs://listed/b.tar"]
    with pytest.raises(FileNotFoundError, match=r"wildcard 'gs://listed/\*.zip' matches no object"):
        expand_shards("gs://listed/*.zip")
    for whole in ("pipe:cat *.tar", "https://host/0.tar?key=*"):
        assert [s.url for s in expand_shards(whole, pipes=True)] == [whole]

    def refuse(*_):
        raise RuntimeError("no credentials")

    monkeypatch.setattr(type(system), "glob", refuse)
    with pytest.raises(OSError, match=r"'gs://listed/\*.tar' cannot be listed: RuntimeError: no credentials"):
        expand_shards("gs://listed/*.tar")


def test_a_missing_shard_is_named_with_what_is_near(tmp_path):
    write_shards(tmp_path, [1, 1])
    with pytest.raises(FileNotFoundError) as error:
        expand_shards(f"{tmp_path}/{{0..3}}.tar")
    for part in ("{0..3}.tar", "2 of 4 shards are missing", f"{tmp_path}/2.tar", f"{tmp_path}/3.tar", "0.tar"):
        assert part in str(error.value)
    with pytest.raises(FileNotFoundError, match=r"There is no shrds in .*: did you mean shards\?"):
        (tmp_path / "shards").mkdir()
        expand_shards(f"{tmp_path}/shrds/0.tar")


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("", "empty source"),
        ("0.tar::", "empty source"),
        ("{}.tar", "names no shard: .* is left after expansion; give a range"),
        ("{a..}.tar", "names no shard"),
        ("{0..3.tar", "names no shard|not balanced"),
    ],
)
def test_empty_sources_and_brace_patterns_are_refused(tmp_path, monkeypatch, pattern, message):
    monkeypatch.chdir(tmp_path)
    write_shards(tmp_path, [1])
    with pytest.raises(ValueError, match=message):
        expand_shards(pattern)


def test_folders_without_shards_and_wildcards_without_matches_are_refused(tmp_path):
    (tmp_path / "readme.md").touch()
    with pytest.raises(ValueError, match=r"holds no \.tar \(it holds readme.md\)"):
        expand_shards(str(tmp_path))
    with pytest.raises(FileNotFoundError, match="matches no file"):
        expand_shards(f"{tmp_path}/*.tar")


def test_an_unknown_scheme_is_refused_before_anything_is_opened(monkeypatch):
    def refuse(scheme):
        raise ImportError(f"install {scheme}fs")

    with pytest.raises(ValueError, match="'nosuch://a.tar' is not opened: give a path"):
        expand_shards("nosuch://a.tar")
    monkeypatch.setattr("fsspec.get_filesystem_class", refuse)
    with pytest.raises(ImportError, match="s3:// of 's3://a.tar' cannot be opened: install s3fs"):
        expand_shards("s3://a.tar")


@pytest.mark.parametrize("factors", ["1", "1::2::3", "1::x", "1::0", "1::-2"])
def test_upsampling_factors_must_fit_the_sources(tmp_path, factors):
    a, b = write_shards(tmp_path, [1, 1])
    with pytest.raises(ValueError, match="give 2 positive numbers joined by '::', e.g. 1::1"):
        expand_shards(f"{a}::{b}", factors)


# --- reading
def test_local_piped_remote_and_compressed_shards_read_alike(tmp_path):
    (url,) = write_shards(tmp_path, [3])
    data = Path(url).read_bytes()
    with fsspec.open("gs://shards/0.tar", "wb") as remote:
        remote.write(data)
    (tmp_path / "0.tar.gz").write_bytes(gzip.compress(data))
    local = list(read_shard(url))
    assert [raw["__key__"] for raw in local] == ["s000", "s001", "s002"]
    assert local[1]["png"] == members(1)["png"] and local[1]["txt"] == b"caption 1"
    for other in (f"pipe:cat {url}", "gs://shards/0.tar", str(tmp_path / "0.tar.gz"), f"file://{url}"):
        assert [{**raw, "__url__": url} for raw in read_shard(other, policy=PIPES)] == local


def flipped(data, at):
    """The bytes with one bit of byte `at` turned."""
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize("kind", ["gz", "bz2", "xz"])
def test_compressed_shards_are_held_against_their_own_checksums(tmp_path, kind):
    compress = {"gz": lambda data: gzip.compress(data, 0), "bz2": bz2.compress, "xz": lzma.compress}[kind]
    tar = Path(write_shards(tmp_path, [20])[0]).read_bytes()
    whole, path = compress(tar), tmp_path / f"0.tar.{kind}"
    for data in (whole, compress(tar[:20_480]) + compress(tar[20_480:])):  # pigz and bgzip write several members
        path.write_bytes(data)
        assert keys(str(path)) == [f"s{i:03d}" for i in range(20)]
    # a bit of a picture that gzip only stores, the checksum behind the archive, the end
    for data in (flipped(whole, 5000 if kind == "gz" else len(whole) // 2), flipped(whole, -6), whole[:-4], whole[:-8]):
        path.write_bytes(data)
        with pytest.raises(ShardFault, match="broken shard"):
            keys(str(path))


def test_bytes_behind_a_gzip_archive_are_reported_and_padding_is_none(tmp_path):
    data, path = gzip.compress(Path(write_shards(tmp_path, [3])[0]).read_bytes()), tmp_path / "0.tar.gz"
    path.write_bytes(data + bytes(512))
    assert len(keys(str(path))) == 3
    path.write_bytes(data + b"junk")
    with pytest.raises(ShardFault, match="broken shard"):
        keys(str(path))


def test_shards_of_the_tar_program_with_folders_and_long_names_are_read(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    long = "x" * 120
    for name in ("a.png", "a.txt", f"{long}.png", f"{long}.txt"):
        (folder / name).write_bytes(b"data")
    for options in ("--format=gnu", "--format=pax"):
        subprocess.run(["tar", options, "--sort=name", "-cf", tmp_path / "t.tar", "-C", folder, "."], check=True)
        assert keys(str(tmp_path / "t.tar")) == ["a", long]


def cut(data, position):
    return data[:position]


def layout(path):
    """Where the headers of a tar lie and where its files begin."""
    with tarfile.open(path) as archive:
        return [(member.offset, member.offset_data, member.size) for member in archive]


@pytest.mark.parametrize("where", ["in a header", "between files", "between samples", "in a file", "before the end"])
def test_a_cut_shard_breaks_after_its_whole_samples(tmp_path, where):
    (url,) = write_shards(tmp_path, [4])
    headers = layout(url)
    offset, begin, size = headers[7]  # the second of the third sample's three members
    position = {
        "in a header": offset + 100,
        "between files": offset,
        "between samples": headers[6][0],
        "in a file": begin + size // 2,
        "before the end": headers[-1][1] + 512,
    }[where]
    Path(url).write_bytes(Path(url).read_bytes()[:position])
    found = []
    with pytest.raises(ShardFault, match="broken shard"):
        for raw in read_shard(url):
            found.append((raw["__key__"], len(raw)))
    # where the cut falls after a sample, more of it may have been lost: it is not handed out either
    whole = {"between samples": 1, "before the end": 3}.get(where, 2)
    assert found == [(f"s{i:03d}", 5) for i in range(whole)]


@pytest.mark.parametrize("damage", [b"\xff" * 512, bytes(512)])
def test_a_damaged_header_is_not_the_end_of_the_shard(tmp_path, damage):
    (url,) = write_shards(tmp_path, [4])
    offset = layout(url)[6][0]
    data = bytearray(Path(url).read_bytes())
    data[offset : offset + 512] = damage
    Path(url).write_bytes(data)
    with pytest.raises(ShardFault, match="broken shard"):
        keys(url)


def test_an_archive_without_members_has_no_samples_and_is_whole(tmp_path):
    assert keys(write_tar(tmp_path / "0.tar", [])) == []


def test_a_command_that_fails_breaks_the_shard_although_all_bytes_came(tmp_path):
    (url,) = write_shards(tmp_path, [2])
    found, faults = [], []
    with pytest.raises(ShardFault, match="exit 3: no more"):
        for raw in read_shard(f"pipe:cat {url}; echo no more >&2; exit 3", faults.append, PIPES):
            found.append(raw["__key__"])
    assert found == ["s000"] and [fault.kind for fault in faults] == ["half sample"]  # the last one is not believed
    with pytest.raises(ShardFault, match="broken shard.*/nowhere/0.tar"):
        keys("pipe:cat /nowhere/0.tar | cat")


def test_a_member_that_is_there_twice_is_reported_and_the_first_one_kept(tmp_path):
    url = str(tmp_path / "0.tar")
    with tarfile.open(url, "w") as archive:
        for content in (b"first", b"second"):
            (tmp_path / "a.txt").write_bytes(content)
            archive.add(tmp_path / "a.txt", "a.txt")
    faults = []
    (raw,) = read_shard(url, faults.append)
    assert raw["txt"] == b"first" and [fault.kind for fault in faults] == ["duplicate member"]
    with pytest.raises(SampleFault, match="duplicate member"):
        keys(url)


def test_members_that_are_no_files_of_samples_are_skipped_and_counted_but_not_charged(tmp_path):
    folder = tmp_path / "in"
    (folder / "sub.d").mkdir(parents=True)
    for name in ("README", "a.png", "a.txt", "__index__.json", "._a.png"):
        (folder / name).write_bytes(b"data")
    (folder / "b.png").symlink_to("a.png")
    names = ["README", "a.png", "a.txt", "__index__.json", "._a.png", "b.png", "sub.d"]
    subprocess.run(["tar", "-cf", tmp_path / "t.tar", "-C", folder, *names], check=True)
    faults = FaultCounter()
    (raw,) = read_shard(str(tmp_path / "t.tar"), faults.add)
    assert raw["__key__"] == "a" and faults.kinds == {"skipped member": 3} and faults.bad_samples == 0
    assert keys(str(tmp_path / "t.tar")) == ["a"]


def test_files_that_macos_adds_to_archives_are_skipped(tmp_path):
    """bsdtar writes "a/._x.jpg" before "a/x.jpg": a sample "a/" again and again, if it were one."""
    with tarfile.open(tmp_path / "0.tar", "w") as archive:
        for index in range(3):
            for suffix, data in members(index).items():
                for name in (f"a/._s{index}.{suffix}", f"a/s{index}.{suffix}"):
                    info = tarfile.TarInfo(name)
                    info.size = len(data)
                    archive.addfile(info, io.BytesIO(data))
    faults = FaultCounter()
    found = list(read_shard(str(tmp_path / "0.tar"), faults.add))
    assert [raw["__key__"] for raw in found] == ["a/s0", "a/s1", "a/s2"] and found[2]["txt"] == b"caption 2"
    assert faults.kinds == {"skipped member": 9} and faults.bad_samples == 0
    assert count_shard(str(tmp_path / "0.tar"), None) == 3


def test_headers_that_were_read_are_let_go_of(tmp_path):
    """A shard of a million files would hold a gigabyte of them."""
    url = write_tar(tmp_path / "0.tar", ((f"k{index}", {"jpg": b"x"}) for index in range(300)))
    alive = []
    for number, _ in enumerate(read_shard(url)):
        if number in (100, 290):
            alive.append(sum(type(thing) is StrictHeader for thing in gc.get_objects()))
    assert alive[1] <= alive[0] < 20


def test_a_key_that_comes_again_later_is_reported_and_handed_out_once(tmp_path):
    url = write_tar(tmp_path / "0.tar", [("a", members(0)), ("b", members(1)), ("a", members(2)), ("c", members(3))])
    faults = FaultCounter()
    found = list(read_shard(url, faults.add))
    assert [raw["__key__"] for raw in found] == ["a", "b", "c"] and found[0]["txt"] == b"caption 0"
    assert faults.kinds == {"duplicate key": 1} == {"duplicate key": faults.bad_samples}
    with pytest.raises(SampleFault, match="duplicate key: a was there before"):
        keys(url)


def test_webdatasets_own_grouping_gives_the_same_samples(tmp_path):
    rows = [("x/y", {"PNG": b"1", "seg.txt": b"2"}), ("a.b", {"c": b"3"}), ("d", {"txt": b""})]
    url = write_tar(tmp_path / "0.tar", rows)
    files = (
        {"fname": f"{key}.{suffix}", "data": data, "__url__": url}
        for key, parts in rows
        for suffix, data in parts.items()
    )
    assert list(read_shard(url)) == list(group_by_keys(files))


# --- counting
def test_local_shards_are_counted_with_selection_and_incomplete_samples(tmp_path):
    urls = write_shards(tmp_path, [4, 3])
    assert count_samples(urls) == 7
    assert count_samples(urls, "group=objects") == 2
    assert count_samples(urls, "group=none") == 0
    mixed = [("a", {"txt": b"no image"}), ("b", members(1)), ("c", {"png": b"", "txt": b""})]
    assert count_samples([write_tar(tmp_path / "x.tar", mixed)]) == 2


def test_counting_ends_where_a_shard_breaks_and_leaves_the_fault_to_the_reader(tmp_path):
    (url,) = write_shards(tmp_path, [4])
    Path(url).write_bytes(Path(url).read_bytes()[: layout(url)[7][0] + 5])
    assert count_shard(url, None) in (2, 3)
    bad = write_tar(tmp_path / "bad.tar", [("a", {"png": b"", "json": b"{"}), ("b", members(2))])
    assert count_shard(bad, Selector.parse("group=objects")) == 1


def test_recorded_sizes_are_believed_as_in_openclip(tmp_path):
    urls = write_shards(tmp_path, [1, 1])
    (tmp_path / "__len__").write_text("1000")
    assert count_samples(urls) == 1000
    (tmp_path / "sizes.json").write_text(json.dumps({"0.tar": 10, "1.tar": "20", "2.tar": 40}))
    assert count_samples(urls) == 30 and count_samples(urls[1:]) == 20
    assert count_samples(urls, "group=food drink") == 1  # sizes know nothing of a selection


def test_remote_and_large_shards_are_not_counted(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"1 of them are remote: give --train-num-samples, or put a sizes.json"):
        count_samples(["gs://shards/0.tar"])
    monkeypatch.setattr("prolip.data.reading.shards.COUNT_LIMIT", 10)
    urls = write_shards(tmp_path, [1])
    assert os.path.getsize(urls[0]) > 10
    with pytest.raises(ValueError, match="GiB: give --train-num-samples$"):
        count_samples(urls, "group=objects")


def test_records_of_sizes_that_are_none_are_named(tmp_path):
    urls = write_shards(tmp_path, [3])
    for name, content in (("__len__", "many"), ("__len__", ""), ("sizes.json", "{"), ("sizes.json", '{"0.tar": null}')):
        (tmp_path / name).write_text(content)
        with pytest.raises(ValueError, match=f"{name} holds no counts of samples .*: repair or remove it"):
            count_samples(urls)
