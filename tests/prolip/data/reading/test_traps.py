"""Archives that would fill the memory: a sample or a shard is lost and counted. Bounds are lowered to 64 KiB here."""

import bz2
import gzip
import lzma
import os
import random
import tarfile
import tracemalloc
import zipfile

import pytest
from tiny_tars import members, png, write_tar

from prolip.data import samples
from prolip.data.faults import FaultCounter, SampleFault, ShardFault
from prolip.data.reading import shards, tar
from prolip.data.reading.folders import ImageRow, ImageRows, rows_of
from prolip.data.reading.shard_index import from_json
from prolip.data.reading.stream import ReadPolicy
from prolip.data.reading.tar import read_shard
from prolip.evaluation.datasets import base
from prolip.evaluation.datasets import published as tables
from prolip.evaluation.datasets import sources as places
from prolip.evaluation.datasets import webdataset as wds

BOUND = 2**16
POLICY = ReadPolicy(retries=0)
PACKERS = {"": lambda data: data, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


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


def padded(data):
    return data + bytes(-len(data) % 512)


def member(name, data):
    return header(name, len(data)) + padded(data)


def sample(index):
    return b"".join(member(f"s{index}.{suffix}", data) for suffix, data in members(index).items())


END = bytes(1024)


def read(path):
    """Keys, faults, and the most that was held on the way."""
    faults, keys = FaultCounter(), []
    tracemalloc.start()
    try:
        for raw in read_shard(str(path), faults.add, POLICY):
            keys.append(raw["__key__"])
    except ShardFault as fault:
        faults.add(fault)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return keys, faults, peak


def pax(records):
    """An extended header of records, each of which begins with its own length."""
    body = b""
    for record in records:
        length = len(record) + 3
        length += len(str(length + 1)) - 1
        body += b"%d %s\n" % (length, record)
    return header("pax", len(body), tarfile.XHDTYPE) + padded(body)


# Each trap: what it puts between two sound samples, and what becomes of it: a sample's fault or a shard's.
def large_member(rng):
    return member(f"trap.{rng.choice(['png', 'txt', 'json', 'npy', 'mp4'])}", bytes(BOUND * rng.randint(1, 10) + 1))


def large_sample(rng):
    return b"".join(member(f"trap.{i}.png", bytes(BOUND // 4)) for i in range(rng.randint(5, 40)))


def many_members(rng):
    return b"".join(member(f"trap.{i}", b"") for i in range(BOUND // 512 + rng.randint(1, 500)))


def claimed(rng):
    return header("trap.png", rng.choice([2**33, 2**40, 2**60, BOUND + 1]))


def claimed_other(rng):
    return header("trap.png", rng.choice([2**40, 2**60]), rng.choice([b"Z", tarfile.CONTTYPE]))


def negative(rng):
    return header("trap.png", -rng.randint(1, 2**40))


def long_header(rng):
    kind = rng.choice([tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE])
    size = rng.choice([tar.HEADER_BYTES + 1, 10 * BOUND])
    return header("trap", size, kind) + padded(bytes(size)) + member("trap.png", png(1))


def pax_size(rng):
    return pax([b"size=%d" % rng.choice([2**60, 10**30])]) + member("trap.png", png(1))


def sparse_map(rng):
    first = header("trap.png", 512, tarfile.GNUTYPE_SPARSE)
    info = bytearray(first)
    info[482] = 1  # more of the map follows
    info[148:156] = b"%06o\x00 " % (sum(info[:148]) + 8 * 32 + sum(info[156:]))
    extension = (b"%011o\x00" % 1 + b"%011o\x00" % 1) * 21 + b"\x01" + bytes(7)
    return bytes(info) + extension * 4000


def sparse_pax(rng):
    records = [b"GNU.sparse.major=1", b"GNU.sparse.minor=0", b"GNU.sparse.realsize=1"]
    return pax(records) + member("trap.png", b"999999999\n" + b"1\n" * 4 * BOUND)


def header_chain(rng):
    return (header("x", 3, tarfile.GNUTYPE_LONGNAME) + padded(b"abc")) * 3000


def global_names(rng):
    body = [pax([b"n%d=1" % i]) for i in range(200)]
    body = [part[:156] + b"g" + part[157:] for part in body]
    fixed = [part[:148] + b"%06o\x00 " % (sum(part[:148]) + 8 * 32 + sum(part[156:512])) + part[156:] for part in body]
    return b"".join(part + member(f"g{i}.txt", b"x") for i, part in enumerate(fixed))


TRAPS = {
    large_member: "oversized member",
    large_sample: "oversized member",
    many_members: "oversized member",
    claimed: "broken shard",
    claimed_other: "broken shard",
    negative: "broken shard",
    long_header: "broken shard",
    pax_size: "broken shard",
    sparse_map: "broken shard",
    sparse_pax: "broken shard",
    header_chain: "broken shard",
    global_names: "broken shard",
}


@pytest.mark.parametrize("packing", PACKERS)
@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.__name__)
def test_a_trap_is_counted_and_little_is_held(tmp_path, trap, packing):
    kind, path = TRAPS[trap], tmp_path / f"trap.tar{packing}"
    path.write_bytes(PACKERS[packing](sample(0) + trap(random.Random(0)) + sample(1) + END))
    keys, faults, peak = read(path)
    assert faults.kinds[kind] == 1 and set(faults.kinds) <= {kind, "half sample", "skipped member"}, faults.examples
    assert keys == ["s0", "s1"] or kind == "broken shard" and not any(key.startswith("trap") for key in keys), keys
    assert "\n" not in faults.examples[0] and len(faults.examples[0]) < 500
    shards.count_shard(str(path), None)
    of_packing = 16 * 2**20 if packing in (".bz2", ".xz") else 0  # their tables
    assert peak < 10 * BOUND + 2**21 + of_packing


def test_the_message_names_member_size_and_bound(tmp_path):
    path = tmp_path / "0.tar"
    path.write_bytes(sample(0) + large_member(random.Random(0)) + END)
    with pytest.raises(SampleFault, match=r"oversized member: trap.\w+ has \d+ bytes, at most 65536 of a sample"):
        list(read_shard(str(path), None, POLICY))


@pytest.mark.parametrize("packing", [".gz", ".bz2", ".xz"])
def test_a_shard_that_unpacks_without_end_is_broken_and_a_sound_one_is_not(tmp_path, packing):
    """Many members, each below the bound, would fill a shuffle buffer."""
    path = tmp_path / f"0.tar{packing}"
    bomb = b"".join(member(f"b{i}.png", bytes(BOUND // 2)) for i in range(200))
    path.write_bytes(PACKERS[packing](sample(0) + bomb + END))
    keys, faults, _ = read(path)
    assert faults.kinds["broken shard"] == 1 and "unpack to" in faults.examples[0] and keys[0] == "s0"
    assert len(keys) < 100
    path.write_bytes(PACKERS[packing](b"".join(sample(i) for i in range(50)) + END))
    assert len(read(path)[0]) == 50


def test_an_archive_in_an_archive_is_not_unpacked(tmp_path):
    path = tmp_path / "0.tar.gz"
    path.write_bytes(gzip.compress(bz2.compress(bytes(10**7))))
    _, faults, peak = read(path)
    assert faults.kinds == {"broken shard": 1} and peak < 2**22


def test_an_ordinary_sample_just_below_the_bound_is_whole(tmp_path):
    content = os.urandom(BOUND - 3 * 512 - 100)
    write_tar(tmp_path / "0.tar", [("a", {"png": content, "txt": b"x"})])
    (raw,) = read_shard(str(tmp_path / "0.tar"), None, POLICY)
    assert raw["png"] == content


def test_json_is_parsed_up_to_a_bound():
    raw = {"json": b"[" + b"[]," * samples.JSON_BYTES + b"[]]"}
    with pytest.raises(SampleFault, match="bad json: .* at most 4194304 are parsed"):
        samples.json_record(raw)


def test_images_beside_rows_are_bounded_and_devices_are_not_read(tmp_path, monkeypatch):
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


def test_members_of_zips_are_bounded(tmp_path):
    with zipfile.ZipFile(tmp_path / "images.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("images/a.jpg", bytes(BOUND + 1))
        archive.writestr("images/b.jpg", b"b")
    files, damage = ["a.jpg", "b.jpg"], FaultCounter()
    found = tables.find_images(tmp_path, "images", files)
    samples = [base.Sample(name, b"") for name in files]
    assert [sample.image for sample in base.read_images(found.read, samples, damage)] == [b"b"]
    assert damage.kinds == {"missing image": 1} and f"at most {BOUND}" in damage.examples[0]


def test_small_files_of_test_sets_are_bounded_and_deep_json_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(places, "TEXT_BYTES", 2**17)
    (tmp_path / "classnames.txt").write_bytes(b"cat\n" * 2**16)
    with pytest.raises(base.DamagedData, match="classnames.txt has more than 131,072 bytes"):
        places.find_place(tmp_path).lines("classnames.txt")
    (tmp_path / "test").mkdir()
    for text in ("[" * 100_000, '{"pairs": {"a": [1e400]}}', '{"pairs": {"a": [null]}}', "3"):
        (tmp_path / "test" / "relevance.json").write_text(text)
        with pytest.raises(base.DamagedData, match="write it again"):
            wds.read_relevance(places.find_place(tmp_path), "test")


def index_json(**changes):
    entry = {"samples": 3, "bytes": 10, "sha256": ""} | changes.pop("entry", {})
    return {"format": "prolip shard index 1", "shards": {"0.tar": entry}} | changes


@pytest.mark.parametrize(
    "data",
    [
        index_json(shards=[]),
        index_json(shards={"0.tar": 3}),
        index_json(entry={"samples": -1}),
        index_json(entry={"samples": True}),
        index_json(entry={"samples": "3"}),
        index_json(entry={"bytes": 1e400}),
        index_json(entry={"sha256": None}),
    ],
)
def test_an_index_of_values_that_cannot_be_is_damaged(data):
    with pytest.raises(ValueError, match="i.json is damaged .*: write it again") as caught:
        from_json(data, "/data/i.json")
    assert "\n" not in str(caught.value)
    assert from_json(index_json(), "/data/i.json")["/data/0.tar"].samples == 3
