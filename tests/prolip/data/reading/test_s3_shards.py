"""Shards from a local S3 (moto), on its own and behind a proxy that cuts and stalls."""

import random
import time
from pathlib import Path

import pytest
from faulty_servers import CuttingProxy, closing_port
from tiny_tars import letters, plain, png, write_tar

from prolip.cli.main import main
from prolip.data.faults import RESUMED, FaultCounter, ShardFault
from prolip.data.loader import DataConfig, build_loader
from prolip.data.reading.shard_index import read_index
from prolip.data.reading.shards import count_samples, expand_shards
from prolip.data.reading.stream import ReadPolicy
from prolip.data.reading.tar import ShardReader, read_shard

pytest.importorskip("s3fs", reason="the extra `s3` is not installed")
moto = pytest.importorskip("moto.server", reason="the extra `test` is not installed")

POLICY = ReadPolicy(connect_timeout=5, read_timeout=10, retries=3, backoff=0.01, block=2**18)
HASTY = ReadPolicy(connect_timeout=1, read_timeout=0.5, retries=3, backoff=0.01, block=2**18)
SHARDS, SAMPLES = 3, 12


@pytest.fixture(scope="module")
def store():
    """The port of an S3 with a bucket `shards`."""
    server = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    yield server.get_host_and_port()[1]
    server.stop()


@pytest.fixture
def endpoint(monkeypatch):
    """Point s3fs at a port, with nothing left of an earlier one."""
    s3fs = pytest.importorskip("s3fs")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("AWS_PROFILE", raising=False)

    def point(port):
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        s3fs.S3FileSystem.clear_instance_cache()
        return s3fs.S3FileSystem()

    yield point
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def bucket(store, endpoint, tmp_path):
    """s3://shards/{0..2}.tar, about 300 kB each, and what their bytes are."""
    system = endpoint(store)
    if not system.exists("shards"):
        system.mkdir("shards")
    rng = random.Random(0)
    for shard in range(SHARDS):
        rows = [(f"{shard}_{i:03d}", {"png": rng.randbytes(20_000), "txt": b"x"}) for i in range(SAMPLES)]
        system.pipe_file(f"shards/{shard}.tar", Path(write_tar(tmp_path / f"{shard}.tar", rows)).read_bytes())
    return system


def strip(raw):
    return {name: value for name, value in raw.items() if name != "__url__"}


def truth(tmp_path, shard=0):
    return [strip(raw) for raw in read_shard(str(tmp_path / f"{shard}.tar"))]


def read(url, policy=POLICY):
    """Samples, counted faults, and the seconds it took."""
    faults, samples, start = FaultCounter(), [], time.monotonic()
    try:
        samples += map(strip, read_shard(url, faults.add, policy))
    except ShardFault as fault:
        faults.add(fault)
    return samples, faults, time.monotonic() - start


@pytest.mark.parametrize(("limit", "times"), [(150_000, 1), (40_000, 2), (100, 2)])
def test_connections_that_are_cut_are_taken_up_again(store, bucket, endpoint, tmp_path, limit, times):
    with CuttingProxy(store, limit, times) as proxy:
        endpoint(proxy.port)
        samples, faults, seconds = read("s3://shards/0.tar")
    assert proxy.cuts == times
    assert samples == truth(tmp_path) and faults.kinds[RESUMED] >= 1 and faults.bad_shards == 0
    assert seconds < 15


def test_a_connection_that_stalls_is_left_and_taken_up_again(store, bucket, endpoint, tmp_path):
    with CuttingProxy(store, 150_000, 1, hold=True) as proxy:
        endpoint(proxy.port)
        samples, faults, seconds = read("s3://shards/0.tar", HASTY)
    assert proxy.cuts == 1 and samples == truth(tmp_path) and faults.kinds[RESUMED] >= 1 and faults.bad_shards == 0
    assert seconds < 15


@pytest.mark.parametrize("hold", [False, True])
def test_connections_that_never_hold_end_in_an_interrupted_shard(store, bucket, endpoint, tmp_path, hold):
    with CuttingProxy(store, 30_000, 10**6, hold) as proxy:
        endpoint(proxy.port)
        samples, faults, seconds = read("s3://shards/0.tar", HASTY)
    assert faults.kinds["interrupted shard"] == faults.bad_shards == 1
    assert samples == truth(tmp_path)[: len(samples)] and seconds < 20


def test_what_is_not_there_and_who_is_not_there_are_told_apart(bucket, endpoint):
    for url in ("s3://shards/9.tar", "s3://no-such-bucket/0.tar"):
        assert read(url)[1].kinds == {"unreadable shard": 1}
    endpoint(closing_port())
    samples, faults, seconds = read("s3://shards/0.tar")
    assert faults.kinds == {"interrupted shard": 1, RESUMED: 3} and seconds < 15


def test_an_object_that_is_replaced_while_it_is_read_is_a_changed_shard(bucket, tmp_path):
    samples = read_shard("s3://shards/0.tar", FaultCounter().add, POLICY)
    first = [strip(next(samples)) for _ in range(2)]
    bucket.pipe_file("shards/0.tar", (tmp_path / "1.tar").read_bytes())
    with pytest.raises(ShardFault, match="changed shard: it was .*version"):
        first += map(strip, samples)
    assert first == truth(tmp_path)[: len(first)]


def test_the_index_of_a_bucket_is_written_there_counts_and_is_read_against(bucket, tmp_path):
    pattern = f"s3://shards/{{0..{SHARDS - 1}}}.tar"
    assert main(["data", "index", pattern, "--processes", "2"]) == 0
    index = read_index("s3://shards/index.json")
    urls = [shard.url for shard in expand_shards(pattern)]
    assert count_samples(urls, index=index) == SHARDS * SAMPLES
    assert [shard.url for shard in expand_shards("s3://shards/*.tar")] == urls
    reader = ShardReader(POLICY, index)
    assert [strip(raw) for url in urls for raw in reader(url)] == [s for i in range(SHARDS) for s in truth(tmp_path, i)]
    bucket.pipe_file("shards/0.tar", (tmp_path / "0.tar").read_bytes()[:-1])
    with pytest.raises(ShardFault, match="index mismatch"):
        list(reader("s3://shards/0.tar"))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_reads_a_bucket_from_its_workers(bucket, tmp_path, workers):
    for shard in range(4):
        rows = ((f"{shard}_{i}", {"png": png(i), "txt": b"x"}) for i in range(4))
        bucket.pipe_file(f"shards/small/{shard}.tar", Path(write_tar(tmp_path / "s.tar", rows)).read_bytes())
    data = "s3://shards/small/{0..3}.tar"
    config = DataConfig(train_data=data, train_num_samples=16, batch_size=4, workers=workers)
    loader = build_loader(config, plain, letters)
    keys = [key for batch in loader for key in batch["key"]]
    loader.close()
    assert sorted(keys) == [f"{shard}_{i}" for shard in range(4) for i in range(4)]
