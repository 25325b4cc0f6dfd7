"""What is put into an index: a folder of images, shards, kept features, or a file of texts, each read in one order.

    images:FOLDER         every picture below it, by its path
    shards:TARS           as --train-data takes them but for pipe:, with captions; a key is SHARD/KEY
    features:FOLDER       what --save-features kept of one data set; of several features:FOLDER,NAME
    texts:FILE            a text per line, which is its own key

Each is read from its beginning, beside what the index has of it: `prolip.search.rebuild`.
"""
from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prolip.data.faults import FaultCounter, SampleFault, ShardFault
from prolip.data.reading.opening import is_local, local_path
from prolip.data.reading.shards import count_shard, expand_shards
from prolip.data.reading.tar import SAMPLE_BYTES, printable, read_shard
from prolip.data.samples.captions import LIKELY
from prolip.data.samples.decoding import decode_image
from prolip.data.samples.sample import IMAGE_SUFFIXES, Raw, image_bytes, json_record, plain_text
from prolip.evaluation.feature_store import FeatureStore
from prolip.evaluation.features import Features, load_features
from prolip.evaluation.model import Embedder, groups
from prolip.scores import Side
from prolip.search.index import Part
from prolip.search.rebuild import Read, Rebuild, digest, stamp
from prolip.search.store import Item
from prolip.utils.documents import read_file, text_lines
from prolip.utils.links import check_inside, walk
from prolip.utils.messages import explain_missing, listing
from prolip.utils.secrecy import redacted
from prolip.utils.threads import default_workers, in_threads

FORMS = "images:FOLDER, shards:TARS, features:FOLDER[,NAME] or texts:FILE"
#: Batches that are decoded ahead of the one that is embedded.
AHEAD = 2


def split(address: str) -> tuple[str, str]:
    """The word and the rest of an address. ValueError for another word."""
    word, _, rest = address.partition(":")
    if word not in ("images", "shards", "features", "texts") or not rest:
        raise ValueError(f"--data {address!r} begins with no known word: give {FORMS}")
    return word, rest


def side_of(address: str) -> Side:
    """What a source gives."""
    return "text" if split(address)[0] == "texts" else "image"


def count(address: str) -> int:
    """How many items a source has. ValueError for shards that are not here."""
    word, rest = split(address)
    if word == "features":
        return len(kept(address).keys)
    if word != "shards":
        return len(lines_of(rest)) if word == "texts" else sum(1 for _ in images_below(Path(rest)))
    if remote := [redacted(url) for url, *_ in expand_shards(rest) if not is_local(url)]:
        raise ValueError(f"{remote[0]} is not here to be counted: give how many items there are, --dry-run ITEMS")
    return sum(count_shard(local_path(url), None) for url, *_ in expand_shards(rest))


def read(
    rebuild: Rebuild, embedder: Embedder, batch_size: int = 256, faults: FaultCounter | None = None,
    workers: int | None = None,
) -> Iterator[Part]:  # fmt: skip
    """What a source has more than the index, through a model. faults: counts what cannot be read, or it is raised."""
    word, rest = split(rebuild.data)
    if word == "texts":
        texts = (Read({"key": text}, "", None) for text in lines_of(rest))
        for some in groups(rebuild.due(texts, batch_size), batch_size):
            z = embedder.embed_texts([read.item["key"] for read in some])
            yield rebuild.part(some, z, some[-1].position)
        return
    if word == "features":
        raise ValueError(f"{rebuild.address} was embedded already: it goes into an index without a model")
    reads = images_below(Path(rest)) if word == "images" else images_of(rest, rebuild, faults)
    yield from embedded(rebuild, reads, embedder, batch_size, faults, workers)


def embedded(
    rebuild: Rebuild, reads: Iterator[Read], embedder: Embedder, batch_size: int, faults: FaultCounter | None,
    workers: int | None,
) -> Iterator[Part]:  # fmt: skip
    """Images read and decoded by threads and embedded in batches; of one with the bytes of before what is there."""

    def decode(read: Read) -> Read:
        """With its pixels in the place of its data, a fault, or None where the bytes are those of before."""
        data = read.data
        if isinstance(data, SampleFault):
            return read
        try:
            data = read_file(data, SAMPLE_BYTES) if isinstance(data, str) else data
        except (OSError, ValueError) as error:
            return read._replace(data=SampleFault("missing image", getattr(error, "strerror", None) or str(error)))
        try:
            mark, former = digest(data), (read.former or {}).get("print", "")
            read.item["print"] = (read.mark or "") + mark
            return read._replace(data=None if former.endswith(mark) else embedder.preprocess(decode_image(data)))
        except SampleFault as fault:
            return read._replace(data=fault)
        except Exception as error:  # an image one pixel wide that cannot be resized, and more
            return read._replace(data=SampleFault("failed transform", f"{type(error).__name__}: {error}"))

    threads = default_workers() if workers is None else workers
    for batch in groups(in_threads(decode, rebuild.due(reads, batch_size), threads, AHEAD * batch_size), batch_size):
        for read in batch:
            if isinstance(read.data, SampleFault):
                if faults is None:
                    key = read.item["key"]
                    raise ValueError(f"{key}: {read.data}. Repair it, or give --skip-damaged") from read.data
                faults.add(read.data, read.item["key"])
                rebuild.lose(read)
        if fresh := [read for read in batch if isinstance(read.data, Tensor)]:
            z = embedder.encode_image(torch.stack([read.data for read in fresh]))
            yield rebuild.part(fresh, z, batch[-1].position)
        if same := [read for read in batch if read.data is None and read.moved]:
            yield rebuild.part(same, rebuild.index.gaussians([read.row for read in same]), batch[-1].position)


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
                yield Read(item, stamp(path), path)
            except (OSError, ValueError) as error:
                yield Read(item, None, SampleFault("missing image", getattr(error, "strerror", None) or str(error)))
    if not found:
        raise ValueError(f"{folder} holds no picture ({', '.join(IMAGE_SUFFIXES)}) but {listing(str(folder))}")


def images_of(shards: str, rebuild: Rebuild, faults: FaultCounter | None) -> Iterator[Read]:
    """The samples of shards with their captions, but of local shards that are as they were when they were read."""
    for url, *_ in expand_shards(shards):
        shard, path = redacted(url), local_path(url) if is_local(url) else ""
        own = stamp(path) if os.path.isfile(path) else None
        if own is not None and rebuild.before.get(shard) == own and not rebuild.restore:
            rebuild.kept.add(shard)
            rebuild.shards[shard] = own
            continue
        count = 0 if faults is None else faults.kinds.total()
        if own is not None:
            rebuild.shards[shard] = own
        try:
            for raw in read_shard(url, None if faults is None else faults.add):
                item: Item = {"key": printable(f"{Path(shard).stem}/{raw['__key__']}"), "shard": shard}
                try:
                    captions = captions_of(raw)
                    yield Read(item | ({"captions": captions} if captions else {}), None, image_bytes(raw))
                except SampleFault as fault:
                    yield Read(item, None, fault)
        except ShardFault as fault:
            if faults is None:
                raise ValueError(f"{url}: {fault}. Fetch it again, or give --skip-damaged") from fault
            faults.add(fault, url=url)
            rebuild.kept.add(shard)  # nothing says that what it held is gone
        if faults is not None and faults.kinds.total() > count:
            rebuild.shards.pop(shard, None)


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
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8 ({error}): convert it, such as by iconv") from error
    return [line for line in dict.fromkeys(text_lines(text)) if line]


def kept(address: str) -> Features:
    """The features that an address names. ValueError where several data sets are there."""
    folder, _, name = split(address)[1].partition(",")
    store = FeatureStore(folder)
    names = [task["dataset"]["name"] for task in store.tasks()]
    wanted = name or names[0]
    if wanted not in names or (not name and len(set(names)) > 1):
        raise ValueError(f"{folder} keeps {', '.join(names)}: name one of them, features:{folder},{names[0]}")
    return next(features for features in load_features(store) if features.dataset.name == wanted)


def parts_of(features: Features, rebuild: Rebuild, rows: int = 4096) -> Iterator[Part]:
    """Kept images that the index has not as they are."""
    captions: list[list[str]] = [[] for _ in features.keys]
    if features.owners is not None:
        for owner, caption in zip(features.owners.tolist(), features.captions):
            captions[owner].append(caption)

    def reads() -> Iterator[Read]:
        for row, (key, texts) in enumerate(zip(features.keys, captions)):
            mark = digest(torch.cat([x[row] for x in features.image]).numpy().tobytes())
            yield Read({"key": key, **({"captions": texts} if texts else {}), "print": mark}, mark, row)

    for some in groups(rebuild.due(reads(), rows), rows):
        yield rebuild.part(some, features.image.select([read.data for read in some]), some[-1].position)
