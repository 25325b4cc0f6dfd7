"""Archives that would fill the memory: a sample or a shard is lost and counted. Bounds are lowered to 64 KiB here."""

import bz2
import gzip
import lzma
import os
import tarfile
import tracemalloc
import zipfile

import pytest
from tiny_tars import members, png, read_counted, write_tar

from prolip.data import samples
from prolip.data.faults import FaultCounter, SampleFault
from prolip.data.reading import shards, tar
from prolip.data.reading.folders import ImageRow, ImageRows, rows_of
from prolip.data.reading.stream import ReadPolicy
from prolip.data.reading.tar import read_shard
from prolip.evaluation.datasets import base
from prolip.evaluation.datasets import published as tables
from prolip.evaluation.datasets import sources as places
from prolip.evaluation.datasets import webdataset as wds

BOUND = 2**16
POLICY = ReadPolicy(retries=0)
PACKERS = {"": lambda data: data, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
END = bytes(1024)


@pytest.fixture(autouse=True)
def low_bounds(monkeypatch):
    for module in (tar, shards, tables):
        monkeypatch.setattr(module, "SAMPLE_BYTES", BOUND)
    monkeypatch.setattr(tar, "EXPANSION_FROM", 16 * BOUND)


def header(name, size, kind=tarfile.REGTYPE):
    """A ustar header that claims a size, in GNU's binary form where it is large."""
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    return info.tobuf(tarfile.GNU_FORMAT)


def changed(header, at, *codes):
    """A header with other bytes and a checksum that fits."""
    found = bytearray(header)
    found[at : at + len(codes)] = codes
    found[148:156] = b"%06o\x00 " % (sum(found[:148]) + 8 * 32 + sum(found[156:512]))
    return bytes(found)


def padded(data):
    return data + bytes(-len(data) % 512)


def member(name, data, kind=tarfile.REGTYPE):
    return header(name, len(data), kind) + padded(data)


def sample(index):
    return b"".join(member(f"s{index}.{suffix}", data) for suffix, data in members(index).items())


def pax(*records):
    """An extended header of records, each of which begins with its own length."""
    body = b""
    for record in records:
        length = len(record) + 3
        length += len(str(length + 1)) - 1
        body += b"%d %s\n" % (length, record)
    return member("pax", body, tarfile.XHDTYPE)


def global_name(number):
    return changed(pax(b"n%d=1" % number), 156, ord("g")) + member(f"g{number}.txt", b"x")


LARGE_MEMBER = member("trap.mp4", bytes(BOUND * 3 + 1))
NUMBERS = b"%011o\x00" % 1
SPARSE_RECORDS = (b"GNU.sparse.major=1", b"GNU.sparse.minor=0", b"GNU.sparse.realsize=1")
#: What is put between two sound samples, and the fault that comes of it, of a sample or of the shard.
TRAPS = {
    "large member": (LARGE_MEMBER, "oversized member"),
    "large sample": (b"".join(member(f"trap.{i}.png", bytes(BOUND // 4)) for i in range(9)), "oversized member"),
    "many members": (b"".join(member(f"trap.{i}", b"") for i in range(BOUND // 512 + 99)), "oversized member"),
    "claimed size": (header("trap.png", 2**40), "broken shard"),
    "claimed size of another type": (header("trap.png", 2**60, tarfile.CONTTYPE), "broken shard"),
    "negative size": (header("trap.png", -(2**40)), "broken shard"),
    "long name": (member("t", bytes(tar.HEADER_BYTES + 1), tarfile.GNUTYPE_LONGNAME), "broken shard"),
    "long pax header": (member("t", bytes(10 * BOUND), tarfile.XHDTYPE), "broken shard"),
    "size in a pax header": (pax(b"size=%d" % 10**30) + member("trap.png", png(1)), "broken shard"),
    "sparse map": (
        changed(header("trap.png", 512, tarfile.GNUTYPE_SPARSE), 482, 1)  # more of the map follows
        + (NUMBERS * 42 + b"\x01" + bytes(7)) * 4000,
        "broken shard",
    ),
    "sparse file of pax": (pax(*SPARSE_RECORDS) + member("trap.png", b"9\n" + b"1\n" * 4 * BOUND), "broken shard"),
    "chain of headers": (member("x", b"abc", tarfile.GNUTYPE_LONGNAME) * 3000, "broken shard"),
    "global names": (b"".join(map(global_name, range(200))), "broken shard"),
}


@pytest.mark.parametrize("packing", ["", ".xz"])
@pytest.mark.parametrize("trap", TRAPS)
def test_a_trap_is_counted_and_little_is_held(tmp_path, trap, packing):
    (inside, kind), path = TRAPS[trap], tmp_path / f"trap.tar{packing}"
    path.write_bytes(PACKERS[packing](sample(0) + inside + sample(1) + END))
    tracemalloc.start()
    found, faults = read_counted(path, POLICY)
    shards.count_shard(str(path), None)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    keys = [raw["__key__"] for raw in found]
    assert faults.kinds[kind] == 1 and set(faults.kinds) <= {kind, "half sample", "skipped member"}, faults.examples
    assert keys == ["s0", "s1"] or kind == "broken shard" and not any(key.startswith("trap") for key in keys), keys
    assert "\n" not in faults.examples[0] and len(faults.examples[0]) < 500
    assert peak < 10 * BOUND + 2**21 + (16 * 2**20 if packing else 0)  # the tables of xz


@pytest.mark.parametrize("packing", [".gz", ".bz2", ".xz"])
def test_a_shard_that_unpacks_without_end_is_broken_and_a_sound_one_is_not(tmp_path, packing):
    """Many members, each below the bound, would fill a shuffle buffer."""
    path = tmp_path / f"0.tar{packing}"
    bomb = b"".join(member(f"b{i}.png", bytes(BOUND // 2)) for i in range(200))
    path.write_bytes(PACKERS[packing](sample(0) + bomb + END))
    found, faults = read_counted(path, POLICY)
    assert faults.kinds["broken shard"] == 1 and "unpack to" in faults.examples[0] and found[0]["__key__"] == "s0"
    assert len(found) < 100
    path.write_bytes(PACKERS[packing](b"".join(sample(i) for i in range(50)) + END))
    assert len(read_counted(path, POLICY)[0]) == 50
    path.write_bytes(PACKERS[packing](bz2.compress(bytes(10**7))))  # an archive in an archive is not unpacked
    assert read_counted(path, POLICY)[1].kinds == {"broken shard": 1}


def test_the_message_names_member_size_and_bound_and_a_sample_just_below_is_whole(tmp_path):
    path = tmp_path / "0.tar"
    path.write_bytes(sample(0) + LARGE_MEMBER + END)
    with pytest.raises(SampleFault, match=r"oversized member: trap.mp4 has 196609 bytes; the limit of a sample"):
        list(read_shard(str(path), None, POLICY))
    content = os.urandom(BOUND - 3 * 512 - 100)
    (raw,) = read_shard(write_tar(path, [("a", {"png": content, "txt": b"x"})]), None, POLICY)
    assert raw["png"] == content


def test_json_and_small_files_of_test_sets_are_bounded_and_deep_json_is_named(tmp_path, monkeypatch):
    raw = {"json": b"[" + b"[]," * samples.JSON_BYTES + b"[]]"}
    with pytest.raises(SampleFault, match="bad json: .* the limit is 4194304"):
        samples.json_record(raw)
    monkeypatch.setattr(places, "TEXT_BYTES", 2**17)
    (tmp_path / "classnames.txt").write_bytes(b"cat\n" * 2**16)
    with pytest.raises(base.DamagedData, match="classnames.txt has more than 131,072 bytes"):
        places.find_place(tmp_path).lines("classnames.txt")
    (tmp_path / "test").mkdir()
    for text in ("[" * 100_000, '{"pairs": {"a": [1e400]}}', '{"pairs": {"a": [null]}}', "3"):
        (tmp_path / "test" / "relevance.json").write_text(text)
        with pytest.raises(base.DamagedData, match="write it again"):
            wds.read_relevance(places.find_place(tmp_path), "test")


def test_images_beside_rows_and_members_of_zips_are_bounded_and_devices_are_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr("prolip.data.reading.folders.SAMPLE_BYTES", 1000)
    (tmp_path / "a.png").write_bytes(bytes(1001))
    os.mkfifo(tmp_path / "b.png")
    rows = ImageRows([ImageRow(str(path), "x", {}) for path in (tmp_path / "a.png", tmp_path / "b.png", "/dev/zero")])
    for index, message in enumerate(("more than 1,000 bytes", "a pipe or a device", "a pipe or a device")):
        with pytest.raises(SampleFault, match=f"missing image: .*{message}"):
            rows(index)
    for path in (tmp_path / "b.png", "/dev/zero"):
        with pytest.raises(base.DamagedData, match="a pipe or a device"):
            next(base.read_images(rows_of([str(path)]), [base.Sample("a", b"", 0)], None))
    with zipfile.ZipFile(tmp_path / "images.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("images/a.jpg", bytes(BOUND + 1))
        archive.writestr("images/b.jpg", b"b")
    files, damage = ["a.jpg", "b.jpg"], FaultCounter()
    found, *_ = tables.find_images(tmp_path, "images", files)
    read = base.read_images(found, [base.Sample(name, b"") for name in files], damage)
    assert [sample.image for sample in read] == [b"b"]
    assert damage.kinds == {"missing image": 1} and f"at most {BOUND}" in damage.examples[0]
