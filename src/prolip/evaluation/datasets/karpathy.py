"""COCO and Flickr30k with the splits of Karpathy and Fei-Fei (2015): dataset_coco.json, dataset_flickr30k.json."""
from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

from prolip.data.faults import FaultCounter
from prolip.data.reading.shards import explain_missing
from prolip.evaluation.datasets.base import DamagedData, Dataset, Sample, fingerprint
from prolip.evaluation.datasets.coco import FURTHER
from prolip.evaluation.datasets.folders import read_files
from prolip.evaluation.datasets.places import check_files
from prolip.utils.documents import loads

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
    file, root = Path(annotations), Path(images)
    if not root.is_dir():
        raise FileNotFoundError(f"no image folder {root}: {explain_missing(str(root))}")
    records, splits, known = read_records(file)
    chosen = [record for record in records if record["split"] == split]
    if not chosen:
        raise ValueError(f"{file} has no images of the split {split!r}: it has {', '.join(splits)}")
    rows = [parse_record(record, root, file, captions) for record in chosen]
    files = [(path, sample) for path, sample, _, _ in rows]
    sizes = check_files([path for path, _ in files], f"images of the split {split!r} of {file.name} below {root}")
    return Dataset(
        name=name or f"{known or file.stem}_karpathy_{split}",
        kind="retrieval",
        samples=partial(read_files, files, damage),
        fingerprint=fingerprint("karpathy", [(s.key, size, s.captions) for (_, s), size in zip(files, sizes)]),
        source=f"{file},{root}",
        size=len(rows),
        info={
            "split": split,
            "image_ids": [image_id for _, _, image_id, _ in rows],
            "caption_ids": [number for _, _, _, caption_ids in rows for number in caption_ids],
        },
        damage=damage,
        further=FURTHER,
    )


def read_records(file: Path) -> tuple[list[dict[str, Any]], list[str], str]:
    """The records of the JSON file, its splits, and the data set's name in it."""
    if not file.is_file():
        raise FileNotFoundError(f"no annotations {file}: {explain_missing(str(file))}")
    try:
        content = loads(file.read_text(encoding="utf-8"), unique=True)
        records = content["images"]
        splits = sorted({record["split"] for record in records})
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedData(
            f"{file} is no file of Karpathy's splits ({type(error).__name__}: {error}): want "
            '{"images": [{"filename", "split", "sentences"}, ...]}; fetch dataset_coco.json or dataset_flickr30k.json'
        ) from error
    return records, splits, str(content.get("dataset", ""))


def parse_record(
    record: dict[str, Any], root: Path, file: Path, wanted: int | None
) -> tuple[str, Sample, int, tuple[int, ...]]:
    """One image: its file, its sample, its id and those of its captions. DamagedData where it lacks something."""
    try:
        name, sentences = record["filename"], record["sentences"]
        texts = tuple(sentence["raw"].strip() for sentence in sentences)[:wanted]
        ids = tuple(int(sentence["sentid"]) for sentence in sentences)[:wanted]
        number = int(record.get("cocoid", record.get("imgid", -1)))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        name = record.get("filename", "?")
        raise DamagedData(f"{file}: image {name!r} lacks {error}: fetch the file again") from error
    if len(texts) < (wanted or 1) or not all(texts):
        raise DamagedData(
            f"{file}: {name} has {sum(map(bool, texts))} captions, wanted {wanted or 'at least 1'}: give captions=None "
            "for as many as there are"
        )
    below = root / record.get("filepath", "") / name
    path = below if below.is_file() else root / name
    key = str(record["cocoid"]) if "cocoid" in record else name
    return str(path if path.is_file() else below), Sample(key, b"", captions=texts), number, ids
