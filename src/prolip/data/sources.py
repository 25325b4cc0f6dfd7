"""From the settings to a source of rows: which kind it is, whether it can be read, how many samples it has."""
from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import partial

from prolip.data.config import DataConfig
from prolip.data.faults import SampleFault, ShardFault
from prolip.data.order.streams import ResampledSource, RowSource, ShardSource, Source
from prolip.data.reading.addresses import check_address
from prolip.data.reading.entries import find_index, read_index
from prolip.data.reading.folders import ImageRows, TableColumns, read_csv, read_folder, read_published
from prolip.data.reading.opening import is_local, local_path
from prolip.data.reading.published.sets import SETS, word_of
from prolip.data.reading.shards import COUNT_LIMIT, count_samples, expand_shards
from prolip.data.reading.tar import ShardReader, read_shard
from prolip.data.samples.captions import PLAIN, CaptionSampler, Selector
from prolip.data.samples.sample import Raw, caption_parts, has_image, image_bytes, is_selected, json_record
from prolip.data.survey import refuse_unusable, survey
from prolip.data.synthetic import SyntheticSource
from prolip.utils.messages import naming

log = logging.getLogger(__name__)


def build_source(config: DataConfig, streams: int) -> tuple[Source, int]:
    """The source of `config` and the samples of an epoch."""
    kind = dataset_kind(config)
    selector = Selector.parse(config.select)
    given = config.train_num_samples
    if config.shard_index and kind != "webdataset":
        what = f"the data is of the kind {kind}, and shards alone have an index: leave it out"
        raise ValueError(f"--shard-index {config.shard_index!r}: {what}")
    if kind == "synthetic":
        if given is None:
            raise ValueError("synthetic data has no size of its own: give --train-num-samples")
        return SyntheticSource(given), given
    assert config.train_data is not None
    if kind == "webdataset":
        return build_shard_source(config, streams)
    if config.dataset_resampled:
        what = f"of the kind {kind}" if kind in SETS else f"a {kind}"
        raise ValueError(f"--dataset-resampled draws webdataset shards, --train-data {config.train_data!r} is {what}")
    with naming("--train-data"):
        if kind == "csv":
            quoting = config.csv_quoting == "csv"
            rows = read_csv(config.train_data, csv_columns(config), config.csv_separator, selector, quoting)
        elif kind in SETS:
            rows = read_published(kind, config.train_data, config.train_split, selector)
        else:
            rows = read_folder(config.train_data, selector)
        if config.captions:
            check_captions(rows, CaptionSampler.parse(config.caption_sampling), kind)
    if len(rows) < streams:
        raise ValueError(f"{len(rows)} samples for {streams} loader streams: use fewer --workers or ranks")
    return RowSource(len(rows), rows, rows.texts), given or len(rows)


def csv_columns(config: DataConfig) -> TableColumns:
    """The columns of a CSV that are read, each with the flag that names it."""
    sampled = CaptionSampler.parse(config.caption_sampling).fields
    selector = Selector.parse(config.select)
    return TableColumns(
        image=config.csv_img_key,
        caption=config.csv_caption_key if PLAIN in sampled else None,
        captions=tuple(name for name in sampled if name != PLAIN),
        conditions=selector.fields if selector else (),
    )


def build_shard_source(config: DataConfig, streams: int) -> tuple[Source, int]:
    """The webdataset source: whole shards per stream where there are enough, every S-th sample of small local ones."""
    with naming("--train-data"):
        shards = expand_shards(config.train_data or "", config.train_data_upsampling_factors, pipes=True)
    urls = tuple(shard.url for shard in shards)
    selector = Selector.parse(config.select)
    by_sample = not config.dataset_resampled and len(shards) < streams
    if by_sample:
        local = all(map(is_local, urls))
        size = sum(os.path.getsize(local_path(url)) for url in urls) if local else 0
        if not local or size > COUNT_LIMIT:
            reason = f"{size / 2**30:.1f} GiB are" if local else "remote shards are"
            raise ValueError(
                f"{len(shards)} shards for {streams} streams (ranks x workers), and {reason} not read by every stream: "
                f"use so few --workers that ranks x workers is at most {len(shards)}, write more shards, "
                "or add --dataset-resampled"
            )
        log.info("%d shards for %d streams: every stream reads all and keeps its share", len(shards), streams)
    with naming("--shard-index" if config.shard_index else "--train-data"):
        try:
            policy = replace(config.read_policy, pipes=False)
            index = read_index(config.shard_index, policy) if config.shard_index else find_index(urls)
        except ShardFault as fault:
            raise OSError(
                f"--shard-index {config.shard_index!r} cannot be read ({fault.message}): make it by prolip "
                f"data index SHARDS --output {config.shard_index}, or leave it out"
            ) from fault
        if index is not None:
            index.count(urls)  # a shard that is missing there, or has another size, is reported before training
    reader = ShardReader(config.read_policy, index)
    with naming("--train-data"):
        # where any loss is tolerated the first samples settle nothing; of remote shards the stream will tell
        if config.max_bad_fraction < 1 and all(map(is_local, urls)):
            refuse_unusable(urls, partial(check_sample, config), config.read_policy)
        size = config.train_num_samples or count_samples(urls, config.select, index)
        if size == 0:
            raise ValueError(f"{len(urls)} shards hold no sample{why_none(urls, config)}")
    if config.dataset_resampled:
        weights = tuple(shard.weight for shard in shards)
        return ResampledSource(urls, weights, selector, config.shuffle_buffer, reader), size
    return ShardSource(urls, selector, config.shuffle_buffer, by_sample, reader), size


def check_sample(config: DataConfig, raw: Raw) -> None:
    """SampleFault where a sample has no image, no JSON to select by or, if it is selected and wants one, no caption."""
    image_bytes(raw)
    if is_selected(raw, Selector.parse(config.select)) and config.captions:
        captions = CaptionSampler.parse(config.caption_sampling)
        captions.draw(*caption_parts(raw, captions), seed=0)


def why_none(urls: Sequence[str], config: DataConfig) -> str:
    """Why shards without a readable fault have no sample; of a selection, what the first sample has in its fields."""
    selector = Selector.parse(config.select)
    fits = f" that fits --select {config.select!r}" if config.select else ""
    raw = next(read_shard(urls[0], lambda fault: None, config.read_policy), {}) if fits else {}
    if selector is None or not has_image(raw):
        return f"{fits}: {survey(urls, config.read_policy)}"
    record = json_record(raw)
    there = [f"{name} {str(record[name])[:60]!r}" if name in record else f"no {name}" for name in selector.fields]
    absent = "" if all(name in record for name in selector.fields) else f"; its fields are {', '.join(record)}"
    return f"{fits}: the first sample has {', '.join(there)}{absent}"


def check_captions(rows: ImageRows, captions: CaptionSampler, kind: str) -> None:
    """ValueError where no row has a caption; nothing but the table is read."""
    fault: SampleFault | None = None
    for row in rows.rows:
        try:
            texts = {PLAIN: row.caption} if row.caption is not None else {}
            captions.draw(*caption_parts({"__key__": row.key, **texts, "json": row.record}, captions), seed=0)
            return
        except SampleFault as error:
            fault = fault or error
    place = " (captions are the names of subfolders, or in IMAGE.txt or IMAGE.json beside each image)"
    what = f"none of the {len(rows)} images has a caption{place if kind == 'folder' else ''}"
    raise ValueError(f"{what}; of {rows.rows[0].key}: {fault.message if fault else ''}")


def dataset_kind(config: DataConfig) -> str:
    """dataset_type, or what train_data looks like."""
    if config.dataset_type == "synthetic":
        return "synthetic"
    data = config.train_data
    if not data:
        raise ValueError("no data to train on: give --train-data, e.g. --train-data 'data/emoji/noto.tar'")
    if config.dataset_type != "auto":
        return config.dataset_type
    if word := word_of(data):
        return word
    if data.startswith("pipe:") or "::" in data:
        return "webdataset"
    if data.lower().endswith((".csv", ".tsv")):
        return "csv"
    if is_local(data) and os.path.isdir(local_path(data)):
        return "webdataset" if any(name.endswith(".tar") for name in os.listdir(local_path(data))) else "folder"
    if data.endswith((".tar", ".tar.gz", ".tgz", "}", "*")) or not is_local(data):
        return "webdataset"
    check_address(data, pipes=True)
    near = get_close_matches(data.partition(":")[0], SETS, n=1) if ":" in data else []
    raise ValueError(
        f"--train-data {data!r} is no folder and ends in none of .tar, .csv, .tsv: "
        + (f"did you mean {SETS[near[0]].form}?" if near else
           "check the name, or say what it is with --dataset-type webdataset, csv or folder")
    )  # fmt: skip
