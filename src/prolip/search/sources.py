"""What is put into an index: a folder of images, shards, kept features, or a file of texts, each read in one order.

    images:FOLDER         every picture below it, by its path
    shards:TARS           as --train-data takes them but for pipe:, with captions; a key is SHARD/KEY
    features:FOLDER       what --save-features kept of one data set; of several features:FOLDER,NAME
    texts:FILE            a text per line, which is its own key

A position counts what was read, damaged or not, so that reading goes on where it was broken off.
"""
from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from prolip.data.faults import FaultCounter, SampleFault, ShardFault
from prolip.data.reading.shards import expand_shards
from prolip.data.reading.tar import SAMPLE_BYTES, printable, read_shard
from prolip.data.samples.captions import LIKELY
from prolip.data.samples.decoding import decode_image
from prolip.data.samples.sample import IMAGE_SUFFIXES, Raw, image_bytes, json_record, plain_text
from prolip.evaluation.feature_store import FeatureStore
from prolip.evaluation.features import Features, load_features
from prolip.evaluation.model import Embedder, groups
from prolip.scores import Side
from prolip.search.index import Part
from prolip.search.store import Item
from prolip.utils.documents import read_file, text_lines
from prolip.utils.links import check_inside, walk
from prolip.utils.messages import explain_missing, listing
from prolip.utils.secrecy import redacted
from prolip.utils.threads import default_workers, in_threads

FORMS = "images:FOLDER, shards:TARS, features:FOLDER[,NAME] or texts:FILE"
#: Batches that are decoded ahead of the one that is embedded.
AHEAD = 2


class Read(NamedTuple):
    """What is known of an image, and its bytes, or why there are none."""

    item: Item
    data: bytes | SampleFault


def split(address: str) -> tuple[str, str]:
    """The word and the rest of an address. ValueError for another word."""
    word, _, rest = address.partition(":")
    if word not in ("images", "shards", "features", "texts") or not rest:
        raise ValueError(f"--data {address!r} begins with no known word: give {FORMS}")
    return word, rest


def side_of(address: str) -> Side:
    """What a source gives."""
    return "text" if split(address)[0] == "texts" else "image"


def read(
    address: str, embedder: Embedder, batch_size: int = 256, start: int = 0, faults: FaultCounter | None = None,
    workers: int | None = None,
) -> Iterator[Part]:  # fmt: skip
    """A source through a model, from a position on. faults: counts what cannot be read; without it that is raised."""
    word, rest = split(address)
    if word == "texts":
        texts = lines_of(rest)
        for low in range(start, len(texts), batch_size):
            some = texts[low : low + batch_size]
            yield Part([{"key": text} for text in some], embedder.embed_texts(some), low + len(some))
        return
    if word == "features":
        raise ValueError(f"{address} was embedded already: it goes into an index without a model")
    images = images_below(Path(rest)) if word == "images" else images_of(rest, faults)
    yield from embedded(islice(images, start, None), embedder, batch_size, start, faults, workers)


def embedded(
    images: Iterator[Read], embedder: Embedder, batch_size: int, start: int, faults: FaultCounter | None,
    workers: int | None,
) -> Iterator[Part]:  # fmt: skip
    """Images decoded by threads and embedded in batches."""

    def decode(image: Read) -> tuple[Item, Tensor | SampleFault]:
        if isinstance(image.data, SampleFault):
            return image.item, image.data
        try:
            return image.item, embedder.preprocess(decode_image(image.data))
        except SampleFault as fault:
            return image.item, fault
        except Exception as error:  # an image one pixel wide that cannot be resized, and more
            return image.item, SampleFault("failed transform", f"{type(error).__name__}: {error}")

    threads = default_workers() if workers is None else workers
    position = start
    for batch in groups(in_threads(decode, images, threads, AHEAD * batch_size), batch_size):
        items, pixels = [], []
        position += len(batch)
        for item, found in batch:
            if not isinstance(found, SampleFault):
                items.append(item)
                pixels.append(found)
            elif faults is None:
                raise ValueError(f"{item['key']}: {found}. Repair it, or give --skip-damaged") from found
            else:
                faults.add(found, item["key"])
        if items:
            yield Part(items, embedder.encode_image(torch.stack(pixels)), position)


def images_below(folder: Path) -> Iterator[Read]:
    """The pictures below a folder, by their paths; hidden ones are left out, and a link that leaves it is a fault."""
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder}: {explain_missing(str(folder))}")
    found = False
    for here, names in walk(folder):
        for name in names:
            if name.startswith(".") or os.path.splitext(name)[1][1:].lower() not in IMAGE_SUFFIXES:
                continue
            found, path = True, os.path.join(here, name)
            key = printable(os.path.relpath(path, folder).replace(os.sep, "/"))
            item = {"key": key, "path": os.path.abspath(path)}
            try:
                check_inside(folder, path)
                yield Read(item, read_file(path, SAMPLE_BYTES))
            except (OSError, ValueError) as error:
                yield Read(item, SampleFault("missing image", getattr(error, "strerror", None) or str(error)))
    if not found:
        raise ValueError(f"{folder} holds no picture ({', '.join(IMAGE_SUFFIXES)}) but {listing(str(folder))}")


def images_of(shards: str, faults: FaultCounter | None) -> Iterator[Read]:
    """The samples of shards with their captions."""
    for url, *_ in expand_shards(shards):
        shard = redacted(url)
        try:
            for raw in read_shard(url, None if faults is None else faults.add):
                item: Item = {"key": f"{Path(shard).stem}/{raw['__key__']}", "shard": shard}
                try:
                    captions = captions_of(raw)
                    yield Read(item | ({"captions": captions} if captions else {}), image_bytes(raw))
                except SampleFault as fault:
                    yield Read(item, fault)
        except ShardFault as fault:
            if faults is None:
                raise ValueError(f"{url}: {fault}. Fetch it again, or give --skip-damaged") from fault
            faults.add(fault, url=url)


def captions_of(raw: Raw) -> list[str]:
    """The lines of its `.txt`, or the first field of its `.json` that captions are often called by."""
    if "txt" in raw:
        return [line for line in plain_text(raw).splitlines() if line.strip()]
    record = json_record(raw) if "json" in raw else {}
    value: Any = next((record[name] for name in LIKELY if record.get(name)), [])
    return [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]


def lines_of(path: str) -> list[str]:
    """The distinct texts of a file, in its order, without blank lines."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"no file {path}: {explain_missing(path)}")
    return [text for text in dict.fromkeys(text_lines(Path(path).read_text(encoding="utf-8-sig"))) if text]


def kept(address: str) -> Features:
    """The features that an address names. ValueError where several data sets are there."""
    folder, _, name = split(address)[1].partition(",")
    store = FeatureStore(folder)
    names = [task["dataset"]["name"] for task in store.tasks()]
    wanted = name or names[0]
    if wanted not in names or (not name and len(set(names)) > 1):
        raise ValueError(f"{folder} keeps {', '.join(names)}: name one of them, features:{folder},{names[0]}")
    return next(features for features in load_features(store) if features.dataset.name == wanted)


def parts_of(features: Features, start: int = 0, rows: int = 4096) -> Iterator[Part]:
    """Kept images from a position on."""
    captions: list[list[str]] = [[] for _ in features.keys]
    if features.owners is not None:
        for owner, caption in zip(features.owners.tolist(), features.captions):
            captions[owner].append(caption)
    for low in range(start, len(features.keys), rows):
        some = slice(low, min(low + rows, len(features.keys)))
        items = [{"key": key} | ({"captions": texts} if texts else {})
                 for key, texts in zip(features.keys[some], captions[some])]  # fmt: skip
        yield Part(items, features.image.select(some), some.stop)
