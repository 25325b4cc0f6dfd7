"""Published sets: captions by `prolip.data.sets`, and tables with a zip of images as on the hub (organisation nlphuji).

    test_1k_flickr.csv        images_flickr_1k_test.zip         filename, raw: a JSON list of captions
    test_5k_mscoco_2014.csv   images_mscoco_2014_5k_test.zip
    winogavil_dataset.csv     winogavil_images.zip              ID, cue, candidates, associations: JSON lists of names

The zip has a folder of its own name; you can unpack it next to the table.
"""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from prolip.data.faults import DamagedData, FaultCounter, SampleFault
from prolip.data.reading.csv import TableError, open_table
from prolip.data.reading.folders import rows_of
from prolip.data.reading.named import NamedSource
from prolip.data.reading.tar import SAMPLE_BYTES
from prolip.data.samples import Raw
from prolip.data.sets import read_set
from prolip.evaluation.datasets.base import Association, Dataset, Kind, Sample, fingerprint, read_images
from prolip.evaluation.datasets.sources import archive_state, file_mark, folder_holds
from prolip.utils.messages import NAMED, explain_missing, first_few

CAPTIONS = 5  # per image, as usual for COCO's 5K test, though some images have six or seven
CAPTION_TABLES = {
    "test_1k_flickr.csv": "images_flickr_1k_test",
    "test_5k_mscoco_2014.csv": "images_mscoco_2014_5k_test",
}
STRINGS = TypeAdapter(list[str])
WINOGAVIL, WINOGAVIL_IMAGES = "winogavil_dataset.csv", "winogavil_images"


def open_published(
    source: NamedSource, task: Kind | None = None, damage: FaultCounter | None = None, split: str = "test"
) -> Dataset:
    """Open the images of a split in order, for retrieval, with all captions (COCO and Flickr30k: CAPTIONS).

    A text of CUB matches all images of its species, whose number, from 0, is the label.
    """
    word = "karpathy" if source.kind in ("coco", "flickr") else source.kind
    name, images = read_set(source.kind, source.address, split)
    info: dict[str, Any] = {"split": split}
    if word == "karpathy":
        if all(len(image.captions) >= CAPTIONS for image in images):
            cut = slice(CAPTIONS)
            images = [x._replace(captions=x.captions[cut], caption_ids=x.caption_ids[cut]) for x in images]
        info["image_ids"] = [image.image_id for image in images]
        info["caption_ids"] = [number for image in images for number in image.caption_ids]
    labels: list[int | None] = [None] * len(images)
    if word == "cub":
        info["relevant_by"] = "label"
        classes = sorted(entry.name for entry in os.scandir(source.address.split(",")[1]) if entry.is_dir())
        labels = [classes.index(image.key.partition("/")[0]) for image in images]
    samples = [Sample(image.key, b"", label, captions=image.captions) for image, label in zip(images, labels)]
    paths = [image.path for image in images]
    species = [[] if label is None else [label] for label in labels]
    marks = [(x.key, *label, os.path.getsize(path), x.captions) for x, label, path in zip(samples, species, paths)]
    return Dataset(
        name=f"{name}_{split}",
        kind="retrieval",
        samples=partial(read_images, rows_of(paths), samples, damage),
        fingerprint=fingerprint(word, marks),
        source=source.address,
        size=len(samples),
        info=info,
        damage=damage,
    )


def read_zipped(archive: zipfile.ZipFile, members: Sequence[str], number: int) -> Raw:
    """Read image i of a zip as a raw sample; SampleFault if it is unreadable."""
    member = members[number]
    try:
        if (size := archive.getinfo(member).file_size) > SAMPLE_BYTES:
            raise ValueError(f"{member} has {size} bytes, expected at most {SAMPLE_BYTES}")
        return {"jpg": archive.read(member)}  # returns no more than this
    except (OSError, ValueError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise SampleFault("missing image", f"{archive.filename}: {error}") from error


def find_images(
    folder: Path, name: str, files: Sequence[str]
) -> tuple[Callable[[int], Raw], str, tuple[str, int] | None]:
    """Find files in the folder `name`, or in `name.zip`, next to a table: reader, a mark, and `Dataset.state`."""
    place, packed = folder / name, folder / f"{name}.zip"
    if place.is_dir():
        found = {entry.name: entry.path for entry in os.scandir(place) if entry.is_file()}
    elif packed.is_file():
        place = packed
        try:
            archive = zipfile.ZipFile(packed)
        except zipfile.BadZipFile as error:
            raise DamagedData(f"{packed} is not a complete zip ({error}): fetch it again") from error
        inside = (x for x in archive.namelist() if not x.endswith("/") and "__MACOSX" not in x)
        found = {os.path.basename(member): member for member in inside}
    else:
        raise FileNotFoundError(f"neither {name}.zip nor {name}/ in {folder}: {folder_holds(folder)}; fetch the zip")
    if missing := [file for file in files if file not in found]:
        raise FileNotFoundError(
            f"{len(missing)} of {len(files)} images of the table are not in {place}: {first_few(missing, NAMED)}: "
            "fetch the zip again and unpack all of it, or keep it packed"
        )
    chosen = [found[file] for file in files]
    if place is packed:
        return partial(read_zipped, archive, chosen), file_mark(packed), archive_state([str(packed)])
    sizes = sorted((file, os.path.getsize(path)) for file, path in found.items())
    return rows_of(chosen), fingerprint(sizes), None


def read_table(
    table: Path, columns: tuple[str, ...], lists: tuple[str, ...], image: str | None = None
) -> list[dict[str, Any]]:
    """Read the rows of a CSV with `columns`, of which `lists` are JSON; image: the column with names of images."""
    if not table.is_file():
        raise FileNotFoundError(f"no {table}: {explain_missing(str(table))}")
    try:
        with open_table(str(table), ",") as found:
            if absent := [column for column in columns if column not in found.columns]:
                there = ", ".join(found.columns) or "none"
                raise DamagedData(f"{table} has no column {', '.join(absent)}; it has {there}: give the hub's file")
            places = {column: found.place(column) for column in columns}
            cells = found.read(places[image] if image else None)
            rows: list[dict[str, Any]] = [{column: row[place] for column, place in places.items()} for row in cells]
    except TableError as error:
        raise DamagedData(f"{error}; or fetch it again") from error
    for number, row in enumerate(rows, start=2):
        for column in lists:
            try:
                row[column] = STRINGS.validate_json(row[column])
            except ValueError as error:
                what = f"{table} row {number}: {column} is not a JSON list of texts ({row[column]!r:.80})"
                raise DamagedData(f"{what}: fetch it again") from error
    if not rows:
        raise DamagedData(f"{table} has no rows: fetch it again")
    return rows


def open_caption_table(
    folder: str | os.PathLike, name: str | None = None, damage: FaultCounter | None = None
) -> Dataset:
    """Open Flickr30k 1K or COCO 5K as in DataComp: retrieval with all captions of each row."""
    folder = Path(folder)
    table = next((folder / table for table in CAPTION_TABLES if (folder / table).is_file()), None)
    if table is None:
        raise FileNotFoundError(f"no {' or '.join(CAPTION_TABLES)} in {folder}: {folder_holds(folder)}")
    rows = read_table(table, ("filename", "raw"), ("raw",), image="filename")
    captions = {row["filename"]: tuple(text.strip() for text in row["raw"]) for row in rows}
    if len(captions) < len(rows) or not all(captions.values()):
        raise DamagedData(f"{table} has an image twice or without captions: fetch it again")
    samples = [Sample(file, b"", captions=texts) for file, texts in captions.items()]
    read, mark, state = find_images(folder, CAPTION_TABLES[table.name], list(captions))
    return Dataset(
        name=name or folder.resolve().name,
        kind="retrieval",
        samples=partial(read_images, read, samples, damage),
        fingerprint=fingerprint("captions", mark, list(captions.items())),
        source=str(folder),
        size=len(captions),
        damage=damage,
        state=state,
    )


def open_winogavil(folder: str | os.PathLike, name: str = "winogavil", damage: FaultCounter | None = None) -> Dataset:
    """Open WinoGAViL: candidates that belong to a cue. Every image is one sample, in any number of instances."""
    folder = Path(folder)
    table = folder / WINOGAVIL
    instances = []
    columns = ("cue", "candidates", "associations")
    for number, row in enumerate(read_table(table, columns, columns[1:]), start=2):
        candidates, associated = tuple(row["candidates"]), frozenset(row["associations"])
        if not associated or not associated <= set(candidates) or len(set(candidates)) < len(candidates):
            what = f"{table} row {number}: associations {sorted(associated)} of {candidates}"
            raise DamagedData(f"{what}: fetch it again")
        instances.append(Association(row["cue"], candidates, associated))
    keys = list(dict.fromkeys(candidate for instance in instances for candidate in instance.images))
    read, mark, state = find_images(folder, WINOGAVIL_IMAGES, [f"{key}.jpg" for key in keys])
    return Dataset(
        name=name,
        kind="association",
        samples=partial(read_images, read, [Sample(key, b"") for key in keys], damage),
        fingerprint=fingerprint("winogavil", mark, file_mark(table)),
        source=str(folder),
        associations=tuple(instances),
        size=len(keys),
        damage=damage,
        state=state,
    )
