"""Settings of the training data, checked as far as possible without reading files."""

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

#: Samples per rank that loaders prepare ahead by default, and the bounds of the chunks per worker.
SAMPLES_AHEAD, LEAST_AHEAD, MOST_AHEAD = 2048, 2, 32
MOST_WORKERS = 8  # most workers of a rank by default
#: Batch sizes per rank to choose from by default, and the least number of batches per epoch.
BATCH_SIZES, LEAST_BATCHES = (64, 32, 16, 8), 3


@dataclass(kw_only=True, frozen=True)
class DataConfig:
    """The data and how to read it, with OpenCLIP's names where it has the flag."""

    train_data: str | None = option(
        None,
        "KIND:ADDRESS, or an address whose kind is recognised: shards:TARS (paths, URLs or pipe: commands, brace "
        "patterns, sources joined by '::'), csv:FILE, parquet:FILE, jsonl:FILE, images:FOLDER, synthetic:SAMPLES, "
        f"{FORMS}",
    )
    train_split: str | None = option(
        None, "splits of a published set, joined by '+'; default: train, for COCO train+restval"
    )
    split: float | None = option(None, "share of the images to hold out by content; evaluated without --val-data")
    train_data_upsampling_factors: str | None = option(None, "factors of the sources, as 1::2, for --dataset-resampled")
    train_num_samples: int | None = option(None, "samples per epoch; default: from sizes.json, __len__ or by counting")
    dataset_type: DatasetType = option("auto", "kind of --train-data; auto: by its prefix, suffix or content")
    dataset_resampled: bool = option(False, "draw shards with replacement")
    batch_size: int = option(AUTO, "samples per step and rank, a multiple of --workers; auto: at most 64", also=AUTO)
    workers: int | None = option(None, "loader processes per rank; default: its cores, at most 8; 0: no processes")
    csv_img_key: str | None = option(None, "table column with the image path; default: recognised")
    csv_caption_key: str | None = option(None, "table column with the caption; default: recognised")
    csv_separator: str | None = option(None, r"CSV separator, \t is a tab; default: recognised")
    csv_quoting: Literal["csv", "none"] = option("csv", "csv: quotation marks enclose cells; none: they are plain text")
    image_root: str | None = option(None, "folder of a table's relative paths; default: its own or the working folder")
    caption_sampling: str = option(
        "txt",
        "fields to draw each epoch's caption from, with optional weights: txt is the plain caption, other "
        "names are JSON fields (CSV columns), e.g. name:2,keywords:1,subgroup,group",
    )
    caption_templates: tuple[str, ...] = option((), "prompts with {} for a caption: 'a photo of {}' 'a {} icon'")
    caption_template_shares: dict[str, float] = option({}, "share of a field's captions that get a template: name=0.2")
    word_drop: float = option(0.0, "share of words to drop from captions, drawn again each epoch; one word stays")
    select: str | None = option(None, "keep samples with these values: 'group=animals nature|food drink;style!=noto'")
    noise_ratio: float = option(0.0, "share of captions to give to other samples for the whole run; see noise.jsonl")
    noise_seed: int = option(0, "seed of this choice of captions; independent of --seed")
    shard_index: str | None = option(None, "shard index (prolip data index) to count and check; default: next to them")
    read_timeout: float = option(ReadPolicy.read_timeout, "seconds without a byte after which to retry a shard")
    read_retries: int = option(ReadPolicy.retries, "consecutive failures after which a shard is skipped")
    shuffle_buffer: int = option(5000, "samples in each stream's shuffle buffer; 1: off")
    max_bad_fraction: float = option(0.01, "stop if more than this fraction of samples or shards is unusable")
    captions: int = option(1, "texts drawn per image; 0: read none", follows="the method")
    known_matches: bool = option(False, "add the identities of all captions to batches", follows="the method")
    unpaired: bool = option(False, "give every image another text of its batch", follows="the method")
    seed: int = option(0, "seed of order, captions and augmentation", follows="run.seed")
    prefetch: int | None = option(
        None, f"chunks that a worker prepares ahead; default: {SAMPLES_AHEAD:,} samples, 2 to 32"
    )

    @property
    def synthetic(self) -> bool:
        """True if the data is generated."""
        return self.dataset_type == "synthetic" or (self.train_data or "").startswith("synthetic:")

    @property
    def read_policy(self) -> ReadPolicy:
        """Timeouts and retries of shards, which may be commands; ValueError."""
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
            what = "is not a single character that can separate cells"
            raise ValueError(f"--csv-separator {sign!r} {what}: give one such as ',' or '\\t'")
        with naming("--select"):
            Selector.parse(self.select)
        _ = self.sampler  # validates the sampling settings
        if self.known_matches and self.captions != 1:
            raise ValueError(f"captions is {self.captions} with known matches: give 1")
        if self.word_drop and (self.synthetic or self.captions == 0):
            raise ValueError(f"--word-drop {self.word_drop}: this run reads no captions. Leave the flag out")
        reasons = {
            "noise reads all captions first, --dataset-resampled none. Remove one of them": self.dataset_resampled,
            "synthetic data has no captions to shuffle": self.synthetic,
            "this method reads no captions": self.captions == 0,
            "this method does not pair images with their own captions": self.unpaired,
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
                what = "--train-data-upsampling-factors apply only to shards drawn with replacement"
                raise ValueError(f"{what}: add --dataset-resampled, or leave the factors out")
            from prolip.data.reading.shards import parse_factors  # late: it imports torch, which flags do not need

            parse_factors(factors, len((self.train_data or "").split("::")))


def chunks_ahead(prefetch: int | None, batch_size: int) -> int:
    """Return the chunks, and so batches, that each worker prepares: `prefetch`, or enough for SAMPLES_AHEAD."""
    ahead = min(MOST_AHEAD, max(LEAST_AHEAD, math.ceil(SAMPLES_AHEAD / batch_size)))
    return ahead if prefetch is None else prefetch


def fitting_workers(batch_size: Any, most: int, unpaired: bool = False) -> int:
    """Return the most workers, up to `most` and MOST_WORKERS, that divide a batch; unpaired: two samples each."""
    batch_size = BATCH_SIZES[-1] if batch_size == AUTO else batch_size
    most = min(most, MOST_WORKERS, batch_size // 2 if unpaired else batch_size)
    return max((count for count in range(1, most + 1) if batch_size % count == 0), default=1)


def fitting_batch(samples: int, ranks: int, workers: int) -> int:
    """Return the largest of BATCH_SIZES, a multiple of `workers`, for LEAST_BATCHES an epoch; else the smallest."""
    sizes = [size // max(workers, 1) * max(workers, 1) for size in BATCH_SIZES if size >= workers]
    fitting = [size for size in sizes if math.ceil(samples / (size * ranks)) >= LEAST_BATCHES]
    return (fitting or sizes[-1:] or [workers])[0]
