"""Data sets by a word and an address, or by a bare path whose kind is recognised, as commands take them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from prolip.data.reading.named import KINDS, ROWS, parse_source
from prolip.data.sets import SETS
from prolip.data.split import Split, parse_split

if TYPE_CHECKING:
    from typing import Any

    from prolip.data.faults import FaultCounter
    from prolip.evaluation.datasets.base import Dataset, Kind, Sample, Share
    from prolip.evaluation.metrics.blockwise import Further


class Reader(NamedTuple):
    """A reader, whether it has splits, and whether it takes the source itself and a task, or the address alone.

    open: module of this folder and function, which is imported late, as the command line shows the forms.
    """

    open: str
    splits: bool = False
    by_source: bool = False


READERS = {
    **dict.fromkeys(ROWS, Reader("own.open_rows", by_source=True)),
    **dict.fromkeys(SETS, Reader("captioned.open_published", splits=True, by_source=True)),
    "shards": Reader("own.open_shards", by_source=True),
    "wds": Reader("wds.open_wds", splits=True),
    "imagenet": Reader("folders.open_folder"),
    "captions": Reader("tables.open_caption_table"),
    "winogavil": Reader("tables.open_winogavil"),
}
FORMS = ", ".join(KINDS[kind] for kind in READERS)


def further_of(info: dict[str, Any]) -> Further | None:
    """What the labels of a data set with this `info` add to its metrics, where only its description is left."""
    from prolip.evaluation.datasets.coco import FURTHER

    return FURTHER if "caption_ids" in info else None


def has_splits(spec: str) -> bool:
    """Whether the data that a word means come in splits; False for an unknown word."""
    reader = READERS.get(spec.partition(":")[0])
    return reader is not None and reader.splits


def open_dataset(
    spec: str, split: str | None = None, damage: FaultCounter | None = None, task: Kind | None = None
) -> Dataset:
    """The data set that a word and its addresses name; ValueError for another word or number of addresses.

    split: of readers that have splits, default test; of all readers a number: the share of the images that is held out
    by their content. task: of own data that have both captions and classes; other sets have one. Errors of the readers
    pass through.
    """
    source, part = parse_source(spec, "the data set", READERS), parse_split(split)
    reader = READERS[source.kind]
    options: dict[str, Any] = {"split": part} if isinstance(part, str) else {}
    if options and not reader.splits:
        raise ValueError(f"{KINDS[source.kind]} has no splits: drop --split {split}, or give a share such as 0.1")
    module, _, name = reader.open.partition(".")
    open_it = getattr(import_module(f"prolip.evaluation.datasets.{module}"), name)
    given = [source, task] if reader.by_source else [source.address]
    found: Dataset = open_it(*given, **options, damage=damage)
    return held_out(found, part) if isinstance(part, Split) else found


def held_out(dataset: Dataset, part: Split) -> Dataset:
    """The images that a share holds out. ValueError where matches name captions by their place, which then changes."""
    if dataset.relevance is not None or dataset.associations:
        raise ValueError(f"{dataset.source} lists its matches by place: it cannot be split, drop --split {part.share}")
    info = {name: value for name, value in dataset.info.items() if not name.endswith("_ids")} | {"split": part.share}
    return replace(
        dataset,
        name=f"{dataset.name}_{part.share:g}",
        size=None,
        info=info,
        further=None,
        samples=partial(held_samples, dataset, part),
        fingerprint=f"{dataset.fingerprint}-{part.share}",
    )


def held_samples(dataset: Dataset, part: Split, *share: Share) -> Iterator[Sample]:
    """The samples of a share that are on this side of a split."""
    return (sample for sample in dataset.samples(*share) if part.takes(sample.image))


def told_apart(datasets: Sequence[Dataset]) -> list[Dataset]:
    """The same sets; those that have one name are called by their addresses."""
    counts = Counter(dataset.name for dataset in datasets)
    return [replace(dataset, name=dataset.source) if counts[dataset.name] > 1 else dataset for dataset in datasets]
