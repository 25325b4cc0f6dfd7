"""CUB captions (Reed et al. 2016) as a test set; its files and splits: `prolip.data.reading.published.cub`."""
from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from prolip.data.faults import FaultCounter
from prolip.data.reading.published.cub import read_cub
from prolip.data.reading.published.images import check_files
from prolip.evaluation.datasets.base import Dataset, Sample, fingerprint
from prolip.evaluation.datasets.folders import read_files


def open_cub(
    captions: str | os.PathLike,
    images: str | os.PathLike,
    split: str = "test",
    lists: str | os.PathLike | None = None,
    name: str | None = None,
    damage: FaultCounter | None = None,
) -> Dataset:
    """The pictures of a split in the order of classes and names, with all their captions.

    lists: the folder with the files of the split; default: looked for in the two folders and above them. A text is
    relevant for all pictures of its species (info `relevant_by`). FileNotFoundError, ValueError, DamagedData before
    anything is computed.
    """
    texts, root = Path(captions), Path(images)
    chosen = read_cub(texts, root, (split,), lists)
    classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
    label = {folder: number for number, folder in enumerate(classes)}
    pictures = [  # key: CLASS/NAME.jpg; label: the number of the species, from 0
        (image.path, Sample(image.key, b"", label[image.key.split("/")[0]], captions=image.captions))
        for image in chosen
    ]
    sizes = check_files([path for path, _ in pictures], f"images of the split {split!r} of CUB")
    return Dataset(
        name=name or f"cub_{split}",
        kind="retrieval",
        samples=partial(read_files, pictures, damage),
        fingerprint=fingerprint("cub", [(s.key, s.label, size, s.captions) for (_, s), size in zip(pictures, sizes)]),
        source=f"{texts},{root}",
        size=len(pictures),
        info={"split": split, "relevant_by": "label"},
        damage=damage,
    )
