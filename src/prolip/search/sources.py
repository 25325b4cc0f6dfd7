"""What is put into an index: images of any source, kept features, or a file of texts, each read in one order.

    images:FOLDER         every picture below it, by its path
    csv:FILE ...          tables, coco: and other published sets, with captions or classes; a key is the image's path
    shards:TARS           as --train-data takes them but for pipe:, with captions; a key is SHARD/KEY
    features:FOLDER       what --save-features kept of one data set; of several features:FOLDER,NAME
    texts:FILE            a text per line, which is its own key

Each is read from its beginning, beside what the index has of it: what is new or has changed is embedded, what is gone
is removed. Every item has a fingerprint, "print": of a picture's file its size, its time of change and a hash of its
bytes; of a sample of shards the hash alone; of kept features a hash of the row; a text is its own. A file with the size
and time of before is not read, and one with the bytes of before is not decoded. A local shard that was read without a
fault, and has the size and time of before, is passed over. So a pass that was killed goes on where it was: it finds
what is there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from prolip.data.faults import FaultCounter, SampleFault, ShardFault
from prolip.data.images import decode_image
from prolip.data.reading.named import KINDS as WORDS
from prolip.data.reading.named import ROWS, NamedSource, parse_source
from prolip.data.reading.rows import Stated, base_of, file_of, key_of, read_rows, stated_by, stated_by_row
from prolip.data.reading.shards import expand_shards
from prolip.data.reading.stream import is_local, local_path
from prolip.data.reading.tar import printable, read_shard
from prolip.data.samples import image_bytes
from prolip.embedder import Embedder, groups
from prolip.evaluation.cache import FeatureStore
from prolip.evaluation.embed import Features, load_features
from prolip.gaussian import Gaussian
from prolip.scores import Side
from prolip.search.index import Part, SearchIndex
from prolip.search.store import Item
from prolip.utils.documents import text_lines
from prolip.utils.messages import explain_missing
from prolip.utils.secrecy import redacted
from prolip.utils.threads import default_workers, in_threads

KINDS = (*ROWS, "shards", "features", "texts")
FORMS = ", ".join(WORDS[kind] for kind in KINDS)
#: Batches that are decoded ahead of the one that is embedded.
AHEAD = 2


class Read(NamedTuple):
    """What is known of an item. mark: how its fingerprint begins, None: unknown before it is read; data: what to embed.

    position: its place in the source, from 1; row: its row in the index, -1 for none, and former: what is there.
    """

    item: Item
    mark: str | None
    data: Any
    position: int = 0
    row: int = -1
    former: Item | None = None

    @property
    def moved(self) -> bool:
        """Whether anything but the fingerprint is another than before."""
        return self.former is not None and {**self.former, "print": ""} != {**self.item, "print": ""}


class Rebuild:
    """One pass over a source by the writer of an index, whose lock is held.

    data: the address as it was given, of which the manifest keeps none of its secrets; restore: whether items come back
    that `delete` removed; faults: counts what cannot be read, or it is raised. added, replaced, removed: items;
    withheld: deleted before.
    """

    def __init__(self, index: SearchIndex, data: str, restore: bool = False, faults: FaultCounter | None = None):
        self.index, self.data, self.restore, self.faults = index, data, restore, faults
        self.address = address = redacted(data)
        self.added = self.replaced = self.removed = self.withheld = 0
        self.source = digest(address.encode(errors="surrogatepass"))[:8]
        sources = {x["address"] for x in index.store.values["sources"]}
        self.known, self.only = address in sources, not sources - {address}
        #: Local shards as they were when they were read whole; those of this pass; those whose items stay unseen.
        self.before, self.shards, self.kept = index.store.shards(address), dict[str, str](), set[str]()
        self.seen = np.zeros(len(index.store), dtype=bool)

    def due(self, reads: Iterator[Read], size: int) -> Iterator[Read]:
        """Those that the index has not as they are, without what was deleted. ValueError for the key of another."""
        for group in groups(enumerate(reads, 1), size):
            keys = [read.item["key"] for _, read in group]
            unwanted = self.index.store.are_unwanted(keys) & (not self.restore)
            for (position, read), row, is_unwanted in zip(group, self.index.find(keys).tolist(), unwanted.tolist()):
                former = None if row < 0 else self.index.items([row])[0]
                item = read.item | {"source": self.source}
                read = read._replace(item=item, position=position, row=row, former=former)
                if former is not None:
                    own = self.owns(former) or ("source" not in former and self.known)
                    if not own or row >= len(self.seen) or self.seen[row]:
                        raise ValueError(
                            f"the key {item['key']} of {self.address} is in the index already, of another"
                            " source or of the same: rename it, or leave it out"
                        )
                    self.seen[row] = True
                    if not read.moved and read.mark is not None and former.get("print", "").startswith(read.mark):
                        continue
                elif is_unwanted:
                    self.withheld += 1
                    continue
                yield read

    def owns(self, item: Item) -> bool:
        """Whether an item is of this source, which those of indexes without fingerprints do not say."""
        return item["source"] == self.source if "source" in item else self.only

    def part(self, reads: list[Read], z: Gaussian, position: int) -> Part:
        """Items to be put in the place of those with their keys, and counted."""
        replaced = sum(read.former is not None for read in reads)
        self.replaced, self.added = self.replaced + replaced, self.added + len(reads) - replaced
        return Part([read.item for read in reads], z, position)

    def parts(self, reads: Iterator[Read], size: int, embed: Callable[[list[Read]], Gaussian]) -> Iterator[Part]:
        """Those that are due, embedded `size` at a time."""
        for some in groups(self.due(reads, size), size):
            yield self.part(some, embed(some), some[-1].position)

    def whole(self, parts: Iterator[Part]) -> Iterator[Part]:
        """All parts, and what was not seen is removed after the last."""
        yield from parts
        if not self.known:  # so no row is of it, and none of the others is looked at
            return
        store = self.index.store
        rows = np.flatnonzero(~self.seen & (store.fates[: len(self.seen)] == 0))
        unseen = (item for row in rows for item in store.items([int(row)]))  # one in memory
        gone = [item["key"] for item in unseen if self.owns(item) and item.get("shard") not in self.kept]
        if gone:
            store.delete(gone)
        self.removed = len(gone)

    def run(self, parts: Iterator[Part], rows: int) -> None:
        """Bring the index to what the source holds, chunk by chunk."""
        self.index.add(self.address, self.whole(parts), rows, replace=True)
        every = dict.fromkeys(self.before) | self.shards
        if changed := {shard: stamp for shard, stamp in every.items() if self.before.get(shard) != stamp}:
            self.index.store.note_shards(self.address, changed)

    def __str__(self) -> str:
        withheld = f"; {self.withheld:,} stay deleted, --restore brings them back" if self.withheld else ""
        counts = f"{self.added:,} added, {self.replaced:,} replaced, {self.removed:,} removed{withheld}"
        if self.faults is None or not self.faults.kinds:
            return counts
        lost = ", ".join(f"{count} {kind}" for kind, count in self.faults.kinds.items())
        return f"{counts}\nleft out: {lost}, such as {next(iter(self.faults.examples), '')}"


def stamp(path: str) -> str:
    """The size of a file and the time of its last change."""
    found = os.stat(path)
    return f"{found.st_size} {found.st_mtime_ns} "


def digest(data: bytes) -> str:
    """128 bits of the contents of an item."""
    return blake2b(data, digest_size=16).hexdigest()


def parse(address: str) -> NamedSource:
    """A source by its kind and its address. ValueError for others, FileNotFoundError."""
    return parse_source(address, "--data", KINDS)


def side_of(source: NamedSource) -> Side:
    """What a source gives."""
    return "text" if source.kind == "texts" else "image"


def read(rebuild: Rebuild, embedder: Embedder, batch_size: int = 256, workers: int | None = None) -> Iterator[Part]:
    """What a source has more than the index, through a model, by threads that read and decode.

    An image with the bytes of before keeps its embedding.
    """
    source, faults = parse(rebuild.data), rebuild.faults
    if source.kind == "texts":
        texts = (Read({"key": text}, "", None) for text in lines_of(source.address))
        yield from rebuild.parts(texts, batch_size, lambda some: embedder.embed_texts([x.item["key"] for x in some]))
        return
    of_shards = source.kind == "shards"
    reads = images_of(source.address, rebuild) if of_shards else images_in(source, None if faults is None else 1.0)

    def decode(read: Read) -> Read:
        """With its pixels in the place of its data, a fault, or None where the bytes are those of before."""
        data = read.data
        if isinstance(data, SampleFault):
            return read
        try:
            data = image_bytes(data()) if callable(data) else data
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
                if read.row >= 0:
                    rebuild.seen[read.row] = False  # it is gone, and its shard is read again next time
                rebuild.shards.pop(read.item.get("shard", ""), None)
        if fresh := [read for read in batch if isinstance(read.data, Tensor)]:
            z = embedder.encode_image(torch.stack([read.data for read in fresh]))
            yield rebuild.part(fresh, z, batch[-1].position)
        if same := [read for read in batch if read.data is None and read.moved]:
            yield rebuild.part(same, rebuild.index.gaussians([read.row for read in same]), batch[-1].position)


def images_in(source: NamedSource, max_bad: float | None) -> Iterator[Read]:
    """The images of a folder, a table or a published set with their captions, or their classes."""
    rows, base = read_rows(source, max_bad=max_bad), base_of(source)
    for number, row in enumerate(rows.rows):
        item: Item = {"key": key_of(row, base), **words_of(stated_by_row(row))}
        item |= {"table": str(source), "row": number} if row.inside else {"path": os.path.abspath(row.path)}
        mark = stamp(file_of(row)) if os.path.isfile(file_of(row)) else None
        yield Read(item, mark, partial(rows, number))


def words_of(known: Stated) -> Item:
    """What an item keeps of what is stated: its captions, without any its class."""
    texts = list(known[0]) or ([known[1]] if known[1] else [])
    return {"captions": texts} if texts else {}


def images_of(shards: str, rebuild: Rebuild) -> Iterator[Read]:
    """The samples of shards with their captions, but of local shards that are as they were when they were read."""
    faults = rebuild.faults
    for url, *_ in expand_shards(shards):
        shard, path = redacted(url), local_path(url) if is_local(url) else ""
        own = stamp(path) if os.path.isfile(path) else None
        if own is not None:
            rebuild.shards[shard] = own
            if rebuild.before.get(shard) == own and not rebuild.restore:
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
            rebuild.kept.add(shard)  # nothing says that what it held is gone
        if faults is not None and faults.kinds.total() > count:
            rebuild.shards.pop(shard, None)


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
    folder, _, name = parse(address).address.partition(",")
    store = FeatureStore(folder)
    names = [task["dataset"]["name"] for task in store.tasks()]
    wanted = name or names[0]
    if wanted not in names or (not name and len(set(names)) > 1):
        raise ValueError(f"{folder} keeps {', '.join(names)}: name one of them, features:{folder},{names[0]}")
    return next(features for features in load_features(store) if features.dataset.name == wanted)


def parts_of(features: Features, rebuild: Rebuild, rows: int = 4096) -> Iterator[Part]:
    """Kept images that the index has not as they are. ValueError for those of another model."""
    card = rebuild.index.card
    if card is not None and features.model.fingerprint != card.fingerprint:
        both = f"{rebuild.address} was embedded by {features.model.name}, and this index by {card.name}"
        raise ValueError(f"{both}: it is another model")
    captions: list[list[str]] = [[] for _ in features.keys]
    if features.owners is not None:
        for owner, caption in zip(features.owners.tolist(), features.captions):
            captions[owner].append(caption)

    def reads() -> Iterator[Read]:
        for row, (key, texts) in enumerate(zip(features.keys, captions)):
            mark = digest(torch.cat([x[row] for x in features.image]).numpy().tobytes())
            yield Read({"key": key, **({"captions": texts} if texts else {}), "print": mark}, mark, row)

    return rebuild.parts(reads(), rows, lambda some: features.image.select([read.data for read in some]))
