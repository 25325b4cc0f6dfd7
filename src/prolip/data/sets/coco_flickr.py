"""COCO and Flickr30k with the splits of Karpathy and Fei-Fei (2015): dataset_coco.json, dataset_flickr30k.json."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from prolip.data.faults import DamagedData
from prolip.data.sets.base import CaptionedImage, PublishedImages
from prolip.utils.documents import loads
from prolip.utils.messages import explain_missing


def read_karpathy(addresses: Sequence[str], splits: Collection[str]) -> PublishedImages:
    """The images of some splits in the file's order, with all captions.

    addresses: the JSON file, and the folder above val2014/ and train2014/, or that of Flickr30k's files.
    FileNotFoundError without file or folder, ValueError for a split without images, DamagedData for another layout.
    """
    file, root = map(Path, addresses)
    if not root.is_dir():
        raise FileNotFoundError(f"no image folder {root}: {explain_missing(str(root))}")
    if not file.is_file():
        raise FileNotFoundError(f"no annotations {file}: {explain_missing(str(file))}")
    try:
        content = loads(file.read_text(encoding="utf-8"), unique=True)
        records = content["images"]
        known = sorted({record["split"] for record in records})
    except (ValueError, KeyError, TypeError) as error:
        what = f"{file} is no file of Karpathy's splits ({type(error).__name__}: {error})"
        wanted = 'want {"images": [{"filename", "split", "sentences"}, ...]}'
        raise DamagedData(f"{what}: {wanted}; fetch dataset_coco.json or dataset_flickr30k.json") from error
    for split in splits:
        if split not in known:
            raise ValueError(f"{file} has no images of the split {split!r}: it has {', '.join(known)}")
    images = [parse_record(record, root, file) for record in records if record["split"] in splits]
    return PublishedImages(f"{content.get('dataset') or file.stem}_karpathy", images)


def parse_record(record: dict[str, Any], root: Path, file: Path) -> CaptionedImage:
    """One image; COCO's key is its id, Flickr30k's its name. DamagedData where it lacks something."""
    try:
        name, sentences = record["filename"], record["sentences"]
        texts = tuple(sentence["raw"].strip() for sentence in sentences)
        ids = tuple(int(sentence["sentid"]) for sentence in sentences)
        number = int(record.get("cocoid", record.get("imgid", -1)))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        name = record.get("filename", "?")
        raise DamagedData(f"{file}: image {name!r} lacks {error}: fetch the file again") from error
    if not texts or not all(texts):
        has = f"{sum(not text for text in texts)} empty captions" if texts else "no caption"
        raise DamagedData(f"{file}: {name} has {has}: write them, or leave the image out of the split")
    below = root / record.get("filepath", "") / name
    path = below if below.is_file() else root / name
    key = str(record["cocoid"]) if "cocoid" in record else name
    return CaptionedImage(key, str(path if path.is_file() else below), texts, {"split": record["split"]}, number, ids)
