"""Data sets by word and address: each word opens its format, everything else is refused; the documented new format."""

import miniatures as mini
import pytest

import own_data
from prolip.data.faults import FaultCounter
from prolip.evaluation.datasets.registry import READERS, open_dataset


def specs(root):
    """A data set of every word."""
    own = own_data.write(root / "own")
    return {
        "wds": str(mini.wds_classification(root / "wds")),
        "imagenet": str(mini.class_folders(root / "val", ["a", "b"])),
        "coco": ",".join(map(str, mini.karpathy(root / "coco"))),
        "flickr": ",".join(map(str, mini.karpathy(root / "flickr", dataset="flickr30k"))),
        "cub": ",".join(map(str, mini.cub(root / "cub"))),
        "iapr": str(mini.iapr(root / "iaprtc12")),
        "captions": str(mini.caption_table(root / "table")),
        "winogavil": str(mini.winogavil(root / "wino")),
        **{kind: address.partition(":")[2] for kind, address in own.items() if kind not in ("bytes", "classes")},
        "images": f"{root}/own/classes",
    }


def test_every_word_opens_its_format(tmp_path):
    made = specs(tmp_path)
    assert set(made) == set(READERS)
    damage = FaultCounter()
    for word, address in made.items():
        dataset = open_dataset(f"{word}:{address}", damage=damage)
        assert next(dataset.samples()).open().size == (24, 24) and dataset.damage is damage
    assert open_dataset(f"cub:{made['cub']},{tmp_path / 'cub'}", split="seen").size == 3


@pytest.mark.parametrize(
    "spec, split, message",
    [
        ("data/val", None, "'data/val' is missing"),
        ("texts:words.txt", None, "data of the kind texts, which this flag does not accept: give one of csv:FILE"),
        ("wsd:data", None, "Did you mean wds"),
        ("coco:a.json", None, r"has 1 address\(es\): write coco:JSON,IMAGES"),
        ("iapr:a,b,c", None, r"has 3 address\(es\): write iapr:FOLDER\[,LISTS\]"),
        ("cub:a,", None, r"write cub:CAPTIONS,IMAGES\[,LISTS\]"),
        ("winogavil:a", "val", "winogavil:FOLDER has no splits: drop --split val"),
    ],
)
def test_other_forms_are_refused(spec, split, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        open_dataset(spec, split)
