"""Data sets by a word and an address, as commands take them: `wds:FOLDER`, `coco:JSON,ROOT`."""
from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from prolip.utils.flags import did_you_mean

if TYPE_CHECKING:
    from prolip.data.faults import FaultCounter
    from prolip.evaluation.datasets.base import Dataset
    from prolip.evaluation.metrics.blockwise import Further


class Reader(NamedTuple):
    """A reader, whether it has splits, and how many comma-separated addresses it takes at least and at most.

    One beyond the least is the place of the lists of its splits. open: module of this folder and function, which is
    imported late, as the command line shows the forms.
    """

    open: str
    form: str
    splits: bool
    least: int = 1
    most: int = 1


READERS = {
    "wds": Reader("wds.open_wds", "wds:FOLDER or URL", True),
    "imagenet": Reader("folders.open_folder", "imagenet:FOLDER", False),
    "coco": Reader("captioned.open_karpathy", "coco:JSON,IMAGES", True, 2, 2),
    "flickr": Reader("captioned.open_karpathy", "flickr:JSON,IMAGES", True, 2, 2),
    "cub": Reader("captioned.open_cub", "cub:CAPTIONS,IMAGES[,LISTS]", True, 2, 3),
    "iapr": Reader("captioned.open_iapr", "iapr:FOLDER[,LISTS]", True, 1, 2),
    "captions": Reader("tables.open_caption_table", "captions:FOLDER", False),
    "winogavil": Reader("tables.open_winogavil", "winogavil:FOLDER", False),
}
FORMS = ", ".join(reader.form for reader in READERS.values())


def further_of(info: dict[str, Any]) -> Further | None:
    """What the labels of a data set with this `info` add to its metrics, where only its description is left."""
    from prolip.evaluation.datasets.coco import FURTHER

    return FURTHER if "caption_ids" in info else None


def has_splits(spec: str) -> bool:
    """Whether the data that a word means come in splits; False for an unknown word."""
    reader = READERS.get(spec.partition(":")[0])
    return reader is not None and reader.splits


def open_dataset(spec: str, split: str | None = None, damage: FaultCounter | None = None) -> Dataset:
    """The data set that a word and its addresses name; ValueError for another word or number of addresses.

    split: of readers that have splits, default test. Errors of the readers pass through.
    """
    word, colon, rest = spec.partition(":")
    if not colon or word not in READERS:
        remedy = did_you_mean(word, READERS, "give one of these")
        raise ValueError(f"the data set {spec!r} begins with no known word: {remedy} ({FORMS})")
    reader = READERS[word]
    addresses = rest.split(",") if reader.most > 1 else [rest]
    if not reader.least <= len(addresses) <= reader.most or not all(addresses):
        raise ValueError(f"the data set {spec!r} has {len(addresses)} address(es): write {reader.form}")
    if split is not None and not reader.splits:
        raise ValueError(f"{reader.form} has no splits: drop --split {split}")
    options = {"split": split} if split is not None else {}
    lists = {"lists": addresses.pop()} if len(addresses) > reader.least else {}
    module, _, name = reader.open.partition(".")
    open_it = getattr(import_module(f"prolip.evaluation.datasets.{module}"), name)
    return open_it(*addresses, **options, **lists, damage=damage)
