"""COCO and Flickr30k (splits of Karpathy and Fei-Fei 2015), CUB captions and IAPR TC-12 (`prolip.data.sets`)."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from prolip.data.faults import FaultCounter
from prolip.data.reading.folders import rows_of
from prolip.data.reading.named import NamedSource
from prolip.data.sets import read_set
from prolip.evaluation.datasets.base import Dataset, Kind, Sample, fingerprint, read_images

CAPTIONS = 5  # per image, as the field evaluates COCO's 5K test, though some images have six or seven


def open_published(
    source: NamedSource, task: Kind | None = None, damage: FaultCounter | None = None, split: str = "test"
) -> Dataset:
    """The images of a split in the order of the set, for retrieval, with all captions.

    Of COCO and Flickr30k with the first CAPTIONS, where every image has so many, and their ids in `info`. A text of CUB
    is relevant for all images of its species, whose number, from 0, is the label. FileNotFoundError, ValueError or
    DamagedData before anything is computed, for images that are missing, too.
    """
    word = {"coco": "karpathy", "flickr": "karpathy"}.get(source.kind, source.kind)
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
    marks = [
        (x.key, *([] if x.label is None else [x.label]), os.path.getsize(image.path), x.captions)
        for image, x in zip(images, samples)
    ]
    return Dataset(
        name=f"{name}_{split}",
        kind="retrieval",
        samples=partial(read_images, rows_of(image.path for image in images), samples, damage),
        fingerprint=fingerprint(word, marks),
        source=source.address,
        size=len(samples),
        info=info,
        damage=damage,
    )
