"""Kinds of data, refused settings, and refusals before the first batch."""

from dataclasses import fields
from pathlib import Path

import pytest
import torch
from faulty_servers import closing_port
from tiny_loaders import build, epoch, write_csv
from tiny_tars import letters, plain, png, write_shards

from prolip.data.config import DataConfig, chunks_ahead
from prolip.data.loader import build_loader
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
        (
            tmp_path,
            {"select": "group=cars"},
            ValueError,
            "no sample that matches --select 'group=cars': the first .* g",
        ),
        (f"{tmp_path}/{{0..1}}.tar", {}, FileNotFoundError, "1 of 2 shards are missing"),
        (tmp_path / "0.zip", {}, FileNotFoundError, r"--train-data '.*0.zip' is missing .* Did you mean 1.zip"),
        (tmp_path / "1.zip", {}, ValueError, r"has no suffix of .csv, .tsv, .*, .tar,"),
        (f"{tmp_path}/{{}}.tar", {}, ValueError, "names no shard"),
    ):
        with pytest.raises(kind, match=said):
            build(data, **settings)
    with pytest.raises(ValueError, match="no training data. Give --train-data"):
        build_loader(DataConfig(workers=0), plain, letters)


def test_an_index_that_cannot_be_read_is_refused_patiently_and_beside_other_data_at_once(tmp_path, monkeypatch):
    waits = []
    monkeypatch.setattr("prolip.data.reading.stream.time.sleep", waits.append)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    write_shards(tmp_path, [4])
    remote = f"http://127.0.0.1:{closing_port()}/i.json"
    for place, why in ((f"{tmp_path}/no.json", "No such file"), (remote, "refused")):
        with pytest.raises(OSError, match=rf"'{place}' cannot be read \(.*{why}.*--output {place}, or leave"):
            build(tmp_path, shard_index=place, read_retries=2)
    assert len(waits) == 2
    (tmp_path / "a.csv").write_text("filepath\ttitle\na.png\ta\n")
    for data, kind in ((tmp_path / "a.csv", "csv"), ("coco:a,b", "coco"), (None, "synthetic")):
        settings = {} if data else {"dataset_type": "synthetic", "train_num_samples": 8}
        with pytest.raises(ValueError, match=f"index '/no.json': the data is of the kind {kind}, .* Leave the flag"):
            build_source(DataConfig(train_data=data and str(data), shard_index="/no.json", **settings), 1)


def test_few_remote_or_large_shards_for_many_streams_are_refused_with_the_remedy(tmp_path, monkeypatch):
    remedy = r"2 shards for 4 streams .* at most 2, write more shards, or add --dataset-resampled"
    with pytest.raises(ValueError, match=remedy):
        build("gs://a/{0..1}.tar", workers=4, train_num_samples=100)
    write_shards(tmp_path, [4, 4])
    monkeypatch.setattr("prolip.data.sources.COUNT_LIMIT", 10)
    with pytest.raises(ValueError, match=remedy):
        build(tmp_path, workers=2, world_size=2, train_num_samples=100)


def test_settings_are_checked_when_they_are_made():
    noise, factors = {"noise_ratio": 0.2}, {"train_data": "a::b", "train_data_upsampling_factors": "1"}
    for settings, message in (
        ({"batch_size": 100, "workers": 8}, "divisible by 8 workers: use --batch-size 96 or 104, or --workers 5$"),
        ({"batch_size": 7, "workers": 8}, "use --batch-size 8, or --workers 7$"),
        ({"dataset_type": "tfds"}, "use one of auto, webdataset"),
        ({"batch_size": 0}, "--batch-size 0: give a number of at least 1"),
        ({"workers": -1}, "--workers -1: give a number of at least 0"),
        ({"max_bad_fraction": 2}, "--max-bad-fraction 2: give a number of at least 0 and at most 1"),
        ({"word_drop": 1.0}, "--word-drop 1.0: give a number of at least 0 and below 1, such as 0.1"),
        ({"word_drop": 0.1, "captions": 0}, "--word-drop 0.1: this run reads no captions"),
        ({"word_drop": 0.1, "dataset_type": "synthetic"}, "--word-drop 0.1: this run reads no captions"),
        ({"csv_separator": ", "}, "not a single character"),
        ({"csv_separator": "\n"}, "not a single character that can separate cells"),
        ({"caption_sampling": "name:x"}, "contains the weight 'x'"),
        ({"select": "group"}, "is not a condition"),
        (factors, "add --dataset-resampled"),
        (factors | {"dataset_resampled": True}, "give 2 positive numbers"),
        ({"captions": 2, "known_matches": True}, "captions is 2 with known matches: give 1"),
        ({"unpaired": True, "known_matches": True}, "two samples or more for each worker, and no known matches"),
        ({"unpaired": True, "batch_size": 2, "workers": 2}, "two samples or more for each worker"),
        ({"noise_ratio": 1.5}, "--noise-ratio 1.5: give a number of at least 0 and at most 1"),
        ({"noise_ratio": float("nan")}, "--noise-ratio nan"),
        (noise | {"noise_seed": -1}, "--noise-seed -1: give a number of at least 0"),
        (noise | {"dataset_resampled": True}, "--noise-ratio 0.2: noise reads all captions first"),
        (noise | {"dataset_type": "synthetic"}, "synthetic data has no captions"),
        (noise | {"captions": 0}, "reads no captions"),
        (noise | {"unpaired": True}, "does not pair images with their own"),
    ):
        with pytest.raises(ValueError, match=message):
            DataConfig(**{"batch_size": 4, "workers": 1} | settings)
    assert DataConfig(csv_separator=r"\t").csv_separator == "\t"


def test_small_batches_are_prepared_further_ahead():
    for batch_size, ahead in ((1, 32), (65, 32), (67, 31), (512, 4), (1023, 3), (1024, 2), (9999, 2)):
        assert chunks_ahead(None, batch_size) == ahead
        assert chunks_ahead(1, batch_size) == 1 and chunks_ahead(100, batch_size) == 100


def test_every_setting_has_its_help():
    assert all(field.metadata["help"] for field in fields(DataConfig))
