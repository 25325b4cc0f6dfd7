"""Sources of an index: images, saved features or a text file, read in a fixed order (docs/reference/search_index.md).

Each pass reads a source from its beginning and compares it with the index: it embeds new or changed items and removes
missing ones. So after an interruption, a pass resumes by finding the items that the index has.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from prolip.data.faults import FaultCounter, SampleFault, ShardFault
from prolip.data.images import decode_image
from prolip.data.reading.named import KINDS as WORDS
from prolip.data.reading.named import ROWS, NamedSource, parse_source, without_word
from prolip.data.reading.rows import Stated, base_of, file_of, key_of, read_rows, stated_by, stated_by_row
from prolip.data.reading.shards import expand_shards
from prolip.data.reading.stream import expand_braces, is_local, local_path
from prolip.data.reading.tar import printable, read_shard
from prolip.data.samples import image_bytes
from prolip.embedder import Embedder, ModelCard, groups
from prolip.evaluation.cache import FeatureStore
from prolip.evaluation.embed import Features, load_features
from prolip.gaussian import Gaussian
from prolip.models.diagnose import is_run
from prolip.search.store import Item, Part
from prolip.utils.documents import read_json, text_lines
from prolip.utils.messages import explain_missing
from prolip.utils.secrecy import redacted
from prolip.utils.threads import default_workers, in_threads

if TYPE_CHECKING:
    from prolip.search.index import SearchIndex

KINDS = (*ROWS, "shards", "features", "texts")
FORMS = ", ".join(WORDS[kind] for kind in KINDS)
AHEAD = 2  # batches decoded ahead of the current one


class Read(NamedTuple):
    """An item of a source with a fingerprint "print": size, time and a hash for a file, a hash for other items."""

    item: Item
    mark: str | None  # beginning of its fingerprint; None: unknown until it is read
    data: Any  # to embed
    position: int = 0  # position in the source, from 1
    row: int = -1  # row in the index, -1 for none
    former: Item | None = None  # the item at that row

    @property
    def moved(self) -> bool:  # whether anything except the fingerprint changed
        return self.former is not None and {**self.former, "print": ""} != {**self.item, "print": ""}


class Rebuild:
    """One pass over a source by the writer of an index. data: the address as given; the manifest stores it without
    secrets. restore: add deleted items again. faults: counter of unreadable items; None: raise. withheld: items kept
    deleted.
    """

    def __init__(self, index: SearchIndex, data: str, restore: bool = False, faults: FaultCounter | None = None):
        self.index, self.data, self.restore, self.faults = index, data, restore, faults
        self.address = address = redacted(data)
        self.added = self.replaced = self.removed = self.withheld = 0
        self.source = digest(address.encode(errors="surrogatepass"))[:8]
        self.known = address in {x["address"] for x in index.store.values["sources"]}
        #: States of local shards read completely: earlier, and in this pass; shards whose unseen items stay.
        self.before, self.shards, self.kept = index.store.shards(address), dict[str, str](), set[str]()
        self.seen = np.zeros(len(index.store), dtype=bool)

    def due(self, reads: Iterator[Read], size: int) -> Iterator[Read]:
        """Yield new and changed items, without deleted ones. ValueError for the key of another source."""
        for group in groups(enumerate(reads, 1), size):
            keys = [read.item["key"] for _, read in group]
            unwanted = self.index.store.are_unwanted(keys) & (not self.restore)
            for (position, read), row, is_unwanted in zip(group, self.index.find(keys).tolist(), unwanted.tolist()):
                former = None if row < 0 else self.index.items([row])[0]
                item = read.item | {"source": self.source}
                read = read._replace(item=item, position=position, row=row, former=former)
                if former is not None:
                    if former.get("source") != self.source or row >= len(self.seen) or self.seen[row]:
                        what = f"the key {item['key']} of {self.address} is in the index already"
                        raise ValueError(f"{what}. Rename or remove one of the two items")
                    self.seen[row] = True
                    if not read.moved and read.mark is not None and former.get("print", "").startswith(read.mark):
                        continue
                elif is_unwanted:
                    self.withheld += 1
                    continue
                yield read

    def part(self, reads: list[Read], z: Gaussian) -> Part:
        """Count items as added or replaced."""
        replaced = sum(read.former is not None for read in reads)
        self.replaced, self.added = self.replaced + replaced, self.added + len(reads) - replaced
        return Part([read.item for read in reads], z, reads[-1].position)

    def parts(self, reads: Iterator[Read], size: int, embed: Callable[[list[Read]], Gaussian]) -> Iterator[Part]:
        """Embed the due items, `size` at a time."""
        for some in groups(self.due(reads, size), size):
            yield self.part(some, embed(some))

    def run(self, parts: Iterator[Part], rows: int) -> None:
        """Update the index to the contents of the source, `rows` at a time; then remove unseen items."""

        def whole() -> Iterator[Part]:
            yield from parts
            if not self.known:  # a new source has no rows: skip the others' rows
                return
            store = self.index.store
            unseen = np.flatnonzero(~self.seen & (store.fates[: len(self.seen)] == 0))
            items = (item for row in unseen for item in store.items([int(row)]))  # one in memory at a time
            gone = [x["key"] for x in items if x.get("source") == self.source and x.get("shard") not in self.kept]
            if gone:
                store.delete(gone)
            self.removed = len(gone)

        self.index.append(self.address, whole(), rows, replace=True)
        every = dict.fromkeys(self.before) | self.shards
        if changed := {shard: state for shard, state in every.items() if self.before.get(shard) != state}:
            self.index.store.note_shards(self.address, changed)

    def __str__(self) -> str:
        withheld = f"; {self.withheld:,} stay deleted (--restore adds them again)" if self.withheld else ""
        counts = f"{self.added:,} added, {self.replaced:,} replaced, {self.removed:,} removed{withheld}"
        if self.faults is None or not self.faults.kinds:
            return counts
        lost = ", ".join(f"{count} {kind}" for kind, count in self.faults.kinds.items())
        return f"{counts}\nskipped: {lost}, such as {next(iter(self.faults.examples), '')}"


def stamp(path: str) -> str:
    """Return the size and modification time of a file, "" if it is missing."""
    found = os.stat(path) if os.path.isfile(path) else None
    return "" if found is None else f"{found.st_size} {found.st_mtime_ns} "


def digest(data: bytes) -> str:
    """Return 128 bits of the contents of an item."""
    return blake2b(data, digest_size=16).hexdigest()


def trained_sources(index: SearchIndex, rows: Sequence[int], model: str) -> list[str]:
    """Return the sources of rows that the run of a model `local-dir:RUN/model` trained on; [] if no run is known."""
    run = Path(model.removeprefix("local-dir:")).absolute().parent
    if not model.startswith("local-dir:") or not is_run(run):
        return []
    trained = files_of((read_json(run / "config.json").get("data") or {}).get("train_data") or "")
    known = {item.get("source") for item in index.items(rows)}
    own = [x["address"] for x in index.store.values["sources"]]
    marks = [digest(address.encode(errors="surrogatepass"))[:8] for address in own]  # as in `Rebuild`
    return [address for address, mark in zip(own, marks) if mark in known and files_of(address) & trained]


def files_of(address: str) -> set[str]:
    """Return the real paths that the address of a source names; a lone brace is part of a name."""
    found: set[str] = set()
    for part in without_word(address).split("::") if address else []:
        paths = [part]
        if not os.path.exists(part):
            with suppress(ValueError):
                paths = expand_braces(part)
        found.update(map(os.path.realpath, paths))
    return found


def parse(address: str) -> NamedSource:
    """Return a source by its kind and address. ValueError for other kinds, FileNotFoundError."""
    return parse_source(address, "--data", KINDS)


def described(source: str, embedder: Embedder | None) -> tuple[ModelCard, int, dict[str, Any]]:
    """Return the model card, the dimensions, and how to load the model ({} for saved features) of a new index."""
    if parse(source).kind == "features":
        features = kept(source)
        return features.model, features.image.mean.shape[1], {}
    if embedder is None:
        raise ValueError("--model is required to embed the images and the queries")
    words = {"load": dict(embedder.loaded_from)} if embedder.loaded_from else {}
    return embedder.card, embedder.embed_texts([""]).mean.shape[1], words


def read(rebuild: Rebuild, embedder: Embedder, batch_size: int = 256, workers: int | None = None) -> Iterator[Part]:
    """Embed new and changed items; threads read and decode. An image with unchanged bytes keeps its embedding."""
    source, faults = parse(rebuild.data), rebuild.faults
    if source.kind == "texts":
        texts = (Read({"key": text}, "", None) for text in lines_of(source.address))
        yield from rebuild.parts(texts, batch_size, lambda some: embedder.embed_texts([x.item["key"] for x in some]))
        return
    of_shards = source.kind == "shards"
    reads = images_of(source.address, rebuild) if of_shards else images_in(source, None if faults is None else 1.0)

    def decode(read: Read) -> Read:
        """Return the item with pixels as data, or with a fault; None if its bytes are unchanged."""
        try:
            if isinstance(read.data, SampleFault):
                raise read.data
            data = image_bytes(read.data()) if callable(read.data) else read.data
            mark, former = digest(data), (read.former or {}).get("print", "")
            read.item["print"] = (read.mark or "") + mark
            return read._replace(data=None if former.endswith(mark) else embedder.preprocess(decode_image(data)))
        except Exception as error:  # for example, an image one pixel wide cannot be resized
            known, what = isinstance(error, SampleFault), f"{type(error).__name__}: {error}"
            return read._replace(data=error if known else SampleFault("failed transform", what))

    threads = default_workers() if workers is None else workers
    for batch in groups(in_threads(decode, rebuild.due(reads, batch_size), threads, AHEAD * batch_size), batch_size):
        for read in (read for read in batch if isinstance(read.data, SampleFault)):
            if faults is None:
                raise ValueError(f"{read.item['key']}: {read.data}. Repair it, or give --skip-damaged") from read.data
            faults.add(read.data, read.item["key"])
            if read.row >= 0:
                rebuild.seen[read.row] = False  # remove it, and read its shard again next time
            rebuild.shards.pop(read.item.get("shard", ""), None)
        if fresh := [read for read in batch if isinstance(read.data, Tensor)]:
            yield rebuild.part(fresh, embedder.encode_image(torch.stack([read.data for read in fresh])))
        if same := [read for read in batch if read.data is None and read.moved]:
            yield rebuild.part(same, rebuild.index.gaussians([read.row for read in same]))


def images_in(source: NamedSource, max_bad: float | None) -> Iterator[Read]:
    """Yield the images of a folder, a table or a published set, with their captions or classes."""
    rows, base = read_rows(source, max_bad=max_bad), base_of(source)
    for number, row in enumerate(rows.rows):
        item: Item = {"key": key_of(row, base), **words_of(stated_by_row(row))}
        item |= {"table": str(source), "row": number} if row.inside else {"path": os.path.abspath(row.path)}
        yield Read(item, stamp(file_of(row)) or None, partial(rows, number))


def words_of(known: Stated) -> Item:
    """Return the captions of an item, or its class."""
    texts = list(known[0]) or ([known[1]] if known[1] else [])
    return {"captions": texts} if texts else {}


def images_of(shards: str, rebuild: Rebuild) -> Iterator[Read]:
    """Yield the samples of shards with their captions, except those of unchanged local shards."""
    faults = rebuild.faults
    for url, *_ in expand_shards(shards):
        shard = redacted(url)
        if state := stamp(local_path(url)) if is_local(url) else "":
            rebuild.shards[shard] = state
            if rebuild.before.get(shard) == state and not rebuild.restore:
                rebuild.kept.add(shard)
                continue
        count = 0 if faults is None else faults.kinds.total()
        try:
            for raw in read_shard(url, None if faults is None else faults.add):
                item: Item = {"key": printable(f"{Path(shard).stem}/{raw['__key__']}"), "shard": shard}
                try:
                    yield Read(item | words_of(stated_by(raw)), None, image_bytes(raw))
                except SampleFault as fault:
                    yield Read(item, None, fault)
        except ShardFault as fault:
            if faults is None:
                raise ValueError(f"{url}: {fault}. Fetch it again, or give --skip-damaged") from fault
            faults.add(fault, url=url)
            rebuild.kept.add(shard)  # its items may still exist
        if faults is not None and faults.kinds.total() > count:
            rebuild.shards.pop(shard, None)


def lines_of(path: str) -> list[str]:
    """Return the distinct texts of a UTF-8 file in order, without blank lines."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"no file {path}: {explain_missing(path)}")
    try:
        return [line for line in dict.fromkeys(text_lines(Path(path).read_text(encoding="utf-8-sig"))) if line]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error}). Convert it, for example with iconv") from error


def kept(address: str) -> Features:
    """Return the saved features at an address. ValueError if it does not name one of several data sets."""
    folder, _, name = parse(address).address.partition(",")
    store = FeatureStore(folder)
    names = [task["dataset"]["name"] for task in store.tasks()]
    wanted = name or names[0]
    if wanted not in names or (not name and len(set(names)) > 1):
        raise ValueError(f"{folder} contains {', '.join(names)}. Name one, such as features:{folder},{names[0]}")
    return next(features for features in load_features(store) if features.dataset.name == wanted)


def parts_of(features: Features, rebuild: Rebuild, rows: int = 4096) -> Iterator[Part]:
    """Yield saved images that are new or changed. ValueError for features of another model."""
    card = rebuild.index.card
    if card is not None and features.model.fingerprint != card.fingerprint:
        both = f"{rebuild.address} was embedded by {features.model.name}, but this index by {card.name}"
        raise ValueError(f"{both}. Use features of the same model")
    captions: list[list[str]] = [[] for _ in features.keys]
    if features.owners is not None:
        for owner, caption in zip(features.owners.tolist(), features.captions):
            captions[owner].append(caption)

    def reads() -> Iterator[Read]:
        for row, (key, texts) in enumerate(zip(features.keys, captions)):
            mark = digest(torch.cat([x[row] for x in features.image]).numpy().tobytes())
            yield Read({"key": key, **({"captions": texts} if texts else {}), "print": mark}, mark, row)

    return rebuild.parts(reads(), rows, lambda some: features.image.select([read.data for read in some]))
