"""Shards damaged at random, seeded.

Without an index the samples are identical, or a fault is counted and every sample is a true one, or the damaged bytes
are still a well-formed archive by an independent parser. A cut, and bytes that are gone or there twice in other than
multiples of 512, are always seen. With an index any damage is counted, and every sample is a true one.
"""

import io
import random
import tarfile
from collections import Counter
from hashlib import sha256

import pytest
from tiny_tars import read_counted
from webdataset.tariterators import base_plus_ext

from prolip.data.faults import UNCHARGED
from prolip.data.reading.stream import Entry

BLOCK = 512


# --- an independent reading of the format
def parse(data):
    """Name and content of the members of a well-formed ustar archive with GNU long names; None for anything else."""
    members, at, long = [], 0, None
    while at + BLOCK <= len(data):
        head = data[at : at + BLOCK]
        if not any(head):
            return None if any(data[at:]) or len(data) % BLOCK else members
        try:
            field = head[148:156].split(b"\0")[0].decode("ascii").strip() or "0"
            size = int(head[124:136].split(b"\0")[0].decode("ascii").strip() or "0", 8)
            stored = int(field, 8)
        except ValueError:
            return None
        if stored != sum(head[:148]) + 8 * 32 + sum(head[156:]):
            return None
        content = data[at + BLOCK : at + BLOCK + size]
        at += BLOCK + -(-size // BLOCK) * BLOCK
        if len(content) < size or at > len(data):
            return None
        if head[156:157] == b"L":
            # GNU's format does not specify what tarfile does: whole blocks up to a zero, and the first of several
            long = data[at - -(-size // BLOCK) * BLOCK : at].split(b"\0")[0] if long is None else long
            continue
        name = long if long is not None else head[:100].split(b"\0")[0]
        members.append((name.decode("utf-8", "surrogateescape"), content))
        long = None
    return None


def group(members):
    """Samples of members: neighbours with one key, in webdataset's sense; the first of equal ones counts."""
    samples = []
    for name, content in members:
        key, suffix = base_plus_ext(name)
        if key is None or name.startswith("__"):
            continue
        if not samples or samples[-1]["__key__"] != key:
            samples.append({"__key__": key})
        samples[-1].setdefault(suffix.lower(), content)
    seen, unique = set(), []
    for sample in samples:
        if sample["__key__"] not in seen:
            unique.append(sample)
        seen.add(sample["__key__"])
    return unique


# --- shards and what is done to them
def make_shard(rng):
    """A shard of a few samples with files of awkward sizes: empty, one byte, whole blocks, long names."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for number in range(rng.randint(2, 9)):
            key = f"{'d' * rng.choice([0, 0, 0, 120])}k{number:03d}"
            for suffix in rng.choice([("png", "txt"), ("png", "txt", "json"), ("txt", "PNG")]):
                size = rng.choice([0, 1, 20, 511, 512, 513, 1024, rng.randint(2, 6000)])
                info = tarfile.TarInfo(f"{key}.{suffix}")
                info.size = size
                archive.addfile(info, io.BytesIO(rng.randbytes(size)))
    return buffer.getvalue()


DAMAGES = ("cut", "flip", "overwrite", "delete", "duplicate", "insert")


def damage(kind, rng, data):
    """Half of the ranges are of whole blocks, and half of those at a block's beginning."""
    at, begin = rng.randrange(len(data)), rng.randrange(len(data))
    length, blocks = rng.randint(1, 3000), rng.randrange(4)
    length = BLOCK * rng.randint(1, 8) if blocks < 2 else length
    begin = begin // BLOCK * BLOCK if blocks == 0 else begin
    end = min(begin + length, len(data))
    filling = rng.choice([bytes(end - begin), b"\xff" * (end - begin), rng.randbytes(end - begin)])
    more = rng.choice([rng.randbytes(rng.randint(1, 2000)), bytes(BLOCK * rng.randint(1, 4))])
    return {
        "cut": data[:at],
        "flip": data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :],
        "overwrite": data[:begin] + filling + data[end:],
        "delete": data[:begin] + data[end:],
        "duplicate": data[:end] + data[begin:],
        "insert": data[:at] + more + data[at:],
    }[kind]


def judge(samples, faults, truth, damaged):
    """Return which of the three promises a reading without an index keeps; AssertionError for none."""
    assert set(faults.kinds) <= {"broken shard", "duplicate member", "duplicate key", *UNCHARGED}
    if samples == truth:
        return "identical"
    if faults.bad_shards and all(sample in truth for sample in samples):
        return "counted"
    members = parse(damaged)
    assert members is not None, "false samples of an archive that is not well-formed"
    assert samples == group(members) and not faults.bad_shards
    return "well-formed"


@pytest.mark.parametrize("kind", DAMAGES)
def test_random_damage_is_seen_or_leaves_a_well_formed_archive(tmp_path, kind):
    verdicts, path = Counter(), tmp_path / "0.tar"
    for seed in range(40):
        rng = random.Random(f"structure {kind} {seed}")
        data = make_shard(rng)
        damaged, truth = damage(kind, rng, data), group(parse(data))
        path.write_bytes(data)
        samples, faults = read_counted(path)
        assert samples == truth and not faults.kinds
        path.write_bytes(damaged)
        verdict = judge(*read_counted(path), truth, damaged)
        shift = (len(data) - len(damaged)) % BLOCK
        assert verdict != "well-formed" or not (kind == "cut" or (kind in ("delete", "duplicate") and shift))
        verdicts[verdict] += 1
    assert verdicts["counted"] > (0 if kind == "flip" else 10) and verdicts["identical"] < 30


def test_with_an_index_whatever_was_damaged_is_counted(tmp_path):
    verdicts, path = Counter(), tmp_path / "0.tar"
    for seed in range(120):
        rng = random.Random(f"content {seed}")
        data = damaged = make_shard(rng)
        truth = group(parse(data))
        for _ in range(rng.randint(1, 3)):
            damaged = damage(rng.choice(DAMAGES), rng, damaged or b"x")
        path.write_bytes(damaged)
        samples, faults = read_counted(path, None, Entry(len(truth), len(data), sha256(data).hexdigest()))
        assert faults.bad_shards == int(samples != truth or damaged != data)
        verdicts[faults.bad_shards] += 1
    assert verdicts[1] > 100
