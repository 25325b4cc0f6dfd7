"""Samples that cannot be used: counted, replaced, fatal when there are too many."""

import io
import tarfile
from pathlib import Path

import pytest
from tiny_loaders import build, epoch, with_bad_images, write_csv
from tiny_tars import png, write_shards, write_tar

from prolip.data import faults
from prolip.data.captions import caption_id
from prolip.data.faults import FaultCounter, TooManyBadSamples
from prolip.data.reading.csv import TableError


@pytest.mark.parametrize("workers", [0, 2])
def test_corrupt_images_are_counted_and_replaced_by_other_samples(tmp_path, workers):
    loader = build(with_bad_images(tmp_path, 20, 4), workers=workers, max_bad_fraction=0.9, train_num_samples=40)
    batches = epoch(loader)
    assert len(batches) == 10 and all(key[0] == "g" for batch in batches for key in batch["key"])
    found = loader.faults()
    assert found["samples"] == 40 + found["bad image"] and 4 <= found["bad image"] <= 12
    before = found["bad image"]
    epoch(loader, 1)
    assert loader.faults()["bad image"] > before


def test_too_many_corrupt_images_end_the_epoch_with_kind_key_and_shard(tmp_path, monkeypatch):
    with pytest.raises(TooManyBadSamples) as error:
        epoch(build(with_bad_images(tmp_path, 20, 4)))
    for part in ("bad image", "'b", "bad.tar", "cannot identify image", "the limit is 1.0%", "--max-bad-fraction"):
        assert part in str(error.value)
    monkeypatch.setattr(faults, "LOST_SAMPLES", 1100)
    for limit, said in (
        (0.01, "1000 of 1000 samples"),
        (1.0, "1100 samples were lost since the last one that could be"),
    ):
        with pytest.raises(TooManyBadSamples, match=said):  # instead of turning for ever
            epoch(build(with_bad_images(tmp_path, 0, 30), workers=2, max_bad_fraction=limit))


def test_a_truncated_shard_is_reported_and_fatal_at_the_end_of_the_epoch(tmp_path):
    urls = write_shards(tmp_path, [8, 8])
    Path(urls[0]).write_bytes(Path(urls[0]).read_bytes()[:-9000])
    tolerant = build(tmp_path, max_bad_fraction=1.0)
    epoch(tolerant)
    assert tolerant.faults()["broken shard"] >= 1
    with pytest.raises(TooManyBadSamples, match=r"of \d shards"):
        epoch(build(tmp_path))


def test_csv_images_that_are_gone_are_faults(tmp_path):
    data = write_csv(tmp_path, 12)
    (tmp_path / "3.png").unlink()
    loader = build(data, max_bad_fraction=0.5)
    assert "3.png" not in {Path(key).name for batch in epoch(loader) for key in batch["key"]}
    assert loader.faults()["missing image"] >= 1


def test_a_csv_without_a_single_image_stops_instead_of_turning_for_ever(tmp_path):
    data = write_csv(tmp_path, 12)
    for image in tmp_path.glob("*.png"):
        image.unlink()
    with pytest.raises(TableError, match="12 of 12 rows name no image that is there: rows 2, 3, 4 and 9 more"):
        build(data)
    for workers in (0, 2):
        reason = rf"none of {12 // max(workers, 1)} rows can be (.|\n)*missing image: .*\.png: No such file"
        with pytest.raises(TooManyBadSamples, match=reason):
            epoch(build(data, workers=workers, max_bad_fraction=1.0))


def test_a_selection_whose_json_is_nowhere_stops_within_its_first_pass(tmp_path, monkeypatch):
    monkeypatch.setattr(faults, "LOST_SAMPLES", 10)
    urls = [write_tar(tmp_path / f"{i}.tar", [(f"k{j}", {"png": png(j)}) for j in range(4)]) for i in range(9)]
    loader = build("::".join(urls), select="group=objects", train_num_samples=36, max_bad_fraction=1.0)
    with pytest.raises(TooManyBadSamples, match=r"10 samples were lost(.|\n)*missing json 10;"):
        epoch(loader)


def test_texts_and_names_that_no_encoder_takes_do_not_end_a_run(tmp_path):
    """Lone surrogates in a caption; member names in Latin-1; brackets without end."""
    rows = [(f"k{i}\udce4", {"png": png(i), "json": rb'{"name": "cat \ud83d"}'}) for i in range(8)]
    with tarfile.open(tmp_path / "0.tar", "w", format=tarfile.GNU_FORMAT) as archive:
        for key, parts in [*rows, ("deep", {"png": png(9), "json": b"[" * 100_000})]:
            for suffix, data in parts.items():
                info = tarfile.TarInfo(f"{key}.{suffix}")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    loader = build(tmp_path, caption_sampling="name", known_matches=True, max_bad_fraction=0.5, train_num_samples=8)
    batches = epoch(loader)
    assert sorted(key for batch in batches for key in batch["key"]) == [rf"k{i}\udce4" for i in range(8)]
    assert {row for batch in batches for row in batch["caption_id"].tolist()} == {caption_id("cat \ufffd")}


def test_faults_of_an_epoch_are_judged_over_all_ranks_where_they_are_joined(tmp_path):
    loader = build(with_bad_images(tmp_path, 20, 4))
    seen = []

    def gather(mine, judge):
        seen.append(mine)
        return judge([mine, FaultCounter(samples=10_000).to_dict()])

    loader.gather = gather
    for number in range(2):
        epoch(loader, number)
    assert len(seen) == 2 and all(20 < counts["samples"] < 30 for counts in seen)  # of each epoch alone
    loader.gather = lambda mine, judge: judge([mine, mine])
    with pytest.raises(TooManyBadSamples, match="samples .* are unusable; the limit is 1.0%"):
        epoch(loader)
