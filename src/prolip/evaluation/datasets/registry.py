"""Data sets by a word and an address, or by a path of a recognised kind, as in commands.

A new format is a module here with a function that returns a `Dataset`, and a line in READERS (example:
docs/developing/add_a_task.md). A set of captioned images is a function and a line of `prolip.data.sets`, which
training also reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from prolip.data.reading.named import KINDS, ROWS, NamedSource, parse_source
from prolip.data.sets import SETS
from prolip.data.split import Split, parse_split

if TYPE_CHECKING:
    from prolip.data.faults import FaultCounter
    from prolip.evaluation.datasets.base import Dataset, Kind, Sample, Share


class SetReader(NamedTuple):
    """The reader of a kind of test set."""

    open: str  # module of this folder and function, imported late, so that the command line starts fast
    splits: bool = False
    by_source: bool = False  # True: it takes the source and a task; False: only the address
    form: str = ""  # what a user types, for a word that is not in KINDS


READERS = {
    **dict.fromkeys(ROWS, SetReader("own.open_rows", by_source=True)),
    **dict.fromkeys(SETS, SetReader("published.open_published", splits=True, by_source=True)),
    "shards": SetReader("own.open_shards", by_source=True),
    "wds": SetReader("webdataset.open_wds", splits=True),
    "imagenet": SetReader("own.open_folder"),
    "captions": SetReader("published.open_caption_table"),
    "winogavil": SetReader("published.open_winogavil"),
}
FORMS = ", ".join(reader.form or KINDS[word] for word, reader in READERS.items())


def has_splits(spec: str) -> bool:
    """Return True if the data of this kind have splits; False for an unknown word."""
    reader = READERS.get(spec.partition(":")[0])
    return reader is not None and reader.splits


def open_dataset(
    spec: str, split: str | None = None, damage: FaultCounter | None = None, task: Kind | None = None
) -> Dataset:
    """Open the data set of a word and its addresses.

    split: a name (default test), or a number: the held-out share of the images, by content. task: for own data with
    both captions and classes.
    """
    word, _, address = spec.partition(":")
    own_form = word in READERS and READERS[word].form and address
    source = NamedSource(word, address) if own_form else parse_source(spec, "the data set", READERS)
    reader, part = READERS[source.kind], parse_split(split)
    options: dict[str, Any] = {"split": part} if isinstance(part, str) else {}
    if options and not reader.splits:
        form = reader.form or KINDS[source.kind]
        raise ValueError(f"{form} has no splits: drop --split {split}, or give a share such as 0.1")
    module, _, name = reader.open.partition(".")
    open_it = getattr(import_module(f"prolip.evaluation.datasets.{module}"), name)
    given = [source, task] if reader.by_source else [source.address]
    found: Dataset = open_it(*given, **options, damage=damage)
    return held_out(found, part) if isinstance(part, Split) else found


def held_out(dataset: Dataset, part: Split) -> Dataset:
    """Return the images that a share holds out. ValueError if matches are by caption number, which would change."""
    if dataset.relevance is not None or dataset.associations:
        raise ValueError(f"{dataset.source} lists its matches by place and cannot be split: drop --split {part.share}")
    return replace(
        dataset,
        name=f"{dataset.name}_{part.share:g}",
        size=None,
        info={name: x for name, x in dataset.info.items() if not name.endswith("_ids")} | {"split": part.share},
        samples=partial(samples_of, dataset, part),  # partial: ranks pickle it
        fingerprint=f"{dataset.fingerprint}-{part.share}",
    )


def samples_of(dataset: Dataset, part: Split, *share: Share) -> Iterator[Sample]:
    """Return the samples of one part of a data set."""
    return (sample for sample in dataset.samples(*share) if part.takes(sample.image))


def told_apart(datasets: Sequence[Dataset]) -> list[Dataset]:
    """Return the sets; name those with equal names by their addresses."""
    counts = Counter(dataset.name for dataset in datasets)
    return [replace(dataset, name=dataset.source) if counts[dataset.name] > 1 else dataset for dataset in datasets]
