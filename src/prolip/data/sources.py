"""From the settings to a source of rows: its kind, whether it can be read, and the samples of an epoch.

Training reads it over and over (`prolip.data.loader`); `captioned_samples` reads it once, for fits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice, takewhile
from typing import NamedTuple

from PIL import Image
from torch import Tensor

from prolip.data.captions import PLAIN, CaptionSampler, Selector
from prolip.data.config import DataConfig
from prolip.data.faults import FaultCounter, SampleFault, ShardFault
from prolip.data.images import decode_image
from prolip.data.noisy_captions import Noise, make_noise
from prolip.data.order.cursor import Cursor
from prolip.data.order.streams import Place, ResampledSource, RowSource, ShardSource, Source
from prolip.data.reading.folders import ImageRows
from prolip.data.reading.named import KINDS, ROWS, NamedSource, parse_source
from prolip.data.reading.rows import read_rows
from prolip.data.reading.shard_index import Addresses, ShardIndex, find_index, read_index
from prolip.data.reading.shards import COUNT_LIMIT, count_samples, expand_shards
from prolip.data.reading.stream import is_local
from prolip.data.reading.tables import TableColumns
from prolip.data.reading.tar import ShardReader, read_shard, refuse_unusable, survey
from prolip.data.samples import Raw, Row, caption_parts, has_image, image_bytes, is_selected, json_record
from prolip.data.synthetic import SyntheticSource
from prolip.utils.messages import naming
from prolip.utils.secrecy import redacted
from prolip.utils.threads import default_workers, in_threads

log = logging.getLogger(__name__)
#: Samples that are decoded ahead of the requested one.
AHEAD = 256
#: An epoch that training never reaches, for an order of its own.
EPOCH = 2**31 - 1
#: Kinds of data that training takes.
TRAINED = (*ROWS, "shards", "emoji", "synthetic")


def build_source(config: DataConfig, streams: int) -> tuple[Source, int]:
    """The source of `config` and the samples of an epoch, all listed, opened and counted beforehand.

    Pickled, N shards of addresses of A bytes take N (a + 8) bytes, a about A / 10 where addresses count up; an index
    adds N (a + 80), factors add 9 N; a table or a folder of R images takes R times a row, some 200 bytes.
    """
    kind, address = named = source_of(config)
    given = config.train_num_samples
    if config.shard_index and kind != "shards":
        what = f"the data is of the kind {kind}, and shards alone have an index: leave it out"
        raise ValueError(f"--shard-index {config.shard_index!r}: {what}")
    if kind == "synthetic":
        size = given or int(address or 0)
        if not size:
            raise ValueError("synthetic data has no size of its own: give --train-num-samples")
        return SyntheticSource(size), size
    if kind == "shards":
        return build_shard_source(config, address, streams)
    if config.dataset_resampled:
        raise ValueError(f"--dataset-resampled draws shards, and --train-data {named!s} is of the kind {kind}")
    with naming("--train-data"):
        columns, selector = table_columns(config), Selector.parse(config.select)
        split, max_bad = config.rest, config.max_bad_fraction
        rows = read_rows(named, columns, selector, config.train_split, split, max_bad)
        if config.captions:
            check_captions(rows, CaptionSampler.parse(config.caption_sampling), kind)
    if len(rows) < streams:
        raise ValueError(f"{len(rows)} samples for {streams} loader streams: use fewer --workers or ranks")
    return RowSource(len(rows), rows, rows.texts, rows.groups()), given or len(rows)


def table_columns(config: DataConfig) -> TableColumns:
    """The columns of a table that are read, each with the flag that names it, and how."""
    sampled = CaptionSampler.parse(config.caption_sampling).fields
    selector = Selector.parse(config.select)
    return TableColumns(
        image=config.csv_img_key,
        caption=config.csv_caption_key if PLAIN in sampled else "",
        captions=tuple(name for name in sampled if name != PLAIN),
        conditions=selector.fields if selector else (),
        needs_caption=config.captions > 0,
        separator=config.csv_separator,
        quoting=config.csv_quoting == "csv",
        image_root=config.image_root,
    )


def build_shard_source(config: DataConfig, address: str, streams: int) -> tuple[Source, int]:
    """The webdataset source: whole shards per stream where there are enough, every S-th sample of small local ones."""
    sizes: dict[str, int] = {}
    with naming("--train-data"):
        shards = expand_shards(address, config.train_data_upsampling_factors, pipes=True, sizes=sizes)
    urls = [shard.url for shard in shards]
    local, selector = all(map(is_local, urls)), Selector.parse(config.select)
    by_sample = not config.dataset_resampled and len(shards) < streams
    if by_sample:
        size = sum(sizes[url] for url in urls) if local else 0
        if not local or size > COUNT_LIMIT:
            reason = f"{size / 2**30:.1f} GiB are" if local else "remote shards are"
            raise ValueError(
                f"{len(shards)} shards for {streams} streams (ranks x workers), and {reason} not read by every stream: "
                f"use so few --workers that ranks x workers is at most {len(shards)}, write more shards, "
                "or add --dataset-resampled"
            )
        log.info("%d shards for %d streams: every stream reads all and keeps its share", len(shards), streams)
    index, counted = find_entries(config, urls, sizes)
    reader = ShardReader(config.read_policy, index, split=config.rest)
    with naming("--train-data"):
        # with any loss tolerated the first samples decide nothing; of remote shards the stream reports it
        if config.max_bad_fraction < 1 and local:
            refuse_unusable(urls, partial(check_sample, config), config.read_policy)
        if not (size := config.train_num_samples or 0):
            known = None if selector else counted
            every = count_samples(urls, config.select, sizes) if known is None else known
            size = round(every * (1 - (config.split or 0)))  # only reading shows which samples a split leaves
        if size == 0:
            raise ValueError(f"{len(urls)} shards hold no sample{why_none(urls, config)}")
    if config.dataset_resampled:
        weights = tuple(shard.weight for shard in shards)
        return ResampledSource(Addresses(urls), weights, selector, config.shuffle_buffer, reader), size
    return ShardSource(Addresses(urls), selector, config.shuffle_buffer, by_sample, reader), size


def find_entries(config: DataConfig, urls: list[str], sizes: dict[str, int]) -> tuple[ShardIndex | None, int | None]:
    """The index of these shards and their samples, if there is one; an error for a shard that it lacks, or of another
    size.
    """
    with naming("--shard-index" if config.shard_index else "--train-data"):
        try:
            policy = replace(config.read_policy, pipes=False)
            index = read_index(config.shard_index, policy) if config.shard_index else find_index(urls)
        except ShardFault as fault:
            remedy = f"make it by prolip data index SHARDS --output {config.shard_index}, or leave it out"
            what = f"--shard-index {config.shard_index!r} cannot be read ({fault.message})"
            raise OSError(f"{what}: {remedy}") from fault
        return (None, None) if index is None else index.only(urls, sizes)


def check_sample(config: DataConfig, raw: Raw) -> None:
    """SampleFault where a sample has no image, no JSON to select by or, if it is selected and wants one, no caption."""
    image_bytes(raw)
    if is_selected(raw, Selector.parse(config.select)) and config.captions:
        captions = CaptionSampler.parse(config.caption_sampling)
        captions.draw(*caption_parts(raw, captions), seed=0)


def why_none(urls: Sequence[str], config: DataConfig) -> str:
    """Why shards without a fault have no sample; of a selection, the fields of the first sample."""
    selector = Selector.parse(config.select)
    fits = f" that fits --select {config.select!r}" if config.select else ""
    raw = next(read_shard(urls[0], lambda fault: None, config.read_policy), {}) if fits else {}
    if selector is None or not has_image(raw):
        return f"{fits}: {survey(urls, config.read_policy)}"
    record = json_record(raw)
    there = [f"{name} {str(record[name])[:60]!r}" if name in record else f"no {name}" for name in selector.fields]
    return f"{fits}: the first sample has {', '.join(there)}; its fields are {', '.join(record)}"


def check_captions(rows: ImageRows, captions: CaptionSampler, kind: str) -> None:
    """ValueError where no row has a caption; reads only the table."""
    fault: SampleFault | None = None
    for number in range(len(rows)):
        try:
            captions.draw(*caption_parts(rows.texts(number), captions), seed=0)
            return
        except SampleFault as error:
            fault = fault or error
    place = " (captions are the names of subfolders, or in IMAGE.txt or IMAGE.json beside each image)"
    what = f"none of the {len(rows)} images has a caption{place if kind == 'images' else ''}"
    raise ValueError(f"{what}; of {rows.rows[0].key}: {fault.message if fault else ''}")


def source_of(config: DataConfig) -> NamedSource:
    """The kind and address of --train-data, by --dataset-type or by itself."""
    data, given = config.train_data, {"webdataset": "shards", "folder": "images"}.get(kind := config.dataset_type, kind)
    if given == "synthetic":
        return NamedSource(given, (data or "").removeprefix("synthetic:") if config.synthetic else "")
    if not data:
        raise ValueError("no data to train on: give --train-data, e.g. --train-data 'data/emoji/noto.tar'")
    if given != "auto":
        return NamedSource(given, data.removeprefix(f"{given}:"))
    source = parse_source(data, "--train-data")
    if source.kind not in TRAINED:
        near = {"wds": "train on its tars, shards:FOLDER/train", "imagenet": "train on images:FOLDER"}
        remedy = near.get(source.kind, f"give one of {', '.join(KINDS[kind] for kind in TRAINED)}")
        what = f"--train-data {redacted(data)!r} is data of the kind {source.kind}, which is for evaluation"
        raise ValueError(f"{what}: {remedy}")
    return source._replace(kind="shards") if source.kind == "emoji" else source


class Captioned(NamedTuple):
    """A sample as evaluation sees it. pixels: (3, H, W); chances: caption -> the probability that training draws it."""

    key: str
    pixels: Tensor
    chances: dict[str, float]


def captioned_samples(
    config: DataConfig,
    preprocess: Callable[[Image.Image], Tensor],
    count: int,
    rank: int = 0,
    ranks: int = 1,
    faults: FaultCounter | None = None,
    noise: Noise | None = None,
    source: Source | None = None,
) -> Iterator[Captioned]:
    """This rank's share of at most `count` samples of the training data, each once, decoded by threads.

    Where config.captions is 0, a sample may have no caption. faults: counts what cannot be used, and ends the reading
    where that is too much. noise, source: those of the loader; without, each rank makes its own. ValueError for
    synthetic data, which has no captions.
    """
    source = source or build_source(config, ranks)[0]
    if isinstance(source, ShardSource):
        source = source.among(ranks)
    if isinstance(source, SyntheticSource):
        raise ValueError("synthetic data has no captions to fit anything to")
    noise = make_noise(config, source) if noise is None else noise
    captions = config.sampler
    counter = FaultCounter(limit=config.max_bad_fraction) if faults is None else faults
    share = count // ranks + (rank < count % ranks)

    def chances_of(row: Row) -> dict[str, float]:
        try:
            return captions.chances(*caption_parts(row.raw, captions))
        except SampleFault:
            if config.captions:
                raise
            return {}

    def decode(row: Row) -> Captioned | tuple[SampleFault, Row]:
        try:
            row = noise(row) if noise is not None else row
            chances = chances_of(row)
            return Captioned(row.raw["__key__"], preprocess(decode_image(image_bytes(row.raw))), chances)
        except SampleFault as fault:
            return fault, row
        except Exception as error:  # an image one pixel wide that cannot be resized, and more
            return SampleFault("failed transform", f"{type(error).__name__}: {error}"), row

    rows = source.stream(Place(config.seed, EPOCH, rank, ranks), counter, Cursor())
    once = takewhile(lambda row: not row.occurrence, rows)
    for done in in_threads(decode, islice(once, share), default_workers(), AHEAD):
        if isinstance(done, Captioned):
            counter.use_sample()
            yield done
        else:
            fault, row = done
            counter.lose_sample(fault, row.raw["__key__"], row.raw.get("__url__", ""))
            counter.judge_chunk()
