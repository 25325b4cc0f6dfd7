"""Own data as test sets: the rows of a table, images in a folder, training shards.

Images with captions are retrieval, those with classes alone classification; of data with both, `task` chooses.
"""
from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from prolip.data.faults import FaultCounter, SampleFault
from prolip.data.reading.entries import parent
from prolip.data.reading.folders import ImageRows, read_folder
from prolip.data.reading.images import CLASSES, captions_of, images_of, label_of
from prolip.data.reading.shards import expand_shards
from prolip.data.reading.tar import printable, read_shard
from prolip.data.samples.sample import Raw, image_bytes, json_record
from prolip.data.survey import SAMPLES, survey
from prolip.evaluation.datasets.base import DamagedData, Dataset, Kind, Sample, fingerprint
from prolip.evaluation.datasets.captioned import captioned
from prolip.evaluation.datasets.folders import lines_beside, names_of, open_folder, templates_of
from prolip.evaluation.datasets.places import archive_state, shard_marks
from prolip.evaluation.datasets.wds import CLASSNAMES, Reading, check_first, read_samples
from prolip.utils.messages import NAMED, first_few
from prolip.utils.secrecy import redacted

#: What is stated of an image: its captions and its class.
Stated = tuple[Sequence[str], str | None]


class Classes(NamedTuple):
    """numbers: of the classes by their labels in the data; the names of all classes, and the prompts."""

    numbers: dict[str, int]
    names: tuple[str, ...] = ()
    prompts: tuple[str, ...] = ()


def open_rows(
    rows: ImageRows, place: str, name: str, task: Kind | None = None, damage: FaultCounter | None = None
) -> Dataset:
    """The images of a table or a folder. place: the folder of the table, or the folder itself, from which keys start.

    FileNotFoundError for images that are missing, DamagedData for some without captions, or without a class; `damage`
    counts those.
    """
    images = images_of(rows, place)
    known = [label_of(image.facts) for image in images]
    kind = kind_of([(image.captions, label) for image, label in zip(images, known)], task, name)
    labels, classes = None, Classes({})
    if kind == "retrieval":
        lacking = [image.key for image in images if not image.captions]
    else:
        classes = classes_of({label for label in known if label}, Path(place))
        labels = [classes.numbers.get(label or "") for label in known]
        lacking = [image.key for image, label in zip(images, labels) if label is None]
        images = [image._replace(captions=()) for image in images]
    if lacking and damage is None:
        what = "caption" if kind == "retrieval" else "class"
        raise DamagedData(f"{len(lacking)} of {len(images)} images of {name} have no {what}"
                          f" ({first_few(lacking, NAMED)}): write it, or give --skip-damaged to leave them out")
    found = captioned("rows", name, name, name, images, {}, damage, labels)
    return replace(found, kind=kind, classnames=classes.names, templates=classes.prompts)


def open_images(folder: str, task: Kind | None = None, damage: FaultCounter | None = None) -> Dataset:
    """A folder of images: with captions beside them retrieval, in class folders without any classification."""
    rows, name = read_folder(folder), printable(os.path.basename(os.path.abspath(folder)))
    if task != "retrieval" and all(row.caption and row.caption == row.record.get("class") for row in rows.rows):
        return open_folder(folder, damage=damage)
    return open_rows(rows, folder, name, task, damage)


def open_shards(address: str, task: Kind | None = None, damage: FaultCounter | None = None) -> Dataset:
    """Training shards: the captions of `.txt` or `.json`, or the classes of `.cls` or `.json`.

    classnames.txt and zeroshot_classification_templates.txt may lie beside them. DamagedData for shards that cannot be
    read, ValueError for samples with neither captions nor classes.
    """
    urls, source = tuple(shard.url for shard in expand_shards(address)), redacted(address)
    first = list(islice(stated(urls), SAMPLES))
    if not first:
        raise DamagedData(f"no sample in {source}: {survey(urls)}")
    kind, folder = kind_of(first, task, source), Path(parent(urls[0]))
    classes = Classes({})
    if kind == "classification":
        classes = classes_of({label for _, label in stated(urls) if label}, folder)
    reading = Reading(urls, kind, len(classes.names), damage, None, partial(parse_own, kind, classes.numbers))
    marks = shard_marks(urls)
    check_first(reading)
    return Dataset(
        name=printable(Path(redacted(urls[0])).stem if len(urls) == 1 else folder.name),
        kind=kind,
        samples=partial(read_samples, reading),
        fingerprint=fingerprint("shards", kind, marks, sorted(classes.numbers.items())),
        source=source,
        classnames=classes.names,
        templates=classes.prompts,
        info={"shards": len(urls)},
        damage=damage,
        state=archive_state(urls),
    )


def stated(urls: Iterable[str]) -> Iterator[Stated]:
    """What all samples of shards state that can be read; what cannot is reported when their images are read."""
    for url in urls:
        with suppress(SampleFault):
            for raw in read_shard(url, lambda fault: None):
                with suppress(SampleFault):
                    yield stated_by(raw)


def stated_by(raw: Raw) -> Stated:
    """The captions and the class of a sample. SampleFault for a text or a JSON that cannot be read."""
    if "cls" in raw:
        return captions_of(raw), raw["cls"].decode(errors="replace").strip()
    return captions_of(raw), label_of(json_record(raw)) if "json" in raw else None


def parse_own(kind: Kind, numbers: dict[str, int], raw: Raw) -> Sample:
    """A sample of a shard. SampleFault for what is missing or makes no sense."""
    key, image, (captions, label) = raw["__key__"], image_bytes(raw), stated_by(raw)
    if kind == "retrieval":
        if not captions:
            raise SampleFault("missing text", "it has no caption in txt or json")
        return Sample(key, image, captions=tuple(captions))
    if label not in numbers:
        raise SampleFault("missing label" if label is None else "bad label", f"its class is {label}")
    return Sample(key, image, numbers[label])


def kind_of(known: Sequence[Stated], task: Kind | None, name: str) -> Kind:
    """The task that is asked for, else retrieval if there are captions. ValueError for data without what it takes."""
    there: list[Kind] = ["retrieval"] if any(captions for captions, _ in known) else []
    there += ["classification"] if any(label for _, label in known) else []
    if not there or task not in (None, *there):
        what = {"retrieval": "captions", "classification": "classes"}.get(task or "", "captions and no classes")
        raise ValueError(f"{name} has no {what}: classes are in a column or field {' or '.join(CLASSES[:2])}")
    return task or there[0]


def classes_of(labels: Set[str], folder: Path) -> Classes:
    """The classes of data with these labels, by the files beside the data that name classes and prompts.

    Labels that are numbers are lines of classnames.txt, from 0. Without it classes are in the order of their labels.
    """
    order = sorted(labels, key=lambda label: (int(label) if label.isdecimal() else -1, label))
    lines = lines_beside(folder, CLASSNAMES, None) or ()
    if lines and all(label.isdecimal() and int(label) < len(lines) for label in labels):
        numbers = {label: int(label) for label in order}
    else:
        numbers = {label: number for number, label in enumerate(order)}
        lines = names_of(folder, order, None)
    return Classes(numbers, lines, templates_of(folder, order, None))
