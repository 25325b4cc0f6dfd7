"""From the settings to a source of rows: which kind it is, whether it can be read, how many samples it has."""
from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from prolip.data.captions import PLAIN, CaptionSampler, Selector
from prolip.data.config import DataConfig
from prolip.data.entries import ShardIndex, find_index, read_index
from prolip.data.faults import ShardFault
from prolip.data.folders import Columns, read_csv, read_folder
from prolip.data.samples import IMAGE_SUFFIXES
from prolip.data.shards import COUNT_LIMIT, Shard, count_samples, expand_shards, is_local, local_path
from prolip.data.streams import ResampledSource, RowSource, ShardSource, Source
from prolip.data.synthetic import SyntheticSource
from prolip.data.tar import ShardReader

log = logging.getLogger(__name__)


def build_source(config: DataConfig, streams: int) -> tuple[Source, int]:
    """The source of `config` and the samples of an epoch."""
    kind = dataset_kind(config)
    selector = Selector.parse(config.select)
    given = config.train_num_samples
    if kind == "synthetic":
        if given is None:
            raise ValueError("synthetic data has no size of its own: give --train-num-samples")
        return SyntheticSource(given), given
    assert config.train_data is not None
    if kind == "webdataset":
        return build_shard_source(config, streams)
    if config.dataset_resampled:
        raise ValueError(f"dataset_resampled draws webdataset shards, train_data {config.train_data!r} is a {kind}")
    if kind == "csv":
        rows = read_csv(config.train_data, csv_columns(config), config.csv_separator, selector)
    else:
        rows = read_folder(config.train_data, selector)
    if len(rows) < streams:
        raise ValueError(f"{len(rows)} samples for {streams} loader streams: use fewer --workers or ranks")
    return RowSource(len(rows), rows), given or len(rows)


def csv_columns(config: DataConfig) -> Columns:
    """The columns of a CSV that are read, each with the flag that names it."""
    sampled = CaptionSampler.parse(config.caption_sampling).fields
    captions = [name for name in sampled if name != PLAIN]
    selector = Selector.parse(config.select)
    return Columns(
        image=config.csv_img_key,
        caption=config.csv_caption_key if PLAIN in sampled else None,
        captions=tuple(captions),
        conditions=selector.fields if selector else (),
    )


def build_shard_source(config: DataConfig, streams: int) -> tuple[Source, int]:
    """The webdataset source: whole shards per stream where there are enough, every S-th sample of small local ones."""
    shards = expand_shards(config.train_data or "", config.train_data_upsampling_factors)
    urls = tuple(shard.url for shard in shards)
    selector = Selector.parse(config.select)
    by_sample = not config.dataset_resampled and len(shards) < streams
    if by_sample:
        check_splittable(shards, streams)
        log.info("%d shards for %d streams: every stream reads all and keeps its share", len(shards), streams)
    index = given_index(config) if config.shard_index else find_index(urls)
    if index is not None:
        index.count(urls)  # a shard that is missing there, or has another size, is told before training
    reader = ShardReader(config.read_policy, index)
    size = config.train_num_samples or count_samples(urls, config.select, index)
    if size == 0:
        wanted = f" that fits select {config.select!r}" if selector else ""
        raise ValueError(
            f"train_data {config.train_data!r}: {len(urls)} shards hold no sample{wanted}; "
            f"a sample has an image member ({', '.join(IMAGE_SUFFIXES)})"
            + (" and a json member with these values" if selector else "")
        )
    if config.dataset_resampled:
        weights = tuple(shard.weight for shard in shards)
        return ResampledSource(urls, weights, selector, config.shuffle_buffer, reader), size
    return ShardSource(urls, selector, config.shuffle_buffer, by_sample, reader), size


def given_index(config: DataConfig) -> ShardIndex:
    """The index that the settings name; OSError where it cannot be read."""
    place = config.shard_index or ""
    try:
        return read_index(place, config.read_policy)
    except ShardFault as fault:
        raise OSError(
            f"shard_index {place!r} cannot be read ({fault.message}): "
            f"make it by python -m prolip.data.index SHARDS --output {place}, or leave it out"
        ) from fault


def check_splittable(shards: Sequence[Shard], streams: int) -> None:
    """ValueError where reading every shard in every stream would be remote or large."""
    local = all(is_local(shard.url) for shard in shards)
    size = sum(os.path.getsize(local_path(shard.url)) for shard in shards) if local else 0
    if not local or size > COUNT_LIMIT:
        reason = f"{size / 2**30:.1f} GiB are" if local else "remote shards are"
        raise ValueError(
            f"{len(shards)} shards for {streams} streams (ranks x workers), and {reason} not read by every stream: "
            f"use so few --workers that ranks x workers is at most {len(shards)}, write more shards, "
            "or add --dataset-resampled"
        )


def dataset_kind(config: DataConfig) -> str:
    """dataset_type, or what train_data looks like."""
    if config.dataset_type == "synthetic":
        return "synthetic"
    data = config.train_data
    if not data:
        raise ValueError("no train_data: give --train-data, e.g. --train-data 'data/emoji/noto.tar'")
    if config.dataset_type != "auto":
        return config.dataset_type
    if data.startswith("pipe:") or "::" in data:
        return "webdataset"
    if data.lower().endswith((".csv", ".tsv")):
        return "csv"
    if is_local(data) and os.path.isdir(local_path(data)):
        return "webdataset" if any(name.endswith(".tar") for name in os.listdir(local_path(data))) else "folder"
    if data.endswith((".tar", ".tar.gz", ".tgz", "}", "*")) or not is_local(data):
        return "webdataset"
    raise ValueError(
        f"train_data {data!r} is no folder and ends in none of .tar, .csv, .tsv: "
        "check the name, or say what it is with --dataset-type webdataset, csv or folder"
    )
