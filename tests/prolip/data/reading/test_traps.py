"""Archives from strangers that would fill the memory: a sample or a shard is lost and counted, what is read is bounded.

The bounds are lowered here, so that a few megabytes show what gigabytes would; under `slow` they are the real ones.
"""

import bz2
import gzip
import io
import lzma
import os
import random
import subprocess
import sys
import tarfile
import tracemalloc
import zipfile
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from tiny_tars import members, png, write_tar

from prolip.corpora.emoji import corpus as emoji
from prolip.data import samples
from prolip.data.faults import FaultCounter, SampleFault, ShardFault
from prolip.data.reading import shards, tar
from prolip.data.reading.folders import ImageRow, ImageRows, rows_of
from prolip.data.reading.shard_index import from_json
from prolip.data.reading.stream import ReadPolicy
from prolip.data.reading.tar import read_shard
from prolip.evaluation.datasets import base
from prolip.evaluation.datasets import csv_zip as tables
from prolip.evaluation.datasets import sources as places
from prolip.evaluation.datasets import webdataset as wds

BOUND = 2**16
POLICY = ReadPolicy(retries=0)
PACKERS = {"": lambda data: data, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


@pytest.fixture(autouse=True)
def low_bounds(monkeypatch, request):
    if "slow" in request.keywords and "generated" not in request.node.name:
        return
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


def spring(folder, seed):
    """One generated trap: its fault is counted, sound samples come out, and little is held."""
    rng = random.Random(f"trap {seed}")
    trap, kind = list(TRAPS.items())[seed % len(TRAPS)]
    packing = rng.choice(list(PACKERS))
    data = sample(0) + trap(rng) + sample(1) + END
    path = folder / f"trap.tar{packing}"
    path.write_bytes(PACKERS[packing](data))
    keys, faults, peak = read(path)
    others = {kind, "half sample", "skipped member"}
    assert faults.kinds[kind] == 1 and set(faults.kinds) <= others, (trap.__name__, faults.kinds, faults.examples)
    assert "s0" in keys or kind == "broken shard", keys  # a shard that breaks may take its sample in the making along
    assert not any(key.startswith("trap") for key in keys)
    assert kind == "broken shard" or keys == ["s0", "s1"], (trap.__name__, keys)
    assert "\n" not in faults.examples[0] and len(faults.examples[0]) < 500
    shards.count_shard(str(path), None)
    of_packing = 16 * 2**20 if packing in (".bz2", ".xz") else 0  # their tables
    assert peak < 10 * BOUND + 2**21 + of_packing, (trap.__name__, packing, peak)
    return kind


def test_forty_eight_generated_traps_are_counted_and_little_is_held(tmp_path):
    verdicts = Counter(spring(tmp_path, seed) for seed in range(48))
    assert verdicts == {"oversized member": 12, "broken shard": 36}


@pytest.mark.slow
def test_three_hundred_and_sixty_generated_traps(tmp_path):
    assert Counter(spring(tmp_path, seed) for seed in range(1000, 1360)).total() == 360


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
    assert [sample.image for sample in found.samples(files, samples, damage)] == [b"b"]
    assert damage.kinds == {"missing image": 1} and f"at most {BOUND}" in damage.examples[0]


def npy(shape):
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": "<f8", "fortran_order": False, "shape": shape})
    return buffer.getvalue()


def test_arrays_that_lie_are_bad_and_pickles_and_archives_of_arrays_are_not_opened(tmp_path):
    pickled, archive = io.BytesIO(), io.BytesIO()
    np.save(pickled, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    np.savez_compressed(archive, a=np.zeros(3))
    for data in (npy((2**40,)), npy((2**62,)), npy((-1,)), pickled.getvalue(), archive.getvalue(), b"", b"\x93NUMPY"):
        with pytest.raises(SampleFault, match="bad array"):
            wds.array_of({"npy": data})


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


def test_the_corpus_is_read_by_the_same_reader(tmp_path):
    record = b'{"hexcode": "1F600", "name": 3, "subgroup": "a", "group": "b", "style": "c"}'
    for content, message in ((b"[" * 50_000, "bad json"), (record, "holds no texts"), (b"[]", "wanted an object")):
        url = write_tar(tmp_path / "0.tar", [("a", {"png": png(), "json": content})])
        with pytest.raises(ValueError, match=message):
            emoji.read(url)
    (tmp_path / "0.tar").write_bytes(large_member(random.Random(1)) + END)
    with pytest.raises(ValueError, match="0.tar: oversized member"):
        emoji.read(str(tmp_path / "0.tar"))


@pytest.mark.slow
def test_a_few_megabytes_of_gzip_that_hold_two_gigabytes_take_no_half_gigabyte(tmp_path):
    size = 2_100_000_000
    packer, zeros = zlib.compressobj(9, wbits=31), bytes(2**24)
    with open(tmp_path / "0.tar.gz", "wb") as file:
        file.write(packer.compress(sample(0) + header("trap.png", size)))
        for _ in range(size // len(zeros)):
            file.write(packer.compress(zeros))
        file.write(packer.compress(bytes(size % len(zeros) + -size % 512) + sample(1) + END) + packer.flush())
    code = (
        "import resource, sys; from prolip.data.reading.tar import read_shard; from prolip.data.faults import *\n"
        "faults = FaultCounter(); before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try:\n    keys = [raw['__key__'] for raw in read_shard(sys.argv[1], faults.add)]\n"
        "except ShardFault as fault:\n    faults.add(fault)\n"
        "grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before\n"
        "assert faults.bad_samples + faults.bad_shards >= 1 and grown < 500_000, (faults, grown)"
    )
    source = str(Path(tar.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "0.tar.gz")],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": source},
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
