"""COCO and Flickr30k with the splits of Karpathy and Fei-Fei (2015) as test sets."""
from __future__ import annotations

import os
from functools import partial

from prolip.data.faults import FaultCounter
from prolip.data.reading.published.images import check_files
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
    name: str | None = None,
    damage: FaultCounter | None = None,
) -> Dataset:
    """The images of one split in the file's order, each with its first `captions` captions (None: all).

    annotations: the JSON file; images: the folder above val2014/ and train2014/, or that of Flickr30k's files. info:
    `image_ids` and `caption_ids` in the order of images and captions (COCO's ids, by which CxC and ECCV Caption name
    them). FileNotFoundError for missing files, all images included, DamagedData for a file of another layout.
    """
    file, chosen = read_karpathy(annotations, images, (split,), captions)
    files = [(image.path, Sample(image.key, b"", captions=image.captions)) for image in chosen]
    where = f"images of the split {split!r} of {file.path.name} below {images}"
    sizes = check_files([path for path, _ in files], where)
    return Dataset(
        name=name or f"{file.name or file.path.stem}_karpathy_{split}",
        kind="retrieval",
        samples=partial(read_files, files, damage),
        fingerprint=fingerprint("karpathy", [(s.key, size, s.captions) for (_, s), size in zip(files, sizes)]),
        source=f"{file.path},{images}",
        size=len(files),
        info={
            "split": split,
            "image_ids": [image.image_id for image in chosen],
            "caption_ids": [number for image in chosen for number in image.caption_ids],
        },
        damage=damage,
        further=FURTHER,
    )
