"""Published sets of captioned images by a word and their addresses, for training and evaluation: `coco:JSON,IMAGES`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from prolip.data.sets.base import PublishedImages, check_files
from prolip.data.sets.coco_flickr import read_karpathy
from prolip.data.sets.cub import read_cub
from prolip.data.sets.iapr import read_iapr


class PublishedSet(NamedTuple):
    """A reader of (addresses, splits), the form and the least and most of its addresses, and the splits to train on."""

    read: Callable[[Sequence[str], Sequence[str]], PublishedImages]
    form: str
    addresses: tuple[int, int]
    splits: str


SETS = {
    "coco": PublishedSet(read_karpathy, "coco:JSON,IMAGES", (2, 2), "train+restval"),
    "flickr": PublishedSet(read_karpathy, "flickr:JSON,IMAGES", (2, 2), "train"),
    "cub": PublishedSet(read_cub, "cub:CAPTIONS,IMAGES[,LISTS]", (2, 3), "train"),
    "iapr": PublishedSet(read_iapr, "iapr:FOLDER[,LISTS]", (1, 2), "train"),
}
FORMS = ", ".join(known.form for known in SETS.values())


def word_of(train_data: str) -> str | None:
    """The word of SETS that an address begins with, None without one."""
    word, colon, _ = train_data.partition(":")
    return word if colon and word in SETS else None


def read_set(word: str, train_data: str, splits: str | None = None) -> PublishedImages:
    """The images of a published set, all of whose files are there; train_data: its addresses, with or without the word.

    splits: joined by '+'; default: those to train on. ValueError for another number of addresses, and the reader's.
    """
    known = SETS[word]
    addresses = train_data.removeprefix(f"{word}:").split(",")
    least, most = known.addresses
    if not least <= len(addresses) <= most or not all(addresses):
        count = len(list(filter(None, addresses)))
        raise ValueError(f"the data set {train_data!r} has {count} address(es): write {known.form}")
    found = known.read(addresses, (splits or known.splits).split("+"))
    check_files([image.path for image in found.images], f"images of {word}, {splits or known.splits}")
    return found
