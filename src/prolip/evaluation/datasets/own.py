"""Own data as test sets: the rows of a table, images in a folder, training shards.

Images with captions are retrieval, those with classes alone classification; of data with both, `task` chooses.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from prolip.data.faults import DamagedData, FaultCounter, SampleFault
from prolip.data.reading.folders import ImageRows
from prolip.data.reading.named import NamedSource
from prolip.data.reading.rows import Stated, base_of, file_of, key_of, read_rows, stated_by, stated_by_row
from prolip.data.reading.shard_index import parent
from prolip.data.reading.shards import expand_shards
from prolip.data.reading.stream import local_path
from prolip.data.reading.tar import SAMPLES, printable, read_shard, survey
from prolip.data.samples import Raw, image_bytes
from prolip.data.sets.base import check_files
from prolip.evaluation.datasets.base import Dataset, Kind, Sample, fingerprint, read_images
from prolip.evaluation.datasets.imagefolder import lines_beside, names_of, open_folder, templates_of
from prolip.evaluation.datasets.sources import archive_state, file_mark, shard_marks
from prolip.evaluation.datasets.webdataset import CLASSNAMES, Reading, check_first, read_samples
from prolip.utils.messages import NAMED, first_few
from prolip.utils.secrecy import redacted


class Classes(NamedTuple):
    """numbers: of the classes by their labels in the data; the names of all classes, and the prompts."""

    numbers: dict[str, int]
    names: tuple[str, ...] = ()
    prompts: tuple[str, ...] = ()


def open_rows(source: NamedSource, task: Kind | None = None, damage: FaultCounter | None = None) -> Dataset:
    """The images of a table or a folder, each with all of its captions, or with its class.

    Errors of `read_rows`, and DamagedData for images without captions, or without a class; `damage` counts these.
    """
    every = read_rows(source, max_bad=None if damage is None else 1.0)
    rows, base, address = every.rows, base_of(source), source.address
    known = [stated_by_row(row) for row in rows]
    kind = kind_of(known, task, address)
    if source.kind == "images" and kind == "classification" and all(row.caption == row.record["class"] for row in rows):
        return open_folder(address, damage=damage)
    classes = classes_of(kind, known, Path(base))
    samples = [sample_of(kind, classes, key_of(row, base), stated) for row, stated in zip(rows, known)]
    if damage is None:
        if lacking := [sample.key for sample in samples if is_bare(sample)]:
            what = f"{first_few(lacking, NAMED)} of {address} have no {'class' if classes.names else 'caption'}"
            raise DamagedData(f"{what}: write it, or give --skip-damaged to leave them out")
        check_files([file_of(row) for row in rows], f"images of {address}")
    tables = {path: file_mark(path) for path in {file_of(row) for row in rows if row.inside}}
    marks = [tables.get(file_of(row)) or (os.path.isfile(row.path) and os.path.getsize(row.path)) for row in rows]
    return Dataset(
        name=printable(Path(local_path(address.partition(",")[0])).absolute().stem),
        kind=kind,
        samples=partial(read_images, partial(read_row, samples, every), samples, damage),  # which ranks send each other
        fingerprint=fingerprint("rows", [(x.key, x.label, x.captions, mark) for x, mark in zip(samples, marks)]),
        source=str(source),
        classnames=classes.names,
        templates=classes.prompts,
        size=len(samples),
        damage=damage,
    )


def open_shards(source: NamedSource, task: Kind | None = None, damage: FaultCounter | None = None) -> Dataset:
    """Training shards: the captions of `.txt` or `.json`, or the classes of `.cls` or `.json`.

    DamagedData for shards that cannot be read, ValueError for samples with neither captions nor classes.
    """
    urls, address = tuple(shard.url for shard in expand_shards(source.address)), redacted(source.address)
    first, marks = list(islice(stated(urls), SAMPLES)), shard_marks(urls)
    if not first:
        raise DamagedData(f"no sample in {address}: {survey(urls)}")
    kind, folder = kind_of(first, task, address), Path(parent(urls[0]))
    classes = classes_of(kind, stated(urls) if kind == "classification" else (), folder)
    reading = Reading(urls, kind, partial(parse_sample, kind, classes), damage)
    check_first(reading)
    return Dataset(
        name=printable(folder.name if len(urls) > 1 or os.path.isdir(source.address) else Path(redacted(urls[0])).stem),
        kind=kind,
        samples=partial(read_samples, reading),
        fingerprint=fingerprint("shards", kind, marks, sorted(classes.numbers.items())),
        source=f"shards:{address}",
        classnames=classes.names,
        templates=classes.prompts,
        info={"shards": len(urls)},
        damage=damage,
        state=archive_state(urls),
    )


def read_row(samples: Sequence[Sample], rows: ImageRows, number: int) -> Raw:
    """One row as shards hold it; SampleFault as `checked`."""
    return checked(samples[number], rows(number))


def parse_sample(kind: Kind, classes: Classes, raw: Raw) -> Sample:
    """One sample of a shard; SampleFault as `checked`."""
    sample = sample_of(kind, classes, raw["__key__"], stated_by(raw))
    return sample._replace(image=image_bytes(checked(sample, raw)))


def stated(urls: Iterable[str]) -> Iterator[Stated]:
    """What samples of shards state; those that cannot be read are reported when their images are read."""
    for url in urls:
        with suppress(SampleFault):
            for raw in read_shard(url, lambda fault: None):
                with suppress(SampleFault):
                    yield stated_by(raw)


def is_bare(sample: Sample) -> bool:
    """Whether it has neither a caption nor a class."""
    return sample.label is None and not sample.captions


def checked(sample: Sample, raw: Raw) -> Raw:
    """The raw sample; SampleFault where the sample has neither a caption nor a class."""
    if is_bare(sample):
        raise SampleFault("missing text", "it has no caption, or none of the classes")
    return raw


def sample_of(kind: Kind, classes: Classes, key: str, known: Stated) -> Sample:
    """A sample without its bytes, with what the task is about."""
    captions, label = known
    if kind == "retrieval":
        return Sample(key, b"", captions=tuple(captions))
    return Sample(key, b"", classes.numbers.get(label or ""))


def kind_of(known: Sequence[Stated], task: Kind | None, address: str) -> Kind:
    """The task that is asked for, else retrieval if there are captions; those that only repeat the class count as none.

    ValueError for data without what the task takes.
    """
    captioned = any(captions and (task == "retrieval" or list(captions) != [label]) for captions, label in known)
    there: list[Kind] = ["retrieval"] if captioned else []
    there += ["classification"] if any(label for _, label in known) else []
    if not there or task not in (None, *there):
        what = {"retrieval": "captions", "classification": "classes"}.get(task or "", "captions and no classes")
        raise ValueError(f"{address} has no {what}: classes are in a column or field `label` or `class`, or in folders")
    return task or there[0]


def classes_of(kind: Kind, known: Iterable[Stated], folder: Path) -> Classes:
    """The classes of a classification, by the files beside the data that name classes and prompts.

    Labels that are numbers are lines of classnames.txt, from 0. Without it classes are in the order of their labels.
    """
    labels: Set[str] = {label for _, label in known if label} if kind == "classification" else set()
    if not labels:
        return Classes({})
    order = sorted(labels, key=lambda label: (int(label) if label.isdecimal() else -1, label))
    lines = lines_beside(folder, CLASSNAMES) or ()
    if lines and all(label.isdecimal() and int(label) < len(lines) for label in labels):
        return Classes({label: int(label) for label in order}, lines, templates_of(folder, order))
    numbers = {label: number for number, label in enumerate(order)}
    return Classes(numbers, names_of(folder, order), templates_of(folder, order))
