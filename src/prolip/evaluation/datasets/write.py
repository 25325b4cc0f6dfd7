"""Writers of training shards, and of test sets in clip_benchmark's layout."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from webdataset import ShardWriter

from prolip.data.faults import DamagedData
from prolip.data.reading.shard_index import INDEX_NAME, build_index
from prolip.data.samples import Raw
from prolip.evaluation.datasets.base import Dataset
from prolip.evaluation.datasets.webdataset import COUNT, RELEVANCE, TYPE, class_files
from prolip.utils.outputs import check_output, replacing_folder

#: Samples of a shard; the split that is written.
SHARD, SPLIT = 1000, "test"
#: Names, dates and owners are constant, so that equal samples give equal bytes.
CONSTANT = {"encoder": False, "mtime": 0, "user": "", "group": ""}


def write_shards(folder: Path, samples: Iterable[Raw], pattern: str = "%d.tar", shard: int = SHARD) -> None:
    """Write shards 0.tar, ... into a new folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with ShardWriter(str(folder / pattern), maxcount=shard, verbose=0, **CONSTANT) as writer:
        for raw in samples:
            writer.write(raw)


def image_member(data: bytes) -> dict[str, bytes]:
    """Return an image under the suffix of its first bytes."""
    return {{b"RIFF": "webp", b"\x89PNG": "png"}.get(data[:4], "jpg"): data}


def check_empty(folder: str | os.PathLike) -> Path:
    """Return the folder if it is empty. FileExistsError, and ValueError for a folder that is not writable."""
    check_output(folder, folder=True)
    if Path(folder).is_dir() and any(Path(folder).iterdir()):
        raise FileExistsError(f"{folder} has files already: give another folder, or remove it")
    return Path(folder)


def write_training(samples: Iterable[Raw], folder: str | os.PathLike, shard: int = SHARD) -> int:
    """Write training shards with their index, in one step; return the number of samples. Repeated keys get numbers."""
    keys: set[str] = set()

    def numbered() -> Iterator[Raw]:
        for raw in samples:
            key = raw["__key__"] if raw["__key__"] not in keys else f"{raw['__key__']}_{len(keys)}"
            keys.add(key)
            yield raw | {"__key__": key}

    with replacing_folder(check_empty(folder)) as place:
        write_shards(place, numbered(), "%06d.tar", shard)
        if not keys:
            raise ValueError("the source has no sample to write: check it, or give a larger --split")
        build_index([str(path) for path in sorted(place.glob("*.tar"))], str(place / INDEX_NAME))
    return len(keys)


def write_wds(dataset: Dataset, folder: str | os.PathLike, shard: int = SHARD) -> int:
    """Write a data set of classes or captions in clip_benchmark's layout, in one step; return the number of images."""
    if dataset.kind not in ("classification", "retrieval") or dataset.info.get("relevant_by"):
        what = "retrieval by class" if dataset.info.get("relevant_by") else dataset.kind
        raise ValueError(f"{dataset.source} is {what}, which --layout wds does not support: remove --layout")
    keys: dict[str, str] = {}

    def samples() -> Iterator[Raw]:
        for number, sample in enumerate(dataset.samples()):
            keys[sample.key] = f"{number:07d}"
            texts = {"cls": str(sample.label).encode()}
            if sample.captions is not None:
                texts = {"txt": "\n".join(" ".join(text.splitlines()) for text in sample.captions).encode()}
            yield {"__key__": keys[sample.key], **image_member(sample.image), **texts}

    classes = dataset.kind == "classification"
    files = class_files(dataset.classnames, dataset.templates) if classes else {TYPE: "retrieval\n"}
    with replacing_folder(check_empty(folder)) as place:
        write_split(place, samples(), files, shard)
        if not keys:
            raise DamagedData(f"no image in {dataset.source}: {dataset.why_empty}")
        if dataset.relevance is not None:
            pairs: dict[str, list[int]] = {}
            for key, index in sorted(dataset.relevance):
                pairs.setdefault(keys[key], []).append(index)
            (place / SPLIT / RELEVANCE).write_text(json.dumps({"pairs": pairs}), encoding="utf-8")
    return len(keys)


def write_split(place: Path, samples: Iterable[Raw], files: Mapping[str, str], shard: int = SHARD) -> None:
    """Write samples as the shards of a split, and small files by their path."""
    write_shards(place / SPLIT, samples, shard=shard)
    count = f"{len(list((place / SPLIT).glob('*.tar')))}\n"
    for name, text in {**files, f"{SPLIT}/{COUNT}": count}.items():
        (place / name).write_text(text, encoding="utf-8")
