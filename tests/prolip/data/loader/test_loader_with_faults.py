"""Whatever happens to shards, all ranks step equally often; where nothing can be read, an error says so at once."""

import time
from collections import Counter
from pathlib import Path

import pytest
from faulty_servers import FaultyServer
from tiny_loaders import epoch
from tiny_tars import letters, plain, write_shards

from prolip.data.faults import TooManyBadSamples
from prolip.data.loader import DataConfig, build_loader


@pytest.fixture
def impatient(monkeypatch):
    """No waiting between retries, no proxy."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr("prolip.data.reading.stream.time.sleep", lambda _: None)


def loaders(data, ranks=2, workers=0, **settings):
    config = DataConfig(train_data=data, batch_size=4, workers=workers, **settings)
    return [build_loader(config, plain, letters, rank=rank, world_size=ranks) for rank in range(ranks)]


def run(loader, epochs=1):
    """Keys of every batch of every epoch."""
    return [batch["key"] for number in range(epochs) for batch in epoch(loader, number)]


def total(loaders):
    return sum((Counter(loader.faults()) for loader in loaders), Counter())


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("resampled", [False, True])
def test_sources_of_every_kind_of_fault_together(tmp_path, resampled):
    objects = {Path(url).name: Path(url).read_bytes() for url in write_shards(tmp_path, [6] * 8)}
    with FaultyServer(objects) as server:
        modes = ["ok", "cut-once", "missing", "busy", "html", "no-length-half", "changed-etag", "no-range"]
        sources = [server.url(mode, f"{number}.tar") for number, mode in enumerate(modes)]
        sources += [f"{tmp_path}/0.tar", "pipe:exit 3", f"pipe:cat {tmp_path}/2.tar"]
        settings = {"dataset_resampled": resampled, "train_num_samples": 64, "shuffle_buffer": 8}
        both = loaders("::".join(sources), max_bad_fraction=1.0, **settings)
        assert [len(run(loader, epochs=3)) for loader in both] == [24, 24]
    kinds = total(both)
    for kind in ("unreadable shard", "interrupted shard", "broken shard", "resumed read"):
        assert kinds[kind] >= 1
    assert kinds["changed shard"] <= 3  # its first request only is cut so that it shows


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("kind, workers", [("empty", 2), ("missing", 0), ("busy", 0), ("command", 0)])
def test_nothing_but_broken_shards_ends_with_an_error_that_names_them(tmp_path, kind, workers):
    objects = {Path(url).name: Path(url).read_bytes() for url in write_shards(tmp_path, [8] * 4)}
    start = time.monotonic()
    with FaultyServer(objects) as server:
        data = {
            "empty": str(tmp_path),
            "missing": server.url("missing", "{0..3}.tar"),
            "busy": server.url("busy", "{0..3}.tar"),
            "command": "pipe:exit {3..6}",
        }[kind]
        for url in tmp_path.glob("*.tar"):
            url.write_bytes(b"")
        name = {"missing": "unreadable shard", "busy": "interrupted shard"}.get(kind, "broken shard")
        if kind == "empty":  # local files are looked at before the first batch, where not any loss is tolerated
            with pytest.raises(ValueError, match="--train-data: none of the first .*broken shard: .*an empty file"):
                loaders(data, workers=workers, train_num_samples=32)
        for loader in loaders(data, workers=workers, train_num_samples=32, max_bad_fraction=1.0):
            with pytest.raises(TooManyBadSamples, match=f"(found|gave) no sample(.|\n)*{name}"):
                run(loader)
    assert time.monotonic() - start < 120  # it would never end; a busy machine needs its time to start the workers


def test_too_many_broken_shards_end_the_epoch_on_every_rank(tmp_path):
    urls = write_shards(tmp_path, [8] * 8)
    for url in urls[:4]:
        Path(url).write_bytes(Path(url).read_bytes()[:-9000])
    for loader in loaders(str(tmp_path), train_num_samples=64):
        with pytest.raises(TooManyBadSamples, match=r"of \d+ shards \(\d\d.\d%\) are unusable; the limit is 1.0%"):
            run(loader)
