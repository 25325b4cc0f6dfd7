"""Shards from a local S3 (moto), directly and through a proxy that cuts and stalls."""

import random
from pathlib import Path

import pytest
from faulty_servers import CuttingProxy, closing_port
from tiny_tars import letters, plain, png, read_counted, without_url, write_tar

from prolip.cli.main import main
from prolip.data.faults import RESUMED, FaultCounter, ShardFault
from prolip.data.loader import DataConfig, build_loader
from prolip.data.reading.shard_index import read_index
from prolip.data.reading.shards import expand_shards
from prolip.data.reading.stream import ReadPolicy
from prolip.data.reading.tar import ShardReader, read_shard

s3fs = pytest.importorskip("s3fs", reason="the extra `s3` is not installed")
moto = pytest.importorskip("moto.server", reason="the extra `test` is not installed")

POLICY = ReadPolicy(connect_timeout=5, read_timeout=10, retries=3, backoff=0.01, block=2**18)
HASTY = ReadPolicy(connect_timeout=1, read_timeout=0.4, retries=1, backoff=0.01, block=2**18)
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
    settings = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
    for name, value in {**settings, "AWS_EC2_METADATA_DISABLED": "true", "NO_PROXY": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_PROFILE", raising=False)

    def point(port):
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        s3fs.S3FileSystem.clear_instance_cache()
        return s3fs.S3FileSystem()

    yield point
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The shards of the bucket, about 300 kB each, as local files."""
    rng, folder = random.Random(0), tmp_path_factory.mktemp("s3")
    for shard in range(SHARDS):
        rows = [(f"{shard}_{i:03d}", {"png": rng.randbytes(20_000), "txt": b"x"}) for i in range(SAMPLES)]
        write_tar(folder / f"{shard}.tar", rows)
    return folder


@pytest.fixture
def bucket(store, endpoint, files):
    """s3://shards/{0..2}.tar."""
    system = endpoint(store)
    if not system.exists("shards"):
        system.mkdir("shards")
    for shard in range(SHARDS):
        system.pipe_file(f"shards/{shard}.tar", (files / f"{shard}.tar").read_bytes())
    return system


def truth(files, shard=0):
    return read_counted(files / f"{shard}.tar")[0]


@pytest.mark.parametrize("limit, times, hold", [(150_000, 1, 0), (40_000, 2, 0), (100, 2, 0), (150_000, 1, 1)])
def test_connections_that_are_cut_or_stall_are_taken_up_again(store, bucket, endpoint, files, limit, times, hold):
    with CuttingProxy(store, limit, times, hold) as proxy:
        endpoint(proxy.port)
        samples, faults = read_counted("s3://shards/0.tar", HASTY if hold else POLICY)
    assert proxy.cuts == times
    assert samples == truth(files) and faults.kinds[RESUMED] >= 1 and faults.bad_shards == 0


@pytest.mark.parametrize("hold", [False, True])
def test_connections_that_never_hold_end_in_an_interrupted_shard(store, bucket, endpoint, files, hold):
    with CuttingProxy(store, 30_000, 10**6, hold) as proxy:
        endpoint(proxy.port)
        samples, faults = read_counted("s3://shards/0.tar", HASTY)
    assert faults.kinds["interrupted shard"] == faults.bad_shards == 1
    assert samples == truth(files)[: len(samples)]


def test_what_is_not_there_and_who_is_not_there_are_told_apart(bucket, endpoint):
    for url in ("s3://shards/9.tar", "s3://no-such-bucket/0.tar"):
        assert read_counted(url, POLICY)[1].kinds == {"unreadable shard": 1}
    endpoint(closing_port())
    assert read_counted("s3://shards/0.tar", POLICY)[1].kinds == {"interrupted shard": 1, RESUMED: 3}


def test_an_object_that_is_replaced_while_it_is_read_is_a_changed_shard(bucket, files):
    samples = read_shard("s3://shards/0.tar", FaultCounter().add, POLICY)
    first = [without_url(next(samples)) for _ in range(2)]
    bucket.pipe_file("shards/0.tar", (files / "1.tar").read_bytes())
    with pytest.raises(ShardFault, match="changed shard: it was .*version"):
        first += map(without_url, samples)
    assert first == truth(files)[: len(first)]


def test_the_index_of_a_bucket_is_written_there_and_is_read_against(bucket, files):
    pattern = f"s3://shards/{{0..{SHARDS - 1}}}.tar"
    assert main(["data", "index", pattern, "--processes", "2"]) == 0
    index = read_index("s3://shards/index.json")
    urls = [shard.url for shard in expand_shards(pattern)]
    assert index.only(urls, {})[1] == SHARDS * SAMPLES
    assert [shard.url for shard in expand_shards("s3://shards/*.tar")] == urls
    reader = ShardReader(POLICY, index)
    found = [without_url(raw) for url in urls for raw in reader(url)]
    assert found == [sample for i in range(SHARDS) for sample in truth(files, i)]
    bucket.pipe_file("shards/0.tar", (files / "0.tar").read_bytes()[:-1])
    with pytest.raises(ShardFault, match="index mismatch"):
        list(reader("s3://shards/0.tar"))


def test_a_loader_reads_a_bucket_from_its_workers(bucket, tmp_path):
    for shard in range(4):
        rows = ((f"{shard}_{i}", {"png": png(i), "txt": b"x"}) for i in range(4))
        bucket.pipe_file(f"shards/small/{shard}.tar", Path(write_tar(tmp_path / "s.tar", rows)).read_bytes())
    config = DataConfig(train_data="s3://shards/small/{0..3}.tar", train_num_samples=16, batch_size=4, workers=2)
    loader = build_loader(config, plain, letters)
    keys = [key for batch in loader for key in batch["key"]]
    loader.close()
    assert sorted(keys) == [f"{shard}_{i}" for shard in range(4) for i in range(4)]
