"""CUB captions (Reed et al. 2016): ten sentences for each picture of CUB-200-2011, with its splits.

    CAPTIONS/001.Black_footed_Albatross/NAME.txt     a caption per line
    IMAGES/001.Black_footed_Albatross/NAME.jpg
    images.txt, train_test_split.txt                 CUB's own split, beside IMAGES: "train", "test"
    testclasses.txt                                  50 classes that no model was trained on: "unseen"
    trainvalclasses.txt, seen_test_images.txt        the other 150: "trainval", without the held-out pictures: "seen"

The last three are the files of PCME (Chun et al. 2021); there a caption is true of every picture of its species.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path

from prolip.data.faults import DamagedData
from prolip.data.sets.base import CaptionedImage, PublishedImages, check_files, check_folders
from prolip.utils.documents import text_lines

OFFICIAL, CLASSES = ("images.txt", "train_test_split.txt"), ("trainvalclasses.txt", "seen_test_images.txt")
FILES = {"train": OFFICIAL, "test": OFFICIAL, "unseen": ("testclasses.txt",), "trainval": CLASSES, "seen": CLASSES}


def read_cub(addresses: Sequence[str], splits: Collection[str]) -> PublishedImages:
    """The pictures of some splits in the order of classes and names, with all their captions; key: CLASS/NAME.jpg.

    addresses: of captions, images and, optionally, the folder with the files of the splits; default: the two folders
    and those above them. FileNotFoundError, ValueError, DamagedData.
    """
    texts, root, *lists = map(Path, addresses)
    check_folders(texts, root)
    places = lists or [texts, root, texts.resolve().parent, root.resolve().parent]
    chosen = sorted({key for split in splits for key in choose(split, places, root)})
    named = " and ".join(repr(split) for split in splits)
    captioned = [texts / f"{os.path.splitext(key)[0]}.txt" for key in chosen]
    check_files([str(file) for file in captioned], f"captions of the split {named} of CUB")
    images = []
    for key, file in zip(chosen, captioned):
        species = key.split("/")[0].partition(".")[2].replace("_", " ")  # of 001.Black_footed_Albatross/NAME.jpg
        images.append(CaptionedImage(key, str(root / key), read_captions(file), {"class": species}))
    return PublishedImages("cub", images)


def choose(split: str, places: Sequence[Path], root: Path) -> list[str]:
    """The keys CLASS/NAME.jpg of a split. FileNotFoundError for a list that is in none of `places`."""
    if split not in FILES:
        raise ValueError(f"CUB has no split {split!r}: give one of {', '.join(FILES)}")
    files = []
    for file in FILES[split]:
        found = [place / file for place in places if (place / file).is_file()]
        if not found:
            looked = ", ".join(dict.fromkeys(map(str, places)))
            raise FileNotFoundError(f"no {file} in {looked}: fetch it and give its folder as the third address")
        files.append(found[0])
    rows = [[line for line in text_lines(file.read_text(encoding="utf-8-sig")) if line] for file in files]
    try:
        if split in ("train", "test"):
            training = dict(line.split() for line in rows[1])
            wanted = str(int(split == "train"))
            keys = [key for number, key in (line.split() for line in rows[0]) if training[number] == wanted]
        else:
            keys = in_classes(root, {int(line.split(".")[0]) for line in rows[0]})
    except (ValueError, KeyError) as error:
        names, what = " and ".join(file.name for file in files), f"{type(error).__name__}: {error}"
        raise DamagedData(f"{names} with {root} do not fit ({what}): fetch them again") from error
    if split in ("seen", "trainval"):
        held_out = set(rows[1])
        keys = [key for key in keys if (key in held_out) == (split == "seen")]
    if not keys:
        raise ValueError(f"the split {split!r} has no picture in {root}: is it the folder of the class folders?")
    return keys


def in_classes(root: Path, numbers: Collection[int]) -> list[str]:
    """The keys of all pictures of classes with these numbers."""
    return [
        f"{folder.name}/{file.name}"
        for folder in os.scandir(root)
        if folder.is_dir() and int(folder.name.split(".")[0]) in numbers
        for file in os.scandir(folder.path)
        if file.name.lower().endswith((".jpg", ".jpeg"))
    ]


def read_captions(file: Path) -> tuple[str, ...]:
    """The lines of a caption file, without blank ones."""
    try:
        lines = text_lines(file.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DamagedData(f"{file} is no UTF-8 text ({error}): fetch it again") from error
    captions = tuple(line for line in lines if line)
    if not captions:
        raise DamagedData(f"{file} holds no caption: fetch it again")
    return captions
