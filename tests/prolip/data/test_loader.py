import multiprocessing
import os
import random
import sys
import time
from pathlib import Path

import pytest
import torch
from tiny_tars import letters, members, noisy, plain, png, write_shards, write_tar
from torch.utils.data import get_worker_info

from prolip.data.captions import caption_id
from prolip.data.config import chunks_ahead
from prolip.data.faults import TooManyBadSamples
from prolip.data.loader import DataConfig, build_loader, raise_file_limit


def build(data, batch_size=4, workers=0, rank=0, world_size=1, transform=noisy, **settings):
    config = DataConfig(train_data=str(data), batch_size=batch_size, workers=workers, **settings)
    return build_loader(config, transform, letters, rank=rank, world_size=world_size)


def epoch(loader, number=0):
    loader.set_epoch(number)
    return list(loader)


def same(one, other):
    assert one.keys() == other.keys()
    return all(
        torch.equal(one[name], other[name]) if isinstance(one[name], torch.Tensor) else one[name] == other[name]
        for name in one
    )


def gathered(batches):
    """The global batch of W local ones: row g is local row g // W of rank g % W."""
    whole = {"key": [key for row in zip(*(batch["key"] for batch in batches)) for key in row]}
    longest = max(batch["caption_ids"].shape[1] for batch in batches) if "caption_ids" in batches[0] else 0
    for name in batches[0]:
        if name != "key":
            parts = [batch[name] for batch in batches]
            if name == "caption_ids":
                parts = [torch.nn.functional.pad(part, (0, longest - part.shape[1]), value=-1) for part in parts]
            whole[name] = torch.stack(parts, 1).flatten(0, 1)
    return whole


def write_csv(tmp_path, rows):
    lines = ["filepath\ttitle\tname\tgroup"]
    for i in range(rows):
        (tmp_path / f"{i}.png").write_bytes(png(i))
        lines.append(f"{i}.png\tcaption {i}\tname {i}\tgroup")
    (tmp_path / "d.csv").write_text("\n".join(lines))
    return tmp_path / "d.csv"


def data_of(kind, tmp_path):
    if kind == "csv":
        return write_csv(tmp_path, 22), {"caption_sampling": "name,txt,group"}
    sizes = {"shards": [3, 9, 5, 7], "one shard": [23], "resampled": [3, 9, 5]}[kind]
    write_shards(tmp_path, sizes)
    bad = write_tar(tmp_path / "9.tar", [("x", {**members(90), "png": b"x"}), ("y", members(91))])
    assert Path(bad).exists()
    settings = {"caption_sampling": "name,keywords:2,txt", "max_bad_fraction": 0.5, "shuffle_buffer": 6}
    if kind == "one shard":
        return tmp_path / "0.tar", settings
    return tmp_path, {**settings, "dataset_resampled": kind == "resampled"}


@pytest.mark.parametrize("kind", ["shards", "one shard", "csv", "resampled"])
def test_two_ranks_with_one_worker_read_what_one_rank_reads_with_two(tmp_path, kind):
    data, settings = data_of(kind, tmp_path)
    settings["known_matches"] = True
    one = build(data, batch_size=8, workers=2, **settings)
    two = [build(data, batch_size=4, workers=rank, rank=rank, world_size=2, **settings) for rank in (0, 1)]
    assert one.num_batches == two[0].num_batches == two[1].num_batches >= 3
    for number in (0, 1):
        batches = epoch(one, number)
        parts = [epoch(loader, number) for loader in two]
        assert len(batches) == one.num_batches
        for whole, *locals_ in zip(batches, *parts, strict=True):
            assert same(gathered(locals_), whole)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_four_streams_split_three_ways_read_the_same(tmp_path):
    write_shards(tmp_path, [5] * 6)
    one = epoch(build(tmp_path, batch_size=8, workers=4))
    two = [epoch(build(tmp_path, batch_size=4, workers=2, rank=rank, world_size=2)) for rank in range(2)]
    four = [epoch(build(tmp_path, batch_size=2, workers=0, rank=rank, world_size=4)) for rank in range(4)]
    for whole, *locals_ in zip(one, *two, *four, strict=True):
        assert same(gathered(locals_[:2]), whole) and same(gathered(locals_[2:]), whole)


def test_batches_follow_seed_and_epoch_and_can_be_read_again(tmp_path):
    write_shards(tmp_path, [8, 8])
    loader = build(tmp_path, workers=2)
    first, second = epoch(loader, 0), epoch(loader, 1)
    for again in (epoch(loader, 0), epoch(build(tmp_path, workers=2), 0)):
        assert all(map(same, first, again))
    for other in (second, epoch(build(tmp_path, workers=2, seed=1), 0)):
        assert not any(map(same, first, other))


def test_an_epoch_left_early_does_not_disturb_the_next(tmp_path):
    write_shards(tmp_path, [8, 8])
    wanted = epoch(build(tmp_path, workers=2), 1)
    loader = build(tmp_path, workers=2)
    for _ in loader:
        break
    assert all(map(same, wanted, epoch(loader, 1)))


def test_an_epoch_holds_every_sample_and_rounds_up(tmp_path):
    write_shards(tmp_path, [9, 5, 6])
    loader = build(tmp_path)
    keys = [key for batch in epoch(loader) for key in batch["key"]]
    assert loader.num_batches == len(loader) == 5 and len(set(keys)) == len(keys) == 20
    loader = build(tmp_path, batch_size=6)
    keys = [key for batch in epoch(loader) for key in batch["key"]]
    assert (loader.num_batches, loader.num_samples, loader.dataset_samples) == (4, 24, 20)
    assert len(set(keys[:20])) == 20 and len(keys) == 24


def test_augmentation_and_captions_do_not_depend_on_streams(tmp_path):
    write_shards(tmp_path, [8, 8, 8, 8])
    settings = {"caption_sampling": "keywords", "train_num_samples": 32}

    def views(**place):
        batches = epoch(build(tmp_path, **place, **settings), 3)
        return {
            key: (image, text)
            for batch in batches
            for key, image, text in zip(batch["key"], batch["image"], batch["text"])
        }

    one, two = views(), views(workers=2)
    assert one.keys() == two.keys() and len(one) == 32
    assert all(torch.equal(one[key][0], two[key][0]) and torch.equal(one[key][1], two[key][1]) for key in one)


def test_every_rank_has_the_same_number_of_batches_however_uneven_the_shards_are(tmp_path):
    write_shards(tmp_path, [1, 1, 30, 2])
    for rank in range(2):
        loader = build(tmp_path, workers=2, rank=rank, world_size=2)
        for number in range(3):
            batches = epoch(loader, number)
            assert len(batches) == loader.num_batches == 5  # ceil(34 / 8)
            assert all(len(batch["key"]) == 4 for batch in batches)


def test_given_sample_counts_set_the_length_of_an_epoch(tmp_path):
    write_shards(tmp_path, [8, 8])
    assert len(epoch(build(tmp_path, train_num_samples=8))) == 2
    assert len(epoch(build(tmp_path, train_num_samples=41))) == 11


def test_captions_are_drawn_afresh_each_epoch(tmp_path):
    write_shards(tmp_path, [4])
    loader = build(tmp_path, caption_sampling="keywords")
    batches = [batch for number in range(12) for batch in epoch(loader, number)]
    assert len({tuple(batch["text"][batch["key"].index("s002")].tolist()) for batch in batches}) == 3


def test_known_matches_name_the_drawn_and_all_captions(tmp_path):
    write_shards(tmp_path, [4, 4])
    loader = build(tmp_path, workers=2, known_matches=True, caption_sampling="name,keywords")
    (batch, _) = epoch(loader)
    assert batch["caption_id"].dtype == batch["caption_ids"].dtype == torch.int64
    for key, text, drawn, every in zip(batch["key"], batch["text"], batch["caption_id"], batch["caption_ids"]):
        index = int(key[1:])
        captions = [f"name {index}", *(f"word {index} {i}" for i in range(3))]
        assert every.tolist() == [caption_id(caption) for caption in captions]
        caption = next(caption for caption in captions if caption_id(caption) == drawn)
        assert torch.equal(letters([caption])[0], text)


def test_ids_are_padded_over_workers_with_minus_one(tmp_path):
    def shard(name, words):
        record = f'{{"keywords": {words}}}'.encode()
        write_tar(tmp_path / name, [(f"{name[0]}{i}", {**members(i), "json": record}) for i in range(4)])

    shard("a.tar", '["one"]')
    shard("b.tar", '["one", "two", "three"]')
    (batch, _) = epoch(build(tmp_path, workers=2, known_matches=True, caption_sampling="keywords"))
    assert batch["caption_ids"].shape == (4, 3)
    for key, ids in zip(batch["key"], batch["caption_ids"]):
        assert (ids == -1).sum() == (2 if key[0] == "a" else 0)


def test_transforms_may_leave_uint8(tmp_path):
    write_shards(tmp_path, [4])
    (batch,) = epoch(build(tmp_path, transform=plain, workers=2))
    index = int(batch["key"][3][1:])
    assert batch["image"].dtype == torch.uint8 and batch["image"].shape == (4, 3, 4, 4)
    from prolip.data.samples import decode_image

    assert torch.equal(batch["image"][3], plain(decode_image(png(index))))


def test_selection_narrows_data_and_count(tmp_path):
    write_shards(tmp_path, [12, 12])
    loader = build(tmp_path, select="group=objects|food drink")
    keys = [key for batch in epoch(loader) for key in batch["key"]]
    assert loader.dataset_samples == 16 and sorted(keys) == [f"s{i:03d}" for i in range(24) if i % 3]


@pytest.mark.parametrize("workers", [0, 2])
def test_reading_leaves_the_global_generators_alone(tmp_path, workers):
    write_shards(tmp_path, [8, 8])
    torch.manual_seed(3), random.seed(3)
    before = torch.get_rng_state(), random.getstate()
    epoch(build(tmp_path, workers=workers))
    assert torch.equal(before[0], torch.get_rng_state()) and random.getstate() == before[1]


def test_the_context_length_reaches_the_tokenizer(tmp_path):
    write_shards(tmp_path, [4])
    config = DataConfig(train_data=str(tmp_path), batch_size=4, workers=0)
    (batch,) = build_loader(config, plain, letters, context_length=9)
    assert batch["text"].shape == (4, 9)


# --- faults
def with_bad_images(tmp_path, good, bad):
    rows = [(f"g{i}", members(i)) for i in range(good)] + [(f"b{i}", {**members(i), "png": b"x"}) for i in range(bad)]
    return write_tar(tmp_path / "bad.tar", rows)


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


@pytest.mark.parametrize("workers", [0, 2])
def test_too_many_corrupt_images_end_the_epoch_with_kind_key_and_shard(tmp_path, workers):
    loader = build(with_bad_images(tmp_path, 20, 4), workers=workers)
    with pytest.raises(TooManyBadSamples) as error:
        epoch(loader)
    for part in ("bad image", "'b", "bad.tar", "cannot identify image", "the limit is 1.0%", "--max-bad-fraction"):
        assert part in str(error.value)


@pytest.mark.parametrize("workers", [0, 2])
def test_nothing_but_corrupt_images_stops_instead_of_turning_for_ever(tmp_path, workers):
    loader = build(with_bad_images(tmp_path, 0, 30), workers=workers)
    with pytest.raises(TooManyBadSamples, match="1000 of 1000 samples"):
        epoch(loader)


def test_a_truncated_shard_is_reported_and_fatal_at_the_end_of_the_epoch(tmp_path):
    urls = write_shards(tmp_path, [8, 8])
    Path(urls[0]).write_bytes(Path(urls[0]).read_bytes()[:-9000])
    tolerant = build(tmp_path, max_bad_fraction=1.0)
    epoch(tolerant)
    assert tolerant.faults()["broken shard"] >= 1
    with pytest.raises(TooManyBadSamples, match=r"of \d shards"):
        epoch(build(tmp_path))


def test_a_shard_behind_a_failing_command_is_reported(tmp_path):
    (url,) = write_shards(tmp_path, [8])
    loader = build(f"pipe:cat {url}; exit 7", max_bad_fraction=1.0, train_num_samples=8)
    epoch(loader)
    assert loader.faults()["broken shard"] >= 1
    piped = build(f"pipe:cat {url}", train_num_samples=8)
    assert sorted(key for batch in epoch(piped) for key in batch["key"]) == [f"s{i:03d}" for i in range(8)]


# --- what is refused before the first batch
def test_a_batch_that_workers_do_not_divide_is_refused_with_what_fits():
    with pytest.raises(ValueError, match=r"batch_size 100 is not divisible by 8 workers: use --batch-size 96 or 104, "):
        DataConfig(batch_size=100, workers=8)
    with pytest.raises(ValueError, match=r"or --workers 5 or 10$"):
        DataConfig(batch_size=100, workers=8)
    with pytest.raises(ValueError, match=r"use --batch-size 8, or --workers 7$"):
        DataConfig(batch_size=7, workers=8)


def test_fewer_samples_than_a_global_batch_are_refused(tmp_path):
    write_shards(tmp_path, [10])
    with pytest.raises(ValueError, match=r"10 samples are fewer than one global batch of 16 \(8 x 2 ranks\): .* 5 or"):
        build(tmp_path, batch_size=8, world_size=2)


def test_a_selection_that_fits_nothing_is_refused(tmp_path):
    write_shards(tmp_path, [10])
    with pytest.raises(ValueError, match="1 shards hold no sample that fits select 'group=cars'"):
        build(tmp_path, select="group=cars")


def test_missing_data_is_refused_before_training(tmp_path):
    write_shards(tmp_path, [4])
    with pytest.raises(FileNotFoundError, match="1 of 2 shards are missing"):
        build(f"{tmp_path}/{{0..1}}.tar")
    with pytest.raises(ValueError, match="no train_data: give --train-data"):
        build_loader(DataConfig(workers=0), plain, letters)
    with pytest.raises(ValueError, match=r"ends in none of .tar, .csv, .tsv"):
        build(tmp_path / "0.zip")
    with pytest.raises(ValueError, match="names no shard"):
        build(f"{tmp_path}/{{}}.tar")


def test_few_remote_or_large_shards_for_many_streams_are_refused_with_the_remedy(tmp_path, monkeypatch):
    remedy = r"2 shards for 4 streams .* at most 2, write more shards, or add --dataset-resampled"
    with pytest.raises(ValueError, match=remedy):
        build("memory://a/{0..1}.tar", workers=4, train_num_samples=100)
    write_shards(tmp_path, [4, 4])
    monkeypatch.setattr("prolip.data.sources.COUNT_LIMIT", 10)
    with pytest.raises(ValueError, match=remedy):
        build(tmp_path, workers=2, world_size=2, train_num_samples=100)


def test_settings_are_checked_when_they_are_made():
    for settings, message in (
        ({"dataset_type": "tfds"}, "use one of auto, webdataset"),
        ({"batch_size": 0}, "batch_size is 0: give 1 or more"),
        ({"workers": -1}, "workers is -1"),
        ({"prefetch": 0}, "prefetch is 0: give 1 or more"),
        ({"max_bad_fraction": 2}, "give a fraction from 0 to 1"),
        ({"train_num_samples": 0}, "train_num_samples is 0"),
        ({"csv_separator": ", "}, "not one character"),
        ({"caption_sampling": "name:x"}, "the weight 'x' is no number"),
        ({"select": "group"}, "is no condition"),
        ({"train_data_upsampling_factors": "1::2", "train_data": "a::b"}, "add --dataset-resampled"),
        (
            {"train_data_upsampling_factors": "1", "train_data": "a::b", "dataset_resampled": True},
            "give 2 positive numbers",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            DataConfig(**settings)
    assert DataConfig(csv_separator=r"\t").csv_separator == "\t"


@pytest.mark.parametrize(
    ("batch_size", "ahead"), [(1, 32), (64, 32), (65, 32), (67, 31), (512, 4), (1023, 3), (1024, 2), (9999, 2)]
)
def test_small_batches_are_prepared_further_ahead(batch_size, ahead):
    assert chunks_ahead(None, batch_size) == ahead
    assert ahead in (2, 32) or (ahead - 1) * batch_size < 2048 <= ahead * batch_size
    assert chunks_ahead(1, batch_size) == 1 and chunks_ahead(100, batch_size) == 100


@pytest.mark.parametrize(("prefetch", "batch_size", "ahead"), [(None, 4, 32), (None, 1024, 2), (3, 4, 3)])
def test_workers_prepare_as_many_batches_ahead_as_asked_for_or_as_the_batch_wants(
    tmp_path, prefetch, batch_size, ahead
):
    drawn = multiprocessing.Value("q", 0)

    def counted(image):
        with drawn.get_lock():
            drawn.value += 1
        return plain(image)

    write_shards(tmp_path, [8, 8])
    settings = {"prefetch": prefetch, "train_num_samples": 64 * batch_size}
    loader = build(tmp_path, batch_size, workers=2, transform=counted, **settings)
    next(iter(loader))
    # Workers have begun one chunk more for the batch that was taken.
    wanted, deadline = (ahead + 1) * batch_size, time.monotonic() + 60
    while drawn.value < wanted and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)
    assert drawn.value == wanted
    loader.close()


@pytest.fixture
def file_limit():
    """Sets the soft limit of open files; what it was before comes back."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)

    def lower(soft):
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
        return lambda: resource.getrlimit(resource.RLIMIT_NOFILE)

    yield lower
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_limit_of_open_files_is_raised_as_far_as_it_goes_and_never_lowered(file_limit, monkeypatch):
    import resource

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    limits = file_limit(256)
    raise_file_limit()
    assert limits() == (hard, hard)
    monkeypatch.setattr(resource, "setrlimit", lambda *_: pytest.fail("there was nothing to raise"))
    raise_file_limit()
    assert limits() == (hard, hard)


def test_a_system_that_refuses_more_open_files_keeps_what_it_has(file_limit, monkeypatch):
    import resource

    limits = file_limit(256)
    before = limits()

    def refuse(*_):
        raise ValueError("current limit exceeds maximum limit")

    with monkeypatch.context() as patched:
        patched.setattr(resource, "setrlimit", refuse)
        raise_file_limit()
    assert limits() == before
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "resource", None)  # as on Windows
        raise_file_limit()
    assert limits() == before


def open_files(process):
    return len(os.listdir(f"/proc/{process}/fd"))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files by /proc")
def test_more_tensors_may_wait_than_the_soft_limit_of_files_allowed(tmp_path, file_limit):
    """While one worker is slow, the chunks of the other pile up in this process, two open files each."""
    main, allowed = os.getpid(), open_files("self") + 40
    most, deadline = multiprocessing.Value("q", 0), time.monotonic() + 60

    def slow(image):
        while get_worker_info().id == 0 and most.value <= allowed and time.monotonic() < deadline:
            most.value = max(most.value, open_files(main))
            time.sleep(0.01)
        return plain(image)

    write_shards(tmp_path, [16, 16])
    file_limit(allowed)
    loader = build(tmp_path, batch_size=2, workers=2, transform=slow, train_num_samples=100)
    assert len(epoch(loader)) == 50
    loader.close()
    assert most.value > allowed


def test_every_setting_has_its_help():
    from dataclasses import fields

    assert all(field.metadata["help"] for field in fields(DataConfig))


# --- kinds of data
def test_the_kind_of_data_is_told_by_suffix_and_content(tmp_path):
    from prolip.data.sources import dataset_kind

    write_shards(tmp_path, [1])
    (tmp_path / "images" / "cat").mkdir(parents=True)
    for data, kind in {
        f"{tmp_path}/0.tar": "webdataset",
        f"{tmp_path}": "webdataset",
        f"{tmp_path}/images": "folder",
        "a.csv": "csv",
        "a.TSV": "csv",
        "a.tar::b.tar": "webdataset",
        "s3://b/{0..9}.tar": "webdataset",
        "pipe:cat x": "webdataset",
        "d/{a,b}": "webdataset",
    }.items():
        assert dataset_kind(DataConfig(train_data=data)) == kind
    assert dataset_kind(DataConfig(train_data="a.dat", dataset_type="csv")) == "csv"


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


def test_csv_images_that_are_gone_are_faults(tmp_path):
    data = write_csv(tmp_path, 12)
    (tmp_path / "3.png").unlink()
    loader = build(data, max_bad_fraction=0.5)
    assert "3.png" not in {Path(key).name for batch in epoch(loader) for key in batch["key"]}
    assert loader.faults()["missing image"] >= 1


def test_an_epoch_of_resampled_sources_keeps_their_proportions(tmp_path):
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    a = write_tar(tmp_path / "a" / "a.tar", [(f"a{i}", members(i)) for i in range(4)])
    b = write_tar(tmp_path / "b" / "b.tar", [(f"b{i}", members(i)) for i in range(4)])
    settings = {"dataset_resampled": True, "train_num_samples": 1600, "batch_size": 16}
    loader = build(f"{a}::{b}", train_data_upsampling_factors="3::1", **settings)
    keys = [key[0] for batch in epoch(loader) for key in batch["key"]]
    assert abs(keys.count("a") / len(keys) - 0.75) < 0.11  # 400 shards drawn: five standard deviations


def test_workers_live_through_epochs_and_end_with_the_loader(tmp_path):
    def workers():
        return {child.pid for child in multiprocessing.active_children()}

    write_shards(tmp_path, [4, 4])
    before = workers()
    loader = build(tmp_path, workers=2)
    epoch(loader)
    first = workers() - before
    epoch(loader, 1)
    assert len(first) == 2 and workers() - before == first
    loader.close()
    assert workers() == before
    epoch(loader, 2)
    assert len(workers() - before) == 2
    del loader
    assert workers() == before


def test_workers_end_when_the_data_is_too_bad(tmp_path):
    before = set(multiprocessing.active_children())
    loader = build(with_bad_images(tmp_path, 0, 30), workers=2)
    with pytest.raises(TooManyBadSamples):
        epoch(loader)
    assert set(multiprocessing.active_children()) == before
