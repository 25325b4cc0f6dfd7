"""Row sources built from settings: `build_source` for endless training, `captioned_samples` for one pass, for fits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice, takewhile
from typing import NamedTuple

from PIL import Image
from torch import Tensor

from prolip.data.captions import PLAIN, CaptionSampler, Selector
from prolip.data.config import DataConfig
from prolip.data.faults import FaultCounter, SampleFault, ShardFault
from prolip.data.images import decode_image
from prolip.data.noisy_captions import Noise, make_noise
from prolip.data.order import Cursor, Place, RowSource, ShardSource, Source, SyntheticSource
from prolip.data.reading.folders import ImageRows
from prolip.data.reading.named import KINDS, ROWS, NamedSource, parse_source
from prolip.data.reading.rows import read_rows
from prolip.data.reading.shard_index import Addresses, find_index, read_index
from prolip.data.reading.shards import COUNT_LIMIT, count_samples, expand_shards
from prolip.data.reading.stream import is_local
from prolip.data.reading.tables import TableColumns
from prolip.data.reading.tar import ShardReader, read_shard, refuse_unusable, survey
from prolip.data.samples import Raw, Row, caption_parts, has_image, image_bytes, is_selected, json_record
from prolip.data.split import Split
from prolip.utils.messages import naming
from prolip.utils.secrecy import redacted
from prolip.utils.threads import default_workers, in_threads

log = logging.getLogger(__name__)
#: Samples decoded ahead of the requested one, and an epoch that training never reaches, for a separate order.
AHEAD, EPOCH = 256, 2**31 - 1
TRAINED = (*ROWS, "shards", "emoji", "synthetic")  # kinds of data to train on


def build_source(config: DataConfig, streams: int) -> tuple[Source, int]:
    """Return the source of `config` and the samples per epoch; list, open and count everything first."""
    kind, address = named = source_of(config)
    given = config.train_num_samples
    if config.shard_index and kind != "shards":
        what = f"the data is of the kind {kind}, and only shards have an index. Leave the flag out"
        raise ValueError(f"--shard-index {config.shard_index!r}: {what}")
    if kind == "synthetic":
        if not (size := given or int(address or 0)):
            raise ValueError("synthetic data has no size. Give --train-num-samples")
        return SyntheticSource(size), size
    if kind == "shards":
        return build_shard_source(config, address, streams)
    if config.dataset_resampled:
        raise ValueError(f"--dataset-resampled draws shards, but --train-data {named!s} is of the kind {kind}")
    with naming("--train-data"):
        columns, selector = table_columns(config), Selector.parse(config.select)
        split = None if config.split is None else Split(config.split, "rest")
        rows = read_rows(named, columns, selector, config.train_split, split, config.max_bad_fraction)
        if config.captions:
            check_captions(rows, config.sampler, kind)
    if len(rows) < streams:
        raise ValueError(f"{len(rows)} samples for {streams} loader streams are too few. Use fewer --workers or ranks")
    return RowSource(len(rows), rows, rows.texts, rows.groups()), given or len(rows)


def table_columns(config: DataConfig) -> TableColumns:
    """Return the table columns to read, each with the flag that names it, and the CSV format."""
    sampled, selector = config.sampler.fields, Selector.parse(config.select)
    return TableColumns(
        image=config.csv_img_key,
        caption=config.csv_caption_key if PLAIN in sampled else "",
        captions=tuple(name for name in sampled if name != PLAIN),
        conditions=tuple(condition.field for condition in selector.conditions) if selector else (),
        needs_caption=config.captions > 0,
        separator=config.csv_separator,
        quoting=config.csv_quoting == "csv",
        image_root=config.image_root,
    )


def build_shard_source(config: DataConfig, address: str, streams: int) -> tuple[Source, int]:
    """Return the webdataset source: whole shards per stream if they suffice, else every S-th sample of local ones."""
    sizes: dict[str, int] = {}
    with naming("--train-data"):
        shards = expand_shards(address, config.train_data_upsampling_factors, pipes=True, sizes=sizes)
    urls = [shard.url for shard in shards]
    local, selector, captions = all(map(is_local, urls)), Selector.parse(config.select), config.sampler
    by_sample = not config.dataset_resampled and len(shards) < streams
    if by_sample:
        size = sum(sizes[url] for url in urls) if local else 0
        if not local or size > COUNT_LIMIT:
            reason = f"{size / 2**30:.1f} GiB are" if local else "remote shards are"
            what = f"{len(shards)} shards for {streams} streams (ranks x workers) are too few; {reason} not read by all"
            fewer = f"reduce --workers so that ranks x workers is at most {len(shards)}"
            raise ValueError(f"{what}: {fewer}, write more shards, or add --dataset-resampled")
        log.info("%d shards for %d streams: every stream reads all and keeps its share", len(shards), streams)
    with naming("--shard-index" if config.shard_index else "--train-data"):
        try:
            policy = replace(config.read_policy, pipes=False)
            whole = read_index(config.shard_index, policy) if config.shard_index else find_index(urls)
        except ShardFault as fault:
            remedy = f"write it with prolip data index SHARDS --output {config.shard_index}, or leave the flag out"
            what = f"--shard-index {config.shard_index!r} cannot be read ({fault.message})"
            raise OSError(f"{what}: {remedy}") from fault
        index, counted = (None, None) if whole is None else whole.only(urls, sizes)

    def check_sample(raw: Raw) -> None:
        image_bytes(raw)
        if is_selected(raw, selector) and config.captions:
            captions.draw(*caption_parts(raw, captions), seed=0)

    with naming("--train-data"):
        # if any loss is tolerated, the first samples decide nothing; the stream itself reports faults of remote shards
        if config.max_bad_fraction < 1 and local:
            refuse_unusable(urls, check_sample, config.read_policy)
        if not (size := config.train_num_samples or 0):
            known = None if selector else counted
            every = count_samples(urls, config.select, sizes) if known is None else known
            size = round(every * (1 - (config.split or 0)))  # the size of a split is known only after reading
        if size == 0:
            raise ValueError(f"{len(urls)} shards contain no sample{why_none(urls, config)}")
    split = None if config.split is None else Split(config.split, "rest")
    reader = ShardReader(config.read_policy, index, split=split)
    weights = tuple(shard.weight for shard in shards) if config.dataset_resampled else None
    source = ShardSource(Addresses(urls), selector, config.shuffle_buffer, by_sample, reader, weights=weights)
    return source, size


def why_none(urls: Sequence[str], config: DataConfig) -> str:
    """Explain why shards without a fault have no sample; for a selection, list the fields of the first sample."""
    selector = Selector.parse(config.select)
    fits = f" that matches --select {config.select!r}" if config.select else ""
    raw = next(read_shard(urls[0], lambda fault: None, config.read_policy), {}) if fits else {}
    if selector is None or not has_image(raw):
        return f"{fits}: {survey(urls, config.read_policy)}"
    record = json_record(raw)
    there = [
        f"{name} {str(record[name])[:60]!r}" if name in record else f"no {name}" for name, *_ in selector.conditions
    ]
    return f"{fits}: the first sample has {', '.join(there)}; its fields are {', '.join(record)}"


def check_captions(rows: ImageRows, captions: CaptionSampler, kind: str) -> None:
    """Raise ValueError if no row has a caption; reads only the table."""
    why = ""
    for number in range(len(rows)):
        try:
            captions.draw(*caption_parts(rows.texts(number), captions), seed=0)
            return
        except SampleFault as fault:
            why = why or fault.message
    place = " (captions are subfolder names, or IMAGE.txt or IMAGE.json next to each image)"
    what = f"none of the {len(rows)} images has a caption{place if kind == 'images' else ''}"
    raise ValueError(f"{what}; {rows.rows[0].key}: {why}")


def source_of(config: DataConfig) -> NamedSource:
    """Return the kind and address of --train-data, by --dataset-type or recognised."""
    data, given = config.train_data, {"webdataset": "shards", "folder": "images"}.get(kind := config.dataset_type, kind)
    if given == "synthetic":
        return NamedSource(given, (data or "").removeprefix("synthetic:") if config.synthetic else "")
    if not data:
        raise ValueError("no training data. Give --train-data, for example --train-data 'data/emoji/noto.tar'")
    if given != "auto":
        return NamedSource(given, data.removeprefix(f"{given}:"))
    source = parse_source(data, "--train-data")
    if source.kind not in TRAINED:
        near = {"wds": "train on its tars, shards:FOLDER/train", "imagenet": "train on images:FOLDER"}
        remedy = near.get(source.kind, f"give one of {', '.join(KINDS[kind] for kind in TRAINED)}")
        what = f"--train-data {redacted(data)!r} is data of the kind {source.kind}, which is for evaluation only"
        raise ValueError(f"{what}: {remedy}")
    return source._replace(kind="shards") if source.kind == "emoji" else source


class Captioned(NamedTuple):
    """One sample for evaluation."""

    key: str
    pixels: Tensor  # (3, H, W)
    chances: dict[str, float]  # caption -> probability that training draws it


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
    """Yield this rank's share of at most `count` training samples, each once, decoded by threads.

    If config.captions is 0, a sample may have no caption. faults: counts unusable samples and raises above its limit.
    noise, source: from the loader; by default each rank builds its own.
    """
    source = source or build_source(config, ranks)[0]
    if isinstance(source, ShardSource):
        source = replace(source, by_sample=len(source.urls) < ranks and not source.weights)
    if isinstance(source, SyntheticSource):
        raise ValueError("synthetic data has no captions. Fit on real data")
    noise = make_noise(config, source) if noise is None else noise
    captions = config.sampler
    counter = FaultCounter(limit=config.max_bad_fraction) if faults is None else faults
    share = count // ranks + (rank < count % ranks)

    def decode(row: Row) -> Captioned | tuple[SampleFault, Row]:
        try:
            row = noise(row) if noise is not None else row
            try:
                chances = captions.chances(*caption_parts(row.raw, captions))
            except SampleFault:
                if config.captions:
                    raise
                chances = {}
            return Captioned(row.raw["__key__"], preprocess(decode_image(image_bytes(row.raw))), chances)
        except SampleFault as fault:
            return fault, row
        except Exception as error:  # for example, an image one pixel wide cannot be resized
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
