"""Own data as test sets: the rows of a table, images in a folder or in class folders, training shards.

Images with captions make a retrieval set, images with only classes a classification set; `task` decides if both exist.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from open_clip.zero_shot_metadata import IMAGENET_CLASSNAMES, OPENAI_IMAGENET_TEMPLATES
from timm.data import ImageNetInfo

from prolip.data.faults import DamagedData, FaultCounter, SampleFault
from prolip.data.reading.folders import ImageRows, rows_of
from prolip.data.reading.named import NamedSource
from prolip.data.reading.rows import Stated, base_of, file_of, key_of, read_rows, stated_by, stated_by_row
from prolip.data.reading.shard_index import parent
from prolip.data.reading.shards import expand_shards
from prolip.data.reading.stream import local_path
from prolip.data.reading.tar import SAMPLES, printable, read_shard, survey
from prolip.data.samples import IMAGE_SUFFIXES, Raw, image_bytes
from prolip.data.sets import check_files
from prolip.evaluation.datasets import webdataset as wds
from prolip.evaluation.datasets.base import Dataset, Kind, Sample, fingerprint, read_images
from prolip.evaluation.datasets.sources import archive_state, file_mark, shard_marks
from prolip.utils.documents import entries
from prolip.utils.links import check_inside, walk
from prolip.utils.messages import NAMED, explain_missing, first_few, listing
from prolip.utils.secrecy import redacted

WNID = re.compile(r"n\d{8}")
#: For folders other than ImageNet classes: the name, as in training on the folder, and CLIP's prompt.
PLAIN_TEMPLATES = ("{c}", "a photo of a {c}.")
SPLITS = ("val", "validation", "test", "train", "training")


class Classes(NamedTuple):
    """Classes of own data."""

    numbers: dict[str, int]  # by their labels in the data
    names: tuple[str, ...] = ()
    prompts: tuple[str, ...] = ()


def open_rows(source: NamedSource, task: Kind | None = None, damage: FaultCounter | None = None) -> Dataset:
    """Open the images of a table or a folder, with captions or class; `damage` counts images without."""
    every = read_rows(source, max_bad=None if damage is None else 1.0)
    rows, base, address = every.rows, base_of(source), source.address
    known = [stated_by_row(row) for row in rows]
    kind = kind_of(known, task, address)
    if source.kind == "images" and kind == "classification" and all(row.caption == row.record["class"] for row in rows):
        return open_folder(address, damage=damage)
    classes = classes_of(kind, known, Path(base))
    samples = [sample_of(classes, key_of(row, base), stated) for row, stated in zip(rows, known)]
    if damage is None:
        if bare := [sample.key for sample in samples if sample.label is None and not sample.captions]:
            what = f"{first_few(bare, NAMED)} of {address} have no {'class' if classes.names else 'caption'}"
            raise DamagedData(f"{what}: write it, or use --skip-damaged to skip them")
        check_files([file_of(row) for row in rows], f"images of {address}")
    tables = {path: file_mark(path) for path in {file_of(row) for row in rows if row.inside}}
    marks = [tables.get(file_of(row)) or (os.path.isfile(row.path) and os.path.getsize(row.path)) for row in rows]
    return Dataset(
        name=printable(Path(local_path(address.partition(",")[0])).absolute().stem),
        kind=kind,
        samples=partial(read_images, partial(read_row, samples, every), samples, damage),  # partial: ranks pickle it
        fingerprint=fingerprint("rows", [(x.key, x.label, x.captions, mark) for x, mark in zip(samples, marks)]),
        source=str(source),
        classnames=classes.names,
        templates=classes.prompts,
        size=len(samples),
        damage=damage,
    )


def open_folder(root: str | os.PathLike, damage: FaultCounter | None = None) -> Dataset:
    """Open images in class folders; a class is its folder's alphabetical rank, as in torchvision's ImageFolder."""
    root = Path(root)
    if not root.is_dir():
        raise FileNotFoundError(f"no image folder {root}: {explain_missing(str(root))}")
    folders = sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith("."))
    if not folders:
        itself = WNID.fullmatch(root.resolve().name)
        remedy = f"it is one class, give {root.parent}" if itself else "give the folder above the classes"
        raise ValueError(f"{root} has no class folder, only {listing(str(root))}: {remedy}")
    for split in SPLITS:  # its class folders would become one class
        if split in folders and any(entry.is_dir() for entry in os.scandir(root / split)):
            raise ValueError(f"{root} is one level too high (it has {', '.join(folders[:5])}): give {root / split}")
    paths: list[str] = []
    samples: list[Sample] = []
    for label, folder in enumerate(folders):
        found = images_in(root, folder)
        paths += found
        samples += [Sample(printable(os.path.relpath(x, root).replace(os.sep, "/")), b"", label) for x in found]
    sizes, classes = check_files(paths, f"images of {root}"), named_classes(root, folders)
    return Dataset(
        name=root.resolve().name,
        kind="classification",
        samples=partial(read_images, rows_of(paths), samples, damage),
        fingerprint=fingerprint("folder", [(sample.key, size) for sample, size in zip(samples, sizes)]),
        source=str(root),
        classnames=classes.names,
        templates=classes.prompts,
        size=len(samples),
        info={"folders": [printable(folder) for folder in folders]},
        damage=damage,
    )


def images_in(root: Path, folder: str) -> list[str]:
    """Return the image files of a class, sorted by name, with subfolders; ValueError for links out of the root."""
    found = [
        os.path.join(here, name)
        for here, names in walk(root, folder)
        for name in names
        if os.path.splitext(name)[1][1:].lower() in IMAGE_SUFFIXES and not name.startswith(".")
    ]
    for path in found:
        check_inside(root, path)
    if not found:
        what = f"the class folder {root / folder} has no image ({', '.join(IMAGE_SUFFIXES)})"
        raise DamagedData(f"{what}: unpack it, or remove it")
    return found


def open_shards(source: NamedSource, task: Kind | None = None, damage: FaultCounter | None = None) -> Dataset:
    """Open training shards: captions of `.txt` or `.json`, or classes of `.cls` or `.json`."""
    urls, address = tuple(shard.url for shard in expand_shards(source.address)), redacted(source.address)
    first, marks = list(islice(stated(urls), SAMPLES)), shard_marks(urls)
    if not first:
        raise DamagedData(f"no sample in {address}: {survey(urls)}")
    kind, folder = kind_of(first, task, address), Path(parent(urls[0]))
    classes = classes_of(kind, stated(urls) if kind == "classification" else (), folder)
    reading = wds.Reading(urls, kind, partial(parse_sample, classes), damage)
    wds.check_first(reading)
    return Dataset(
        name=printable(folder.name if len(urls) > 1 or os.path.isdir(source.address) else Path(redacted(urls[0])).stem),
        kind=kind,
        samples=partial(wds.read_samples, reading),
        fingerprint=fingerprint("shards", kind, marks, sorted(classes.numbers.items())),
        source=f"shards:{address}",
        classnames=classes.names,
        templates=classes.prompts,
        info={"shards": len(urls)},
        damage=damage,
        state=archive_state(urls),
    )


def read_row(samples: Sequence[Sample], rows: ImageRows, number: int) -> Raw:
    """Read one row as a raw sample; SampleFault as `checked`."""
    return checked(samples[number], rows(number))


def parse_sample(classes: Classes, raw: Raw) -> Sample:
    """Parse one sample of a shard; SampleFault as `checked`."""
    sample = sample_of(classes, raw["__key__"], stated_by(raw))
    return sample._replace(image=image_bytes(checked(sample, raw)))


def stated(urls: Iterable[str]) -> Iterator[Stated]:
    """Yield captions and class of each sample of shards; unreadable samples are reported when their images are read."""
    for url in urls:
        with suppress(SampleFault):
            for raw in read_shard(url, lambda fault: None):
                with suppress(SampleFault):
                    yield stated_by(raw)


def checked(sample: Sample, raw: Raw) -> Raw:
    """Return the raw sample; SampleFault if the sample has neither a caption nor a class."""
    if sample.label is None and not sample.captions:
        raise SampleFault("missing text", "it has neither a caption nor one of the classes")
    return raw


def sample_of(classes: Classes, key: str, known: Stated) -> Sample:
    """Return a sample without its bytes, with its class, or with its captions if there are no classes."""
    captions, label = known
    if not classes.numbers:
        return Sample(key, b"", captions=tuple(captions))
    return Sample(key, b"", classes.numbers.get(label or ""))


def kind_of(known: Sequence[Stated], task: Kind | None, address: str) -> Kind:
    """Return the requested task, else retrieval if there are captions that do not just repeat the class."""
    captioned = any(captions and (task == "retrieval" or list(captions) != [label]) for captions, label in known)
    there: list[Kind] = ["retrieval"] if captioned else []
    there += ["classification"] if any(label for _, label in known) else []
    if not there or task not in (None, *there):
        what = {"retrieval": "captions", "classification": "classes"}.get(task or "", "captions and no classes")
        raise ValueError(f"{address} has no {what}: give classes in a column `label` or `class`, or in folders")
    return task or there[0]


def classes_of(kind: Kind, known: Iterable[Stated], folder: Path) -> Classes:
    """Return the classes of a classification, in the order of their labels; numeric labels are lines of names."""
    labels: Set[str] = {label for _, label in known if label} if kind == "classification" else set()
    if not labels:
        return Classes({})
    return named_classes(folder, sorted(labels, key=lambda x: (int(x) if x.isdecimal() else -1, x)), numbered=True)


def named_classes(folder: Path, labels: list[str], numbered: bool = False) -> Classes:
    """Return classes with names and prompts: from files in the folder or its parent, ImageNet, or the labels.

    numbered: numeric labels are lines of classnames.txt, from 0.
    """
    imagenet = all(WNID.fullmatch(label) for label in labels)
    templates, names = lines_beside(folder, wds.TEMPLATES), lines_beside(folder, wds.CLASSNAMES)
    prompts = PLAIN_TEMPLATES if templates is None else wds.check_templates(templates, folder)
    if templates is None and imagenet:
        prompts = tuple(template("{c}") for template in OPENAI_IMAGENET_TEMPLATES)
    if names and numbered and all(label.isdecimal() and int(label) < len(names) for label in labels):
        return Classes({label: int(label) for label in labels}, names, prompts)
    if names is None and imagenet:
        known = dict(zip(ImageNetInfo("imagenet-1k").label_names(), IMAGENET_CLASSNAMES))
        if strange := [label for label in labels if label not in known]:
            what = f"{len(strange)} folders of {folder} are not classes of ImageNet-1k ({', '.join(strange[:3])})"
            raise ValueError(f"{what}: give their names in a {wds.CLASSNAMES} in the folder")
        names = tuple(known[label] for label in labels)
    elif names is None:
        names = tuple(printable(label.replace("_", " ")) for label in labels)
    if len(names) != len(labels):
        what = f"{len(names)} class names for {len(labels)} classes of {folder} ({labels[0]}, ...)"
        raise ValueError(f"{what}: give one name per class, in alphabetical order of their folders or labels")
    return Classes({label: number for number, label in enumerate(labels)}, names, prompts)


def lines_beside(root: Path, name: str) -> tuple[str, ...] | None:
    """Return the lines of the file `name` in the root or its parent; None without one."""
    place = next((x for x in (root / name, root.resolve().parent / name) if x.is_file()), None)
    if place is None:
        return None
    lines = entries(place.read_text(encoding="utf-8-sig"), place)
    if not lines:
        raise ValueError(f"{place} is empty: write a line per entry, or remove it")
    return lines
