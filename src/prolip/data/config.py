"""The settings of the training data, checked as far as that needs no file."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from prolip.data.captions import CaptionSampler, Selector
from prolip.data.reading.remote import ReadPolicy
from prolip.data.sets import FORMS, SETS
from prolip.data.split import parse_split
from prolip.utils.fields import AUTO, option
from prolip.utils.flags import check_range
from prolip.utils.messages import naming

DatasetType = Literal[
    "auto", "webdataset", "csv", "parquet", "jsonl", "folder", "coco", "flickr", "cub", "iapr", "synthetic"
]

#: Samples of a rank that wait ready by default, and the bounds of the chunks per worker that hold them.
SAMPLES_AHEAD, LEAST_AHEAD, MOST_AHEAD = 2048, 2, 32
MOST_WORKERS = 8  # of a rank, by default
#: Batch sizes of a rank to choose from where none is given, and the least batches of an epoch.
BATCH_SIZES, LEAST_BATCHES = (64, 32, 16, 8), 3


@dataclass(kw_only=True, frozen=True)
class DataConfig:
    """Which data, and how to read it; the names are OpenCLIP's where it has the flag."""

    train_data: str | None = option(
        None,
        "KIND:ADDRESS, or an address whose kind is recognised: shards:TARS (paths, URLs or pipe: commands, brace "
        "patterns, sources joined by '::'), csv:FILE, parquet:FILE, jsonl:FILE, images:FOLDER, synthetic:SAMPLES, "
        f"{FORMS}",
    )
    train_split: str | None = option(
        None, "splits of a published set, joined by '+'; default: train, COCO train+restval"
    )
    split: float | None = option(None, "share of the images held out by content; evaluated without --val-data")
    train_data_upsampling_factors: str | None = option(None, "one per source, joined by '::', for --dataset-resampled")
    train_num_samples: int | None = option(None, "samples per epoch; default: by sizes.json, __len__ or a count")
    dataset_type: DatasetType = option("auto", "the kind of --train-data; auto: by its word, suffix or content")
    dataset_resampled: bool = option(False, "draw shards with replacement")
    batch_size: int = option(AUTO, "samples per step and rank, a multiple of --workers; auto: at most 64", also=AUTO)
    workers: int | None = option(None, "loader processes per rank; default: its cores, at most 8; 0: the rank loads")
    csv_img_key: str | None = option(None, "column of a table with the image's path; default: recognised")
    csv_caption_key: str | None = option(None, "column of a table with the caption; default: recognised")
    csv_separator: str | None = option(None, r"CSV separator, \t is a tab; default: recognised")
    csv_quoting: Literal["csv", "none"] = option("csv", "quotation marks enclose cells; none: they are plain text")
    image_root: str | None = option(None, "start of a table's relative paths; default: its folder or the working one")
    caption_sampling: str = option(
        "txt",
        "fields to draw each epoch's caption from, with optional weights: txt is the plain caption, other "
        "names are JSON fields (CSV columns), e.g. name:2,keywords:1,subgroup,group",
    )
    caption_templates: tuple[str, ...] = option((), "prompts with {} for a caption: 'a photo of {}' 'a {} icon'")
    caption_template_shares: dict[str, float] = option({}, "share of a field's captions in a template: name=0.2")
    word_drop: float = option(0.0, "share of the words that captions lose, other ones in each epoch; one word stays")
    select: str | None = option(None, "keep samples whose JSON fits: 'group=animals nature|food drink;style!=noto'")
    noise_ratio: float = option(0.0, "share of the captions given to other samples for the whole run: noise.jsonl")
    noise_seed: int = option(0, "which captions these are, and where they go; --seed has no say in it")
    shard_index: str | None = option(None, "shard index (prolip data index) to count and check; default: beside shards")
    read_timeout: float = option(ReadPolicy.read_timeout, "seconds without a byte after which a shard's source stalls")
    read_retries: int = option(ReadPolicy.retries, "failures in a row after which a shard is given up")
    shuffle_buffer: int = option(5000, "samples in each stream's shuffle buffer; 1 is off")
    max_bad_fraction: float = option(0.01, "stop when more than this fraction of samples or shards cannot be used")
    captions: int = option(1, "texts drawn for each image; 0: none is read", follows="the method")
    known_matches: bool = option(False, "add the identities of all captions to batches", follows="the method")
    unpaired: bool = option(False, "give no image its own text, but one of its batch", follows="the method")
    seed: int = option(0, "seed of order, captions and augmentation", follows="run.seed")
    prefetch: int | None = option(
        None, f"chunks that a worker prepares ahead; default: {SAMPLES_AHEAD:,} samples, 2 to 32"
    )

    @property
    def synthetic(self) -> bool:
        """Whether the data is generated."""
        return self.dataset_type == "synthetic" or (self.train_data or "").startswith("synthetic:")

    @property
    def read_policy(self) -> ReadPolicy:
        """Time-outs and retries of shards, which may be commands; ValueError."""
        return ReadPolicy(read_timeout=self.read_timeout, retries=self.read_retries, pipes=True)

    @property
    def sampler(self) -> CaptionSampler:
        """The sampler of captions; ValueError for fields, templates and shares that cannot be used."""
        return CaptionSampler.parse(self.caption_sampling, self.caption_templates, self.caption_template_shares)

    def __post_init__(self) -> None:
        check_range(self, "read_timeout", above=True)
        check_range(self, "batch_size", "train_num_samples", "shuffle_buffer", "prefetch", least=1)
        check_range(self, "read_retries", "workers", "captions")
        check_range(self, "word_drop", most=1, below=True, remedy=", such as 0.1")
        check_range(self, "max_bad_fraction", most=1, remedy=", such as 0.01")
        check_range(self, "noise_ratio", most=1, remedy=", such as 0.2")
        check_range(self, "noise_seed", most=2**63 - 1)
        if self.csv_separator == r"\t":
            object.__setattr__(self, "csv_separator", "\t")
        if self.dataset_type not in get_args(DatasetType):
            raise ValueError(f"--dataset-type {self.dataset_type!r}: use one of {', '.join(get_args(DatasetType))}")
        parse_split(None if self.split is None else str(self.split))
        word, *address = (self.train_data or "").split(":", 1)
        if self.train_split is not None and self.dataset_type not in SETS and not (address and word in SETS):
            raise ValueError(f"--train-split {self.train_split}, but --train-data has no splits: these have: {FORMS}")
        if (sign := self.csv_separator) is not None and (len(sign) != 1 or sign in '"\r\n\0'):
            what = "is not one character that may stand between cells"
            raise ValueError(f"--csv-separator {sign!r} {what}: give e.g. ',' or '\\t'")
        with naming("--select"):
            Selector.parse(self.select)
        _ = self.sampler  # which checks its settings
        if self.known_matches and self.captions != 1:
            raise ValueError(f"captions is {self.captions} with known matches: give 1")
        if self.word_drop and (self.synthetic or self.captions == 0):
            raise ValueError(f"--word-drop {self.word_drop}: no captions are read, so no words: leave it out")
        reasons = {
            "--dataset-resampled reads no caption beforehand, as noise must: leave one out": self.dataset_resampled,
            "synthetic data has no captions to shuffle": self.synthetic,
            "this method reads no captions": self.captions == 0,
            "this method pairs no image with its own caption": self.unpaired,
        }
        if self.noise_ratio and any(reasons.values()):
            raise ValueError(
                f"--noise-ratio {self.noise_ratio}: {next(why for why, holds in reasons.items() if holds)}"
            )
        workers = self.workers or 1
        batch = 2 * workers if self.batch_size == AUTO else self.batch_size
        if low := batch % workers:
            sizes = " or ".join(str(size) for size in (batch - low, batch - low + workers) if size)
            fits = max(count for count in range(1, workers) if batch % count == 0)
            what = f"--batch-size {batch} is not divisible by {workers} workers"
            raise ValueError(f"{what}: use --batch-size {sizes}, or --workers {fits}")
        if self.unpaired and (self.known_matches or batch // workers < 2):
            what = f"unpaired texts, {self.batch_size} samples of {workers} workers"
            raise ValueError(f"{what}: give two samples or more for each worker, and no known matches")
        if (factors := self.train_data_upsampling_factors) is not None:
            if not self.dataset_resampled:
                what = "--train-data-upsampling-factors weigh the drawing of shards with replacement"
                raise ValueError(f"{what}: add --dataset-resampled, or leave the factors out")
            from prolip.data.reading.shards import parse_factors  # late: it imports torch, and flags need none

            parse_factors(factors, len((self.train_data or "").split("::")))


def chunks_ahead(prefetch: int | None, batch_size: int) -> int:
    """Chunks, and so batches, that each worker prepares ahead: `prefetch`, or what holds SAMPLES_AHEAD of a rank."""
    ahead = min(MOST_AHEAD, max(LEAST_AHEAD, math.ceil(SAMPLES_AHEAD / batch_size)))
    return ahead if prefetch is None else prefetch


def fitting_workers(batch_size: Any, most: int, unpaired: bool = False) -> int:
    """The most loader processes, up to `most` and MOST_WORKERS, that divide a batch; unpaired: two samples each."""
    batch_size = BATCH_SIZES[-1] if batch_size == AUTO else batch_size
    most = min(most, MOST_WORKERS, batch_size // 2 if unpaired else batch_size)
    return max((count for count in range(1, most + 1) if batch_size % count == 0), default=1)


def fitting_batch(samples: int, ranks: int, workers: int) -> int:
    """The largest of BATCH_SIZES, as a multiple of `workers`, that gives an epoch LEAST_BATCHES; else the smallest."""
    sizes = [size // max(workers, 1) * max(workers, 1) for size in BATCH_SIZES if size >= workers]
    fitting = [size for size in sizes if math.ceil(samples / (size * ranks)) >= LEAST_BATCHES]
    return (fitting or sizes[-1:] or [workers])[0]
