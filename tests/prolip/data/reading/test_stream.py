"""Local files and commands under the resuming stream, and its retries."""

import os
import random
import time
from dataclasses import replace

import pytest
from tiny_tars import write_shards

from prolip.data.faults import ShardFault
from prolip.data.reading.remote import Pace, Transient, within
from prolip.data.reading.stream import ReadPolicy, ResumingStream, open_stream
from prolip.data.reading.tar import read_shard

POLICY = ReadPolicy(connect_timeout=2, read_timeout=5, retries=3, backoff=0.01, block=4096, pipes=True)
HASTY = replace(POLICY, connect_timeout=0.3, read_timeout=0.3, least_rate=1e6, retries=2)
CONNECT = "prolip.data.reading.stream.connect"
DATA = random.Random(0).randbytes(50_000)


def rest(stream):
    return b"".join(iter(lambda: stream.read(3000), b""))


def whole(url, policy=POLICY):
    stream = open_stream(str(url), policy)
    try:
        return rest(stream)
    finally:
        stream.close()


def fault_of(url, policy=POLICY):
    with pytest.raises(ShardFault) as error:
        whole(url, policy)
    return error.value


@pytest.fixture
def waits(monkeypatch):
    """The pauses between retries, which take no time."""
    found = []
    monkeypatch.setattr(time, "sleep", found.append)
    return found


@pytest.fixture
def path(tmp_path):
    (tmp_path / "0").write_bytes(DATA)
    return tmp_path / "0"


# --- local files
def test_what_is_not_there_or_has_no_library_is_unreadable_at_once(tmp_path, waits):
    for url in (tmp_path / "no.tar", tmp_path, "gs://no/0.tar", "nosuch://no/0.tar"):
        assert fault_of(url).kind == "unreadable shard"
    assert waits == []


def test_errors_of_a_local_disk_are_tried_again_and_a_file_that_is_cut_meanwhile_is_a_changed_shard(path, monkeypatch):
    stream = open_stream(str(path), POLICY)
    first = stream.read(10_000)
    failing = stream._connection.file
    monkeypatch.setattr(stream._connection, "read", lambda _: failing.seek(-1))  # OSError, as a stale handle gives
    assert first + rest(stream) == DATA
    path.write_bytes(DATA * 60)  # more than is buffered
    stream = open_stream(str(path), POLICY)
    stream.read(1000)
    os.truncate(path, 2000)
    with pytest.raises(ShardFault, match="changed shard"):
        rest(stream)


# --- commands
def test_a_failure_anywhere_in_a_pipeline_is_seen(path):
    assert whole(f"pipe:cat {path} | cat") == DATA
    for command in (f"(cat {path}; exit 7) | cat", f"cat {path}; echo no >&2; exit 7"):
        fault = fault_of(f"pipe:{command}")
        assert fault.kind == "broken shard" and "exit 7" in fault.message
    assert fault.message.endswith("exit 7: no")


def alive(mark):
    """Return whether the process whose number is in a file runs; a zombie does not."""
    try:
        with open(f"/proc/{int(mark.read_text())}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_command_that_stalls_trickles_or_is_left_is_killed_with_all_its_children(tmp_path):
    start, mark = time.monotonic(), tmp_path / "pid"
    stalled = f"echo x; (echo $BASHPID > {mark}; exec sleep 60) | cat"
    for command in (stalled, "while true; do echo x; sleep 0.05; done", "echo x; exec >&-; sleep 60"):
        fault = fault_of(f"pipe:{command}", HASTY)
        assert fault.kind == "interrupted shard" and "stalled" in fault.message
    assert time.monotonic() - start < 50  # the commands themselves take a minute, and for ever
    assert not alive(mark)
    stream = open_stream(f"pipe:echo $$ > {mark}; yes", POLICY)
    assert stream.read(4) == b"y\ny\n"
    stream.close()
    assert not alive(mark)


# --- retries
class Flaky:
    """A connection that breaks after every `left` bytes."""

    identity = type("", (), {"size": None, "differs": lambda *_: False})()

    def __init__(self, position, left):
        self.position, self.left, self.close = position, left, lambda: None

    def read(self, limit):
        if not self.left:
            raise ConnectionResetError("again")
        count = min(limit, self.left)
        self.left -= count
        return bytes(count)


def test_retries_are_counted_afresh_after_progress_and_bounded_without(monkeypatch):
    steps = [2**21]
    monkeypatch.setattr(CONNECT, lambda url, position, policy: Flaky(position, steps[0]))
    stream = ResumingStream("x", ReadPolicy(retries=2, backoff=0))
    for _ in range(20 * 2**21 // 2**16):
        stream.read(2**16)
    steps[0] = 8192
    with pytest.raises(ShardFault, match="after 2 retries"):
        for _ in range(1000):
            stream.read(2**16)


def test_waiting_doubles_up_to_its_limit_and_leaves_the_global_generator_alone(monkeypatch, waits):
    random.seed(5)
    before = random.getstate()
    monkeypatch.setattr(CONNECT, lambda *_: (_ for _ in ()).throw(ConnectionResetError("no")))
    with pytest.raises(ShardFault, match="interrupted shard: ConnectionResetError: no, at byte 0, after 7 retries"):
        ResumingStream("x", ReadPolicy(backoff_limit=20))
    assert random.getstate() == before
    for wait, most in zip(waits, (1, 2, 4, 8, 16, 20, 20), strict=True):
        assert most / 2 <= wait <= most


def test_whatever_hangs_is_left_behind_and_a_slow_source_is_stalled_only_below_the_least_rate():
    start = time.monotonic()
    with pytest.raises(Transient, match="stalled: dreaming took more than 0.1 s"):
        within(0.1, lambda: time.sleep(60), "dreaming")
    assert time.monotonic() - start < 50
    with pytest.raises(KeyError):
        within(1, lambda: {}["x"], "looking")
    pace = Pace(ReadPolicy(read_timeout=10, least_rate=100))
    for _ in range(30):
        pace.add(time.monotonic() - 1, 110)
    with pytest.raises(Transient, match="stalled"):
        for _ in range(20):
            pace.add(time.monotonic() - 1, 50)


@pytest.mark.parametrize("wrong", [{"read_timeout": 0}, {"retries": -1}, {"block": 0}, {"backoff": float("nan")}])
def test_settings_that_make_no_sense_are_refused(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=f"{name} is .*: give"):
        ReadPolicy(**wrong)


def test_a_reader_that_is_left_early_lets_go_of_its_file(tmp_path):
    (url,) = write_shards(tmp_path, [5])
    before = set(os.listdir("/proc/self/fd"))
    samples = read_shard(url)
    next(samples)
    samples.close()
    assert set(os.listdir("/proc/self/fd")) <= before
