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

from prolip.data.faults import FaultCounter, SampleFault
from prolip.data.reading.entries import parent
from prolip.data.reading.folders import ImageRows, read_folder
from prolip.data.reading.images import CLASSES, captions_of, images_of, label_of
from prolip.data.reading.published.images import check_files
from prolip.data.reading.shards import expand_shards
from prolip.data.reading.tar import printable, read_shard
from prolip.data.samples.sample import Raw, image_bytes, json_record
from prolip.data.survey import SAMPLES, survey
from prolip.evaluation.datasets.base import WHOLE, DamagedData, Dataset, Kind, Sample, Share, fingerprint, note_fault
from prolip.evaluation.datasets.folders import lines_beside, names_of, open_folder, templates_of
from prolip.evaluation.datasets.places import archive_state, shard_marks
from prolip.evaluation.datasets.wds import CLASSNAMES, Reading, check_first, read_samples
from prolip.utils.messages import NAMED, first_few
from prolip.utils.secrecy import redacted

#: What is stated of an image: its captions and its class.
Stated = tuple[Sequence[str], str | None]


def open_rows(
    rows: ImageRows, place: str, name: str, task: Kind | None = None, damage: FaultCounter | None = None
) -> Dataset:
    """The images of a table or a folder. place: the folder of the table, or the folder itself, from which keys start.

    FileNotFoundError for images that are missing, DamagedData for those that lack what the task is about, unless
    `damage` counts them.
    """
    images = images_of(rows, place)
    kind = kind_of([(image.captions, image.label) for image in images], task, name)
    numbers, classnames = {}, ()
    if kind == "classification":
        numbers, classnames = classes_of({image.label for image in images if image.label}, Path(place))
        samples = [Sample(image.key, b"", numbers.get(image.label or "")) for image in images]
    else:
        samples = [Sample(image.key, b"", captions=image.captions or None) for image in images]
    lacking = [sample.key for sample in samples if sample.label is None and not sample.captions]
    if lacking and damage is None:
        what = f"{len(lacking)} of {len(images)} images of {name} have no {MEMBER[kind]} ({first_few(lacking, NAMED)})"
        raise DamagedData(f"{what}: write it, or give --skip-damaged to leave them out")
    paths = [rows.rows[image.row].path for image in images]
    sizes = check_files(paths, f"images of {name}")
    return Dataset(
        name=name,
        kind=kind,
        samples=partial(read_rows, rows, [(image.row, sample) for image, sample in zip(images, samples)], damage),
        fingerprint=fingerprint("rows", [(s.key, s.label, s.captions, size) for s, size in zip(samples, sizes)]),
        source=name,
        classnames=classnames,
        templates=templates_of(Path(place), list(numbers), None) if classnames else (),
        size=len(images),
        damage=damage,
    )


MEMBER = {"retrieval": "caption", "classification": "class"}


def read_rows(
    rows: ImageRows, files: Sequence[tuple[int, Sample]], damage: FaultCounter | None, share: Share = WHOLE
) -> Iterator[Sample]:
    """The samples with their bytes, in this order."""
    for number, (row, sample) in share.take(files):
        if damage is not None:
            damage.samples += 1
        try:
            if sample.label is None and not sample.captions:
                raise SampleFault("missing text", "it has no caption and no class")
            yield sample._replace(image=image_bytes(rows(row)), place=(0, number))
        except SampleFault as fault:
            note_fault(damage, fault, sample.key)


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
    numbers, classnames = {}, ()
    if kind == "classification":
        numbers, classnames = classes_of({label for _, label in stated(urls) if label}, folder)
    reading = Reading(urls, kind, len(classnames), damage, None, partial(parse_own, kind, numbers))
    marks = shard_marks(urls)
    check_first(reading)
    return Dataset(
        name=printable(Path(redacted(urls[0])).stem if len(urls) == 1 else folder.name),
        kind=kind,
        samples=partial(read_samples, reading),
        fingerprint=fingerprint("shards", kind, marks, sorted(numbers.items())),
        source=source,
        classnames=classnames,
        templates=templates_of(folder, list(numbers), None) if classnames else (),
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
    """The task of these images: the one that is asked for, else retrieval if there are captions. ValueError for none."""
    there: list[Kind] = ["retrieval"] if any(captions for captions, _ in known) else []
    there += ["classification"] if any(label for _, label in known) else []
    if not there or task not in (None, *there):
        what = {"retrieval": "captions", "classification": "classes"}.get(task or "", "captions and no classes")
        raise ValueError(f"{name} has no {what}: classes are in a column or field {' or '.join(CLASSES[:2])}")
    return task or there[0]


def classes_of(labels: Set[str], folder: Path) -> tuple[dict[str, int], tuple[str, ...]]:
    """The number of each label, and the names of all classes: those of classnames.txt beside the data, else the labels.

    Numbers are lines of that file, from 0. Without it classes are in the order of their labels.
    """
    lines = lines_beside(folder, CLASSNAMES, None) or ()
    if lines and all(label.isdecimal() and int(label) < len(lines) for label in labels):
        return {label: int(label) for label in labels}, lines
    if labels <= set(lines):
        return {label: lines.index(label) for label in labels}, lines
    order = sorted(labels, key=lambda label: (int(label) if label.isdecimal() else -1, label))
    return {label: number for number, label in enumerate(order)}, names_of(folder, order, None)
