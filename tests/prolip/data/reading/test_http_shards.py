"""However a web server misbehaves, it ends as identical samples or as a named, counted fault, in bounded time."""

import random
import tarfile
from collections import Counter

import pytest
from faulty_servers import FaultyServer
from tiny_tars import read_counted, write_tar

from prolip.data.faults import HALF, RESUMED
from prolip.data.reading.shard_index import index_shard
from prolip.data.reading.stream import ReadPolicy

SAMPLES = 24
#: Short for what stalls on purpose, long for what only waits for a busy machine.
HASTY = ReadPolicy(connect_timeout=0.4, read_timeout=0.2, least_rate=2000, retries=1, backoff=0.01)
PATIENT = ReadPolicy(connect_timeout=5, read_timeout=10, retries=3, backoff=0.01)


@pytest.fixture(scope="module")
def shard(tmp_path_factory):
    """A shard whose files fill several blocks."""
    rng = random.Random(0)
    rows = [(f"s{i:03d}", {"png": rng.randbytes(1500), "txt": f"caption {i}".encode()}) for i in range(SAMPLES)]
    return write_tar(tmp_path_factory.mktemp("shard") / "0.tar", rows)


@pytest.fixture(scope="module")
def truth(shard):
    return read_counted(shard)[0]


@pytest.fixture(scope="module")
def server(shard):
    with tarfile.open(shard) as archive, open(shard, "rb") as file:
        headers = [member.offset for member in archive]
        with FaultyServer({"0.tar": file.read()}, sample=(headers[SAMPLES], headers[SAMPLES + 2])) as server:
            yield server


@pytest.fixture(autouse=True)
def direct(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def fresh(server, mode):
    """The shard under a name whose requests were not counted yet."""
    name = f"{len(server.objects)}.tar"
    server.objects[name] = server.objects["0.tar"]
    return server.url(mode, name)


PASSING = {"ok": 0, "no-range": 0, "no-length-whole": 0, "redirect": 0, "cut-once": 1, "cut-thrice": 3, "edge-once": 1}
PASSING |= {"cut-once-no-range": 1, "cut-once-no-etag": 1, "reset-once": 1, "chunked-once": 1, "busy-twice": 2}
PASSING |= {"html-once": 1, "pieces": 3, "stall-once": 1, "cut-early": 1, "earlier-range": 1}


@pytest.mark.parametrize(("mode", "resumed"), PASSING.items())
def test_what_passes_ends_as_identical_samples_with_every_retry_counted(server, truth, mode, resumed):
    samples, faults = read_counted(server.url(mode, "0.tar"), HASTY if mode == "stall-once" else PATIENT)
    assert samples == truth
    assert faults.kinds == (Counter({RESUMED: resumed}) if resumed else Counter())
    assert faults.bad_samples == faults.bad_shards == 0


@pytest.mark.parametrize(("limit", "wait"), [(60.0, 1.0), (0.1, 0.1)])
def test_a_server_is_given_the_time_it_asks_for_within_bounds(server, truth, monkeypatch, limit, wait):
    waits = []
    monkeypatch.setattr("prolip.data.reading.stream.time.sleep", waits.append)
    policy = ReadPolicy(connect_timeout=5, read_timeout=10, retries=3, backoff=0.01, backoff_limit=limit)
    assert read_counted(fresh(server, "limited-once"), policy)[0] == truth
    assert waits == [wait]


def test_a_retry_asks_for_the_rest_only(server):
    server.ranges.clear()
    read_counted(fresh(server, "cut-once"), PATIENT)
    half = len(server.objects["0.tar"]) // 2 + 77
    assert server.ranges == [None, f"bytes={half - 4096}-"]  # with the overlap that is compared


@pytest.mark.parametrize(
    ("mode", "kind", "message"),
    [
        ("cut-always", "interrupted shard", "after 3 retries"),
        ("busy", "interrupted shard", "HTTP 503"),
        ("endless-redirect", "interrupted shard", "TooManyRedirects"),
        ("missing", "unreadable shard", "HTTP 404"),
        ("missing-later", "unreadable shard", "HTTP 404"),
        ("html", "unreadable shard", "HTML page"),
        ("html-as-tar", "broken shard", "ReadError"),
        ("no-length-half", "broken shard", "ReadError"),
        ("no-length-edge", "broken shard", "no header where one is expected"),
        ("changed-etag", "changed shard", "version"),
        ("changed-size", "changed shard", "size"),
        ("shrunk", "changed shard", "HTTP 416: the object no longer has byte"),
        ("changed-silently", "changed shard", "bytes before"),
        ("false-range", "changed shard", "bytes before"),
        ("later-range", "interrupted shard", "Content-Range"),
        ("twice", "broken shard", "data after the end"),
        ("overlapping", "broken shard", "no header where one is expected"),
        ("short-length", "broken shard", "ReadError"),
        ("long-length", "interrupted shard", "1000 more expected"),
    ],
)
def test_what_does_not_pass_is_named_and_counted_and_hands_out_true_samples_only(server, truth, mode, kind, message):
    samples, faults = read_counted(server.url(mode, "0.tar"), PATIENT)
    assert faults.kinds[kind] == faults.bad_shards == 1
    assert set(faults.kinds) <= {kind, "half sample", RESUMED}
    assert message in faults.examples[-1]
    assert samples == truth[: len(samples)]
    assert mode != "missing" or server.seen[f"/{mode}/0.tar"] == 1  # what is denied is asked once


@pytest.mark.parametrize("mode", ["stall-always", "trickle", "silent", "slow-head"])
def test_no_server_can_hold_a_reader(server, truth, mode):
    samples, faults = read_counted(server.url(mode, "0.tar"), HASTY)
    assert faults.kinds["interrupted shard"] == 1 and samples == truth[: len(samples)]
    assert "stalled" in faults.examples[-1] or "timed out" in faults.examples[-1].lower()


def test_a_sample_that_comes_twice_is_handed_out_once_and_counted(server, truth):
    samples, faults = read_counted(server.url("sample-twice", "0.tar"), PATIENT)
    assert samples == truth and sum(faults.kinds.values()) == faults.bad_samples > 0
    assert set(faults.kinds) <= {"duplicate key", "duplicate member"}


def test_an_index_shows_a_flipped_bit_and_other_lengths(server, truth):
    entry = index_shard(server.url("ok", "0.tar"), PATIENT).entry
    samples, faults = read_counted(fresh(server, "flip-once"), PATIENT, entry)
    assert len(samples) == SAMPLES - 1 and faults.kinds == {"index mismatch": 1, HALF: 1}
    assert "the SHA-256 of its" in faults.examples[-1]
    samples, faults = read_counted(fresh(server, "flip-once"), PATIENT)
    assert samples != truth and len(samples) == SAMPLES and not faults.kinds  # which nothing else does
    samples, faults = read_counted(fresh(server, "ok"), PATIENT, entry)
    assert samples == truth and not faults.kinds
    for mode in ("short-length", "twice", "no-length-edge", "no-length-half"):
        _, faults = read_counted(server.url(mode, "0.tar"), PATIENT, entry)
        assert faults.bad_shards == faults.kinds["index mismatch"] == 1
        assert f"the index says {entry.bytes} bytes: if the shards" in faults.examples[0]
