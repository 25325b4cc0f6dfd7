"""Which kind of data it is, and what is refused before the first batch."""

from pathlib import Path

import pytest
import torch
from faulty_servers import closing_port
from tiny_loaders import build, epoch, write_csv
from tiny_tars import letters, plain, png, write_shards

from prolip.data.loader import DataConfig, build_loader
from prolip.data.sources import build_source


def test_csv_files_and_image_folders_are_trained_on(tmp_path):
    loader = build(write_csv(tmp_path, 8), csv_img_key="filepath", csv_caption_key="title", workers=2, transform=plain)
    batches = epoch(loader)
    for batch in batches:
        for key, text in zip(batch["key"], batch["text"]):
            assert torch.equal(text, letters([f"caption {Path(key).stem}"])[0])
    assert sorted(Path(key).stem for batch in batches for key in batch["key"]) == sorted(map(str, range(8)))
    (tmp_path / "root" / "red_fox").mkdir(parents=True)
    for i in range(4):
        (tmp_path / "root" / "red_fox" / f"{i}.png").write_bytes(png(i))
    (batch,) = epoch(build(tmp_path / "root", caption_sampling="class"))
    assert torch.equal(batch["text"], letters(["red fox"] * 4))


def test_missing_or_too_little_data_is_refused_before_training(tmp_path):
    write_shards(tmp_path, [10])
    (tmp_path / "1.zip").touch()
    for data, settings, kind, said in (
        (tmp_path, {"batch_size": 8, "world_size": 2}, ValueError, r"10 samples .* of 16 \(8 x 2 ranks\): .* 5 or"),
        (tmp_path, {"select": "group=cars"}, ValueError, "no sample that fits --select 'group=cars': the first .* g"),
        (f"{tmp_path}/{{0..1}}.tar", {}, FileNotFoundError, "1 of 2 shards are missing"),
        (tmp_path / "0.zip", {}, FileNotFoundError, r"--train-data '.*0.zip' is missing .* Did you mean 1.zip"),
        (tmp_path / "1.zip", {}, ValueError, r"ends in none of .csv, .tsv, .*, .tar,"),
        (f"{tmp_path}/{{}}.tar", {}, ValueError, "names no shard"),
    ):
        with pytest.raises(kind, match=said):
            build(data, **settings)
    with pytest.raises(ValueError, match="no data to train on: give --train-data"):
        build_loader(DataConfig(workers=0), plain, letters)


def test_an_index_that_cannot_be_read_is_refused_as_patiently_as_shards_are_read(tmp_path, monkeypatch):
    waits = []
    monkeypatch.setattr("prolip.data.reading.stream.time.sleep", waits.append)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    write_shards(tmp_path, [4])
    remote = f"http://127.0.0.1:{closing_port()}/i.json"
    for place, why in ((f"{tmp_path}/no.json", "No such file"), (remote, "refused")):
        with pytest.raises(OSError, match=rf"'{place}' cannot be read \(.*{why}.*--output {place}, or leave it out"):
            build(tmp_path, shard_index=place, read_retries=2)
    assert len(waits) == 2


def test_an_index_of_shards_beside_other_data_is_refused(tmp_path):
    (tmp_path / "a.csv").write_text("filepath\ttitle\na.png\ta\n")
    for data, kind in ((tmp_path / "a.csv", "csv"), ("coco:a,b", "coco"), (None, "synthetic")):
        settings = {} if data else {"dataset_type": "synthetic", "train_num_samples": 8}
        with pytest.raises(ValueError, match=f"index '/no.json': the data is of the kind {kind}, .* leave it out"):
            build_source(DataConfig(train_data=data and str(data), shard_index="/no.json", **settings), 1)


def test_few_remote_or_large_shards_for_many_streams_are_refused_with_the_remedy(tmp_path, monkeypatch):
    remedy = r"2 shards for 4 streams .* at most 2, write more shards, or add --dataset-resampled"
    with pytest.raises(ValueError, match=remedy):
        build("gs://a/{0..1}.tar", workers=4, train_num_samples=100)
    write_shards(tmp_path, [4, 4])
    monkeypatch.setattr("prolip.data.sources.COUNT_LIMIT", 10)
    with pytest.raises(ValueError, match=remedy):
        build(tmp_path, workers=2, world_size=2, train_num_samples=100)
