"""Shards: which addresses they stand for, how strictly they are read, and how they are counted."""

import bz2
import gc
import gzip
import json
import lzma
import subprocess
import tarfile
from pathlib import Path

import fsspec
import pytest
from tiny_tars import members, read_counted, write_shards, write_tar
from webdataset.tariterators import group_by_keys

from prolip.data.captions import Selector
from prolip.data.faults import SampleFault, ShardFault
from prolip.data.reading.remote import ReadPolicy
from prolip.data.reading.shards import Shard, count_samples, count_shard, expand_shards
from prolip.data.reading.tar import StrictHeader, read_shard

PIPES = ReadPolicy(pipes=True)


def keys(url):
    return [raw["__key__"] for raw in read_shard(str(url), policy=PIPES)]


def expanded(data, **options):
    return [shard.url for shard in expand_shards(str(data), **options)]


# --- what to read
def test_braces_wildcards_folders_and_sources_expand_in_order(tmp_path):
    a, b, c = write_shards(tmp_path, [1, 1, 1])
    for data in (f"{tmp_path}/{{0..2}}.tar", f"{tmp_path}/*.tar", tmp_path):
        assert expanded(data) == [a, b, c]
    assert expanded(f"{tmp_path}/{{2,0}}.tar") == [c, a] and expanded(f"file://{a}") == [a]
    assert expand_shards(f"{tmp_path}/{{0..1}}.tar::{c}", "2::0.5") == [Shard(a, 2), Shard(b, 2), Shard(c, 0.5)]


def test_addresses_are_looked_at_when_braces_are_expanded(monkeypatch):
    pytest.importorskip("s3fs")
    assert expanded("{s3,gs}://b/0.tar") == ["s3://b/0.tar", "gs://b/0.tar"]
    assert expanded("{http://h/0.tar,pipe:cat x}", pipes=True) == ["http://h/0.tar", "pipe:cat x"]
    for hidden in ("{http://h/0.tar,pipe:cat x}", "{p,q}ipe:touch x", "{memory,s3}://b/0.tar", "nosuch://a.tar"):
        with pytest.raises(ValueError, match="is not allowed; give a path|is not allowed: only training shards"):
            expand_shards(hidden)
    monkeypatch.setattr("fsspec.get_filesystem_class", lambda scheme: __import__(f"missing_{scheme}fs"))
    with pytest.raises(ImportError, match="s3:// of 's3://a.tar' cannot be opened: No module named 'missing_s3fs'"):
        expand_shards("s3://a.tar")


def test_wildcards_of_object_stores_are_listed(monkeypatch):
    system = fsspec.filesystem("gs")
    for name in ("listed/b.tar", "listed/a.tar", "listed/c.txt"):
        system.pipe_file(f"/{name}", b"x")
    assert expanded("gs://listed/*.tar") == ["gs://listed/a.tar", "gs://listed/b.tar"]
    with pytest.raises(FileNotFoundError, match=r"wildcard 'gs://listed/\*.zip' matches no object"):
        expand_shards("gs://listed/*.zip")
    for whole in ("pipe:cat *.tar", "https://host/0.tar?key=*"):
        assert expanded(whole, pipes=True) == [whole]

    def refuse(*_):
        raise RuntimeError("no credentials")

    monkeypatch.setattr(type(system), "glob", refuse)
    with pytest.raises(OSError, match=r"cannot list wildcard 'gs://listed/\*.tar': RuntimeError: no credentials"):
        expand_shards("gs://listed/*.tar")


def test_sources_without_shards_are_refused_with_what_is_near(tmp_path, monkeypatch):
    (tmp_path / "shards").mkdir(), (tmp_path / "none").mkdir(), (tmp_path / "none" / "readme.md").touch()
    a, b = write_shards(tmp_path / "shards", [1, 1])
    monkeypatch.chdir(tmp_path)
    for data, message in (
        ("shards/{0..3}.tar", r"2 of 4 shards are missing: shards/2.tar, shards/3.tar .*0.tar"),
        (f"{tmp_path}/shrds/0.tar", r"There is no shrds in .*: did you mean shards\?"),
        ("none/*.tar", "matches no file"),
        ("", "source is empty"),
        ("shards/0.tar::", "source is empty"),
        ("{}.tar", "names no shard: .* is left after expansion; give a range"),
        ("{a..}.tar", "names no shard"),
        ("{0..3.tar", "names no shard|unbalanced"),
        ("none", r"has no \.tar \(it contains readme.md\)"),
    ):
        with pytest.raises((FileNotFoundError, ValueError), match=message):
            expand_shards(data)
    for factors in ("1", "1::2::3", "1::x", "1::0", "1::-2"):
        with pytest.raises(ValueError, match="give 2 positive numbers joined by '::', such as 1::1"):
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
    assert keys(write_tar(tmp_path / "1.tar", [])) == []  # an archive without members is whole


def flipped(data, at):
    """The bytes with one bit of byte `at` turned."""
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize("kind", ["gz", "bz2", "xz"])
def test_compressed_shards_are_held_against_their_own_checksums(tmp_path, kind):
    compress = {"gz": lambda data: gzip.compress(data, 0), "bz2": bz2.compress, "xz": lzma.compress}[kind]
    tar = Path(write_shards(tmp_path, [20])[0]).read_bytes()
    whole, path = compress(tar), tmp_path / f"0.tar.{kind}"
    sound = [whole, compress(tar[:20_480]) + compress(tar[20_480:])]  # pigz and bgzip write several members
    # a bit of an image that gzip only stores, the checksum after the archive, the end
    broken = [flipped(whole, 5000 if kind == "gz" else len(whole) // 2), flipped(whole, -6), whole[:-4], whole[:-8]]
    if kind == "gz":
        sound, broken = [*sound, whole + bytes(512)], [*broken, whole + b"junk"]
    for data in sound:
        path.write_bytes(data)
        assert keys(path) == [f"s{i:03d}" for i in range(20)]
    for data in broken:
        path.write_bytes(data)
        with pytest.raises(ShardFault, match="broken shard"):
            keys(path)


def test_a_cut_shard_breaks_after_its_whole_samples(tmp_path):
    (url,) = write_shards(tmp_path, [4])
    with tarfile.open(url) as archive:
        headers = [(member.offset, member.offset_data, member.size) for member in archive]
    data, (offset, begin, size) = Path(url).read_bytes(), headers[7]  # the second of the third sample's three members
    # where the cut falls after a sample, more of it may have been lost: it is not handed out either
    for position, whole in (
        (offset + 100, 2),  # in a header
        (offset, 2),  # between files
        (headers[6][0], 1),  # between samples
        (begin + size // 2, 2),  # in a file
        (headers[-1][1] + 512, 3),  # before the end
    ):
        Path(url).write_bytes(data[:position])
        samples, faults = read_counted(url)
        assert [(raw["__key__"], len(raw)) for raw in samples] == [(f"s{i:03d}", 4) for i in range(whole)]
        assert faults.kinds == {"broken shard": 1, "half sample": 1}
        assert count_shard(url, None) in (whole, whole + 1)  # which leaves the fault to the reader
    for damage in (b"\xff" * 512, bytes(512)):  # a damaged header is not the end
        Path(url).write_bytes(data[: headers[6][0]] + damage + data[headers[6][0] + 512 :])
        with pytest.raises(ShardFault, match="broken shard"):
            keys(url)


def test_a_command_that_fails_breaks_the_shard_although_all_bytes_came(tmp_path):
    (url,) = write_shards(tmp_path, [2])
    samples, faults = read_counted(f"pipe:cat {url}; echo no more >&2; exit 3", PIPES)
    assert [raw["__key__"] for raw in samples] == ["s000"]  # the last one is not believed
    assert faults.kinds == {"half sample": 1, "broken shard": 1} and "exit 3: no more" in faults.examples[0]
    with pytest.raises(ShardFault, match="broken shard.*/nowhere/0.tar"):
        keys("pipe:cat /nowhere/0.tar | cat")


def test_members_and_keys_that_are_there_twice_are_reported_and_the_first_ones_kept(tmp_path):
    rows = [(key, members(number)) for number, key in enumerate("aba")]
    rows += [("c", {"txt": text}) for text in (b"first", b"second")]
    url = write_tar(tmp_path / "0.tar", rows)
    samples, faults = read_counted(url)
    assert [raw["__key__"] for raw in samples] == ["a", "b", "c"]
    assert samples[0]["txt"] == b"caption 0" and samples[2]["txt"] == b"first"
    assert faults.kinds == {"duplicate key": 1, "duplicate member": 1} and faults.bad_samples == 2
    with pytest.raises(SampleFault, match="duplicate key: a occurs before"):
        keys(url)
    with pytest.raises(SampleFault, match="duplicate member"):
        keys(write_tar(tmp_path / "1.tar", rows[3:]))


def test_shards_of_the_tar_program_with_folders_links_and_long_names_are_read(tmp_path):
    """bsdtar of macOS writes "a/._x.jpg" before "a/x.jpg": a sample "a/" again and again, if it were one."""
    folder, long = tmp_path / "in", "x" * 120
    (folder / "sub.d").mkdir(parents=True)
    skipped = ["README", "sub.d/._s.png", "b.png"]
    (folder / "b.png").symlink_to("a.png")
    for name in ("README", "__index__.json", "a.png", "a.txt", "sub.d/._s.png", "sub.d/s.png", f"{long}.png"):
        (folder / name).write_bytes(b"data")
    for options in ("--format=gnu", "--format=pax"):
        subprocess.run(["tar", options, "--sort=name", "-cf", tmp_path / "t.tar", "-C", folder, "."], check=True)
        samples, faults = read_counted(tmp_path / "t.tar")
        assert [raw["__key__"] for raw in samples] == ["a", "sub.d/s", long] == keys(tmp_path / "t.tar")
        assert faults.kinds == {"skipped member": len(skipped)} and faults.bad_samples == 0
        assert count_shard(str(tmp_path / "t.tar"), None) == 3


def test_headers_that_were_read_are_let_go_of(tmp_path):
    """A shard of a million files would hold a gigabyte of them."""
    url = write_tar(tmp_path / "0.tar", ((f"k{index}", {"jpg": b"x"}) for index in range(300)))
    alive = []
    for number, _ in enumerate(read_shard(url)):
        if number in (100, 290):
            alive.append(sum(type(thing) is StrictHeader for thing in gc.get_objects()))
    assert alive[1] <= alive[0] < 20


def test_webdatasets_own_grouping_gives_the_same_samples(tmp_path):
    rows = [("x/y", {"PNG": b"1", "seg.txt": b"2"}), ("a.b", {"c": b"3"}), ("d", {"txt": b""})]
    url = write_tar(tmp_path / "0.tar", rows)
    named = [(f"{key}.{suffix}", data) for key, parts in rows for suffix, data in parts.items()]
    assert list(read_shard(url)) == list(group_by_keys({"fname": n, "data": d, "__url__": url} for n, d in named))


# --- counting
def test_local_shards_are_counted_by_usable_samples_and_remote_or_large_ones_not(tmp_path, monkeypatch):
    urls = write_shards(tmp_path, [4, 3])
    assert count_samples(urls) == 7
    assert count_samples(urls, "group=objects") == 2
    assert count_samples(urls, "group=none") == 0
    mixed = [("a", {"txt": b"no image"}), ("b", members(1)), ("c", {"png": b"", "txt": b""})]
    assert count_samples([write_tar(tmp_path / "x.tar", mixed)]) == 2
    bad = write_tar(tmp_path / "bad.tar", [("a", {"png": b"", "json": b"{"}), ("b", members(2))])
    assert count_shard(bad, Selector.parse("group=objects")) == 1
    with pytest.raises(ValueError, match=r"1 of them are remote: give --train-num-samples, or put a sizes.json"):
        count_samples(["gs://shards/0.tar"])
    monkeypatch.setattr("prolip.data.reading.shards.COUNT_LIMIT", 10)
    with pytest.raises(ValueError, match="GiB: give --train-num-samples$"):
        count_samples(write_shards(tmp_path, [1]), "group=objects")


def test_recorded_sizes_are_believed_as_in_openclip(tmp_path):
    urls = write_shards(tmp_path, [1, 1])
    (tmp_path / "__len__").write_text("1000")
    assert count_samples(urls) == 1000
    (tmp_path / "sizes.json").write_text(json.dumps({"0.tar": 10, "1.tar": "20", "2.tar": 40}))
    assert count_samples(urls) == 30 and count_samples(urls[1:]) == 20
    assert count_samples(urls, "group=food drink") == 1  # sizes know nothing of a selection
    for content in ("many", "", "{", '{"0.tar": null}', '{"0.tar": 1}'):
        (tmp_path / "sizes.json").write_text(content)
        with pytest.raises(ValueError, match="sizes.json (has no sample counts .*Repair|has no entry for 1.tar)"):
            count_samples(urls)
