"""Tables with a zip of images, as DataComp's retrieval tasks and WinoGAViL lie on the hub (organisation nlphuji).

    test_1k_flickr.csv        images_flickr_1k_test.zip         filename, raw: a JSON list of captions
    test_5k_mscoco_2014.csv   images_mscoco_2014_5k_test.zip
    winogavil_dataset.csv     winogavil_images.zip              ID, cue, candidates, associations: JSON lists of names

The zip holds a folder of its own name; it may be unpacked beside the table.
"""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from prolip.data.faults import FaultCounter, SampleFault
from prolip.data.reading.csv import TableError, open_table
from prolip.data.reading.tar import SAMPLE_BYTES
from prolip.evaluation.datasets.base import (
    WHOLE,
    Association,
    DamagedData,
    Dataset,
    Sample,
    Share,
    fingerprint,
    note_fault,
)
from prolip.evaluation.datasets.places import archive_state, file_mark, folder_holds
from prolip.utils.documents import loads, read_file
from prolip.utils.messages import NAMED, explain_missing, first_few

CAPTION_TABLES = {
    "test_1k_flickr.csv": "images_flickr_1k_test",
    "test_5k_mscoco_2014.csv": "images_mscoco_2014_5k_test",
}
WINOGAVIL, WINOGAVIL_IMAGES = "winogavil_dataset.csv", "winogavil_images"


class Images(NamedTuple):
    """Image files in a folder or a zip: `members` maps a file's name to its path there."""

    source: Path
    members: dict[str, str]

    def mark(self) -> str:
        """Changes with the zip, or with names and sizes of the folder."""
        if self.source.is_file():
            return file_mark(self.source)
        return fingerprint(sorted((name, os.path.getsize(path)) for name, path in self.members.items()))

    def state(self) -> tuple[str, int] | None:
        """`Dataset.state`; None for a folder, whose mark has the size of every file."""
        return archive_state([str(self.source)]) if self.source.is_file() else None

    def check(self, names: list[str], table: Path) -> None:
        """FileNotFoundError naming files of the table that are not there."""
        missing = [name for name in names if name not in self.members]
        if missing:
            raise FileNotFoundError(
                f"{len(missing)} of {len(names)} images of {table.name} are not in {self.source}: "
                f"{first_few(missing, NAMED)}: fetch the zip again and unpack all of it, or leave it packed"
            )

    def read(self, files: dict[str, Sample], damage: FaultCounter | None, share: Share = WHOLE) -> Iterator[Sample]:
        """A share of these files, each with what is known of it: the samples with their bytes, in this order."""
        with zipfile.ZipFile(self.source) if self.source.is_file() else nullcontext() as archive:
            for number, (name, sample) in share.take(files.items()):
                if damage is not None:
                    damage.samples += 1
                try:
                    member = self.members[name]
                    if archive is None:
                        data = read_file(member, SAMPLE_BYTES)
                    elif (size := archive.getinfo(member).file_size) <= SAMPLE_BYTES:
                        data = archive.read(member)  # which never gives more
                    else:
                        raise ValueError(f"{member} has {size} bytes, at most {SAMPLE_BYTES} are read")
                except (OSError, ValueError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
                    note_fault(damage, SampleFault("missing image", str(error)), name, str(self.source))
                else:
                    yield sample._replace(image=data, place=(0, number))


def find_images(folder: Path, name: str) -> Images:
    """The folder `name`, or `name.zip`, beside a table. FileNotFoundError, and DamagedData for a zip that is none."""
    unpacked, packed = folder / name, folder / f"{name}.zip"
    if unpacked.is_dir():
        return Images(unpacked, {entry.name: entry.path for entry in os.scandir(unpacked) if entry.is_file()})
    if not packed.is_file():
        raise FileNotFoundError(f"neither {name}.zip nor {name}/ in {folder}: {folder_holds(folder)}; fetch the zip")
    try:
        with zipfile.ZipFile(packed) as archive:
            inside = [member for member in archive.namelist() if not member.endswith("/") and "__MACOSX" not in member]
    except zipfile.BadZipFile as error:
        raise DamagedData(f"{packed} is no whole zip ({error}): fetch it again") from error
    return Images(packed, {os.path.basename(member): member for member in inside})


def read_table(
    table: Path, columns: tuple[str, ...], lists: tuple[str, ...], image: str | None = None
) -> list[dict[str, Any]]:
    """The rows of a CSV with `columns`, of which `lists` hold JSON; image: the column with names of images.

    FileNotFoundError, DamagedData.
    """
    if not table.is_file():
        raise FileNotFoundError(f"no {table}: {explain_missing(str(table))}")
    try:
        with open_table(str(table), ",") as found:
            absent = [column for column in columns if column not in found.columns]
            if absent:
                raise DamagedData(
                    f"{table} has no column {', '.join(absent)}; it has {', '.join(found.columns) or 'none'}: is it "
                    "the file of the hub?"
                )
            places = {column: found.place(column) for column in columns}
            rows: list[dict[str, Any]] = [
                {column: cells[place] for column, place in places.items()}
                for cells in found.read(places[image] if image else None)
            ]
    except TableError as error:
        raise DamagedData(f"{error}; or fetch it again") from error
    for number, row in enumerate(rows, start=2):
        for column in lists:
            try:
                values = loads(row[column])
                if not isinstance(values, list):
                    raise TypeError(f"it is a {type(values).__name__}")
                row[column] = [str(value) for value in values]
            except (ValueError, TypeError) as error:
                what = f"{table} row {number}: {column} is no JSON list"
                raise DamagedData(f"{what} ({error}): fetch it again") from error
    if not rows:
        raise DamagedData(f"{table} has no row: fetch it again")
    return rows


def open_caption_table(
    folder: str | os.PathLike, name: str | None = None, damage: FaultCounter | None = None
) -> Dataset:
    """Flickr30k 1K or COCO 5K as DataComp evaluates them: retrieval with all captions of each row.

    FileNotFoundError without table, zip or an image, DamagedData where they cannot be read.
    """
    folder = Path(folder)
    table = next((folder / table for table in CAPTION_TABLES if (folder / table).is_file()), None)
    if table is None:
        raise FileNotFoundError(f"no {' or '.join(CAPTION_TABLES)} in {folder}: {folder_holds(folder)}")
    rows = read_table(table, ("filename", "raw"), ("raw",), image="filename")
    images = find_images(folder, CAPTION_TABLES[table.name])
    captions = {row["filename"]: tuple(text.strip() for text in row["raw"]) for row in rows}
    files = {file: Sample(file, b"", captions=texts) for file, texts in captions.items()}
    if len(captions) < len(rows) or not all(captions.values()):
        raise DamagedData(f"{table} names an image twice or without captions: fetch it again")
    images.check(list(captions), table)
    return Dataset(
        name=name or folder.resolve().name,
        kind="retrieval",
        samples=partial(images.read, files, damage),
        fingerprint=fingerprint("captions", images.mark(), list(captions.items())),
        source=str(folder),
        size=len(captions),
        damage=damage,
        state=images.state(),
    )


def open_winogavil(folder: str | os.PathLike, name: str = "winogavil", damage: FaultCounter | None = None) -> Dataset:
    """WinoGAViL: which of the candidates belong to a cue. Every image is one sample, however many instances show it.

    FileNotFoundError without table, zip or an image, DamagedData where they cannot be read or an association is no
    candidate.
    """
    folder = Path(folder)
    table = folder / WINOGAVIL
    rows = read_table(table, ("cue", "candidates", "associations"), ("candidates", "associations"))
    images = find_images(folder, WINOGAVIL_IMAGES)
    instances = []
    for number, row in enumerate(rows, start=2):
        candidates, associated = tuple(row["candidates"]), frozenset(row["associations"])
        if not associated or not associated <= set(candidates) or len(set(candidates)) < len(candidates):
            what = f"{table} row {number}: associations {sorted(associated)} of {candidates}"
            raise DamagedData(f"{what}: fetch it again")
        instances.append(Association(row["cue"], candidates, associated))
    names = list(dict.fromkeys(candidate for instance in instances for candidate in instance.images))
    files = {f"{candidate}.jpg": Sample(candidate, b"") for candidate in names}
    images.check(list(files), table)
    return Dataset(
        name=name,
        kind="association",
        samples=partial(images.read, files, damage),
        fingerprint=fingerprint("winogavil", images.mark(), file_mark(table)),
        source=str(folder),
        associations=tuple(instances),
        size=len(names),
        damage=damage,
        state=images.state(),
    )
