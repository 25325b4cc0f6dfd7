"""CUB captions (Reed et al. 2016): ten sentences for each picture of CUB-200-2011, with its splits.

    CAPTIONS/001.Black_footed_Albatross/NAME.txt     a caption per line
    IMAGES/001.Black_footed_Albatross/NAME.jpg
    images.txt, train_test_split.txt                 CUB's own split, beside IMAGES: split "test"
    testclasses.txt                                  50 classes that no model was trained on: split "unseen"
    trainvalclasses.txt, seen_test_images.txt        held-out pictures of the other 150: split "seen"

The last three are the files of PCME (Chun et al. 2021), which the probabilistic literature evaluates on; there a
caption is true of every picture of its species.
"""
from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from prolip.data.faults import FaultCounter
from prolip.data.reading.shards import explain_missing
from prolip.evaluation.datasets.base import DamagedData, Dataset, Sample, fingerprint
from prolip.evaluation.datasets.folders import read_files
from prolip.evaluation.datasets.places import check_files
from prolip.utils.documents import text_lines

FILES = {
    "test": ("images.txt", "train_test_split.txt"),
    "unseen": ("testclasses.txt",),
    "seen": ("trainvalclasses.txt", "seen_test_images.txt"),
}


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
    for folder in (texts, root):
        if not folder.is_dir():
            raise FileNotFoundError(f"no folder {folder}: {explain_missing(str(folder))}")
    if split not in FILES:
        raise ValueError(f"CUB has no split {split!r}: give one of {', '.join(FILES)}")
    places = [Path(lists)] if lists is not None else [texts, root, texts.resolve().parent, root.resolve().parent]
    files = []
    for file in FILES[split]:
        found = [place / file for place in places if (place / file).is_file()]
        if not found:
            looked = ", ".join(dict.fromkeys(str(place) for place in places))
            raise FileNotFoundError(f"no {file} in {looked}: fetch it and give its folder with lists=")
        files.append(found[0])
    chosen = choose(split, files, root)
    classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
    label = {folder: number for number, folder in enumerate(classes)}
    captioned = [texts / f"{os.path.splitext(key)[0]}.txt" for key in chosen]
    check_files([str(file) for file in captioned], f"captions of the split {split!r} of CUB")
    pictures = [  # key: CLASS/NAME.jpg; label: the number of the species, from 0
        (str(root / key), Sample(key, b"", label[key.split("/")[0]], captions=read_captions(file)))
        for key, file in zip(chosen, captioned)
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


def choose(split: str, files: list[Path], root: Path) -> list[str]:
    """The keys CLASS/NAME.jpg of a split, in alphabetical order."""
    rows = [[line for line in text_lines(file.read_text(encoding="utf-8")) if line] for file in files]
    try:
        if split == "test":
            training = dict(line.split() for line in rows[1])
            keys = [key for number, key in (line.split() for line in rows[0]) if training[number] == "0"]
        else:
            numbers = {int(line.split(".")[0]) for line in rows[0]}
            keys = [
                f"{folder.name}/{file.name}"
                for folder in os.scandir(root)
                if folder.is_dir() and int(folder.name.split(".")[0]) in numbers
                for file in os.scandir(folder.path)
                if file.name.lower().endswith((".jpg", ".jpeg"))
            ]
    except (ValueError, KeyError) as error:
        names, what = " and ".join(file.name for file in files), f"{type(error).__name__}: {error}"
        raise DamagedData(f"{names} with {root} do not fit ({what}): fetch them again") from error
    if split == "seen":
        held_out = set(rows[1])
        keys = [key for key in keys if key in held_out]
    if not keys:
        raise ValueError(f"the split {split!r} has no picture in {root}: is it the folder of the class folders?")
    return sorted(keys)


def read_captions(file: Path) -> tuple[str, ...]:
    """The lines of a caption file, without blank ones."""
    try:
        lines = text_lines(file.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise DamagedData(f"{file} is no UTF-8 text ({error}): fetch it again") from error
    captions = tuple(line for line in lines if line)
    if not captions:
        raise DamagedData(f"{file} holds no caption: fetch it again")
    return captions
