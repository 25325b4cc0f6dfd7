"""COCO and Flickr30k (splits of Karpathy and Fei-Fei 2015), CUB captions and IAPR TC-12 as test sets.

Their files and splits: `prolip.data.reading.published`. All readers raise FileNotFoundError, ValueError or DamagedData
before anything is computed; of images that are missing, too.
"""
from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from prolip.data.faults import FaultCounter
from prolip.data.reading.published.cub import read_cub
from prolip.data.reading.published.iapr import read_iapr
from prolip.data.reading.published.images import CaptionedImage, check_files
from prolip.data.reading.published.karpathy import read_karpathy
from prolip.evaluation.datasets.base import Dataset, Sample, fingerprint
from prolip.evaluation.datasets.coco import FURTHER
from prolip.evaluation.datasets.folders import read_files

#: Captions per image that the field evaluates: COCO's 5K test is 5,000 images and 25,000 captions, though some images
#: have six or seven.
CAPTIONS = 5


def open_karpathy(
    annotations: str | os.PathLike,
    images: str | os.PathLike,
    split: str = "test",
    captions: int | None = CAPTIONS,
    damage: FaultCounter | None = None,
) -> Dataset:
    """The images of one split of COCO or Flickr30k in the file's order, each with its first captions (None: all).

    annotations: the JSON file; images: the folder above val2014/ and train2014/, or that of Flickr30k's files. info:
    `image_ids` and `caption_ids` in the order of images and captions (COCO's ids, by which CxC and ECCV Caption name
    them).
    """
    file, chosen = read_karpathy(annotations, images, (split,), captions)
    info = {
        "split": split,
        "image_ids": [image.image_id for image in chosen],
        "caption_ids": [number for image in chosen for number in image.caption_ids],
    }
    name, where = f"{file.name or file.path.stem}_karpathy_{split}", f"{file.path.name} below {images}"
    found = captioned("karpathy", name, f"{file.path},{images}", where, chosen, info, damage)
    return replace(found, further=FURTHER)



def open_cub(
    captions: str | os.PathLike,
    images: str | os.PathLike,
    split: str = "test",
    lists: str | os.PathLike | None = None,
    damage: FaultCounter | None = None,
) -> Dataset:
    """CUB's pictures of a split in the order of classes and names, with all their captions.

    lists: the folder with the files of the split; default: looked for in the two folders and above them. A text is
    relevant for all pictures of its species (info `relevant_by`), whose number, from 0, is the label.
    """
    chosen = read_cub(captions, images, (split,), lists)
    classes = sorted(entry.name for entry in Path(images).iterdir() if entry.is_dir())
    label = {folder: number for number, folder in enumerate(classes)}
    labels = [label[image.key.split("/")[0]] for image in chosen]
    info = {"split": split, "relevant_by": "label"}
    return captioned("cub", f"cub_{split}", f"{Path(captions)},{Path(images)}", "CUB", chosen, info, damage, labels)



def open_iapr(
    folder: str | os.PathLike,
    split: str = "test",
    lists: str | os.PathLike | None = None,
    damage: FaultCounter | None = None,
) -> Dataset:
    """IAPR's photographs of a split in the order of their ids; each sentence of a description is a caption.

    lists: a file of ids, or the folder of LEAR's lists; default: looked for in `folder`.
    """
    chosen = read_iapr(folder, (split,), lists)
    return captioned("iapr", f"iapr_{split}", str(Path(folder)), "IAPR TC-12", chosen, {"split": split}, damage)


def captioned(
    word: str,
    name: str,
    source: str,
    where: str,
    chosen: Sequence[CaptionedImage],
    info: dict[str, Any],
    damage: FaultCounter | None,
    labels: Sequence[int] | None = None,
) -> Dataset:
    """A retrieval set of these images. word: of the fingerprint; where: for messages; labels: of the images."""
    samples = [Sample(image.key, b"", captions=image.captions) for image in chosen]
    if labels is not None:
        samples = [sample._replace(label=label) for sample, label in zip(samples, labels)]
    files = [(image.path, sample) for image, sample in zip(chosen, samples)]
    sizes = check_files([path for path, _ in files], f"images of the split {info['split']!r} of {where}")
    marks = [(s.key, *([] if labels is None else [s.label]), size, s.captions) for s, size in zip(samples, sizes)]
    return Dataset(
        name=name,
        kind="retrieval",
        samples=partial(read_files, files, damage),
        fingerprint=fingerprint(word, marks),
        source=source,
        size=len(files),
        info=info,
        damage=damage,
    )
