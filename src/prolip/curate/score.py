"""Every shard's samples scored: one table a shard, by any number of processes; a run goes on where it broke off."""
from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from PIL import Image
from torch import Tensor

from prolip.curate.claims import agree
from prolip.curate.sources import CHANGED, change_of, content_of, source_of
from prolip.curate.tables import MANIFEST, PLACE, SCORES, SIZE, digest, read_table, table_path, write_table
from prolip.data.faults import SampleFault, ShardFault
from prolip.data.reading.entries import canonical
from prolip.data.reading.tar import ShardReader, printable
from prolip.data.samples.captions import CaptionSampler
from prolip.data.samples.decoding import decode_image
from prolip.data.samples.sample import Raw, caption_parts, image_bytes, json_record
from prolip.utils.outputs import replacing
from prolip.utils.secrecy import scrub
from prolip.utils.threads import in_threads

FORMAT = "prolip curation 2"
#: Rows that a batch holds: normalised scores compare within it.
BATCH = 256

Figure = Callable[[Tensor, Sequence[str]], dict[str, Any]]


class Looked(NamedTuple):
    """A sample before the model sees it; pixels None: it cannot be used, and `fault` says why."""

    key: str
    content: bytes
    uid: str | None
    caption: str
    width: int
    height: int
    pixels: Tensor | None
    fault: str | None


@dataclass(frozen=True)
class Scorer:
    """What scores shards. urls: all of them, in order; figure: `figures.Figures`; preprocess: a Pillow image ->
    (3, H, W); about: what of the model and the options the tables depend on.
    """

    urls: Sequence[str]
    folder: Path
    figure: Figure
    preprocess: Callable[[Image.Image], Tensor]
    captions: CaptionSampler
    about: dict[str, Any]
    read: ShardReader = ShardReader()
    threads: int = 1

    @cached_property
    def schema(self) -> pa.Schema:
        """The columns of every table, whatever is in its shard: the figures are those of a grey image."""
        pixels = self.preprocess(Image.new("RGB", (64, 64), "grey"))[None]
        return pa.schema([*pa.schema(PLACE | SIZE), *pa.table(dict(self.figure(pixels, ["grey"]))).schema])

    @cached_property
    def words(self) -> dict[str, Any]:
        """What the manifest says of all tables. Addresses are without secrets."""
        columns = {field.name: str(field.type) for field in self.schema}
        return {**self.about, "format": FORMAT, "columns": columns, "shards": [canonical(url) for url in self.urls]}

    @cached_property
    def mark(self) -> str:
        """What every table says of the manifest that it belongs to."""
        return digest(self.words)

    def begin(self) -> None:
        """Write the manifest, or compare: ValueError for tables of another model, option or data."""
        agree(self.folder / SCORES / MANIFEST, self.words, f"give another --out, or delete {self.folder / SCORES}")

    def path(self, number: int) -> Path:
        """Where the table of a shard is."""
        return table_path(self.folder / SCORES, number)

    def is_done(self, number: int) -> bool:
        """Whether a shard has its whole table, and is as it was then. ValueError for a table of an earlier version."""
        path = self.path(number)
        if not path.exists():
            return False
        try:
            table = read_table(path)
        except ValueError:  # damaged: it is made again
            return False
        if table.note.get("scores") != self.mark:
            raise ValueError(f"{path} is of an earlier version, or of other scores than {MANIFEST} beside it: give"
                             " another --out, or delete it")  # fmt: skip
        if table.kinds != self.words["columns"] or table.note["broken"]:
            return False
        return change_of(self.urls[number], table.note["source"], self.read.policy) != CHANGED

    def score(self, number: int) -> dict[str, Any]:
        """Score a shard and write its table; returns the table's note.

        A shard that breaks off has a table of what came before, which says so and is made again by the next run.
        """
        faults: Counter[str] = Counter()
        broken = first = ""

        def rows() -> Iterator[Raw]:
            nonlocal broken
            try:
                yield from self.read(self.urls[number], lambda fault: faults.update([fault.kind]))
            except ShardFault as fault:
                faults.update([fault.kind])
                broken = printable(scrub(str(fault)))

        source = source_of(self.urls[number], self.read.policy)  # before it is read: a change meanwhile is seen later
        parts: list[pa.Table] = []
        samples = in_threads(self.look, rows(), self.threads, 2 * BATCH)
        while group := list(islice(samples, BATCH)):
            parts.append(self.table_of(group, sum(map(len, parts))))
            first = first or next((sample.fault for sample in group if sample.fault), "")
            faults.update(sample.fault.partition(":")[0] for sample in group if sample.fault)
        whole = pa.concat_tables(parts).combine_chunks() if parts else self.schema.empty_table()
        sums = hashlib.sha256()
        for key, content in zip(whole.column("key").to_pylist(), whole.column("content").to_pylist()):
            sums.update(f"{len(key)} {key}".encode() + content)
        note = {
            "scores": self.mark, "shard": canonical(self.urls[number]), "source": source,
            "content": sums.hexdigest(), "samples": len(whole), "usable": whole.column("fault").null_count,
            "faults": dict(faults), "first": first, "broken": broken,
        }  # fmt: skip
        with replacing(self.path(number)) as temporary:
            write_table(temporary, whole, note)
        return note

    def look(self, raw: Raw) -> Looked:
        """Decode a sample; what cannot be used keeps its reason."""
        uid, caption, size, pixels, fault, content = None, "", (0, 0), None, None, content_of(raw)
        try:
            chances = self.captions.chances(*caption_parts(raw, self.captions))
            caption = max(chances, key=chances.__getitem__)
            image = decode_image(image_bytes(raw))
            size, pixels = image.size, self.preprocess(image)
        except SampleFault as error:
            fault = printable(str(error))
        except Exception as error:  # an image one pixel wide that cannot be resized, and more
            fault = printable(f"failed transform: {type(error).__name__}: {error}")
        try:
            found = json_record(raw).get("uid") if "json" in raw else None
            uid = printable(found) if isinstance(found, str) else None
        except SampleFault:  # no JSON to look at
            pass
        return Looked(raw["__key__"], content, uid, caption, *size, pixels, fault)

    def table_of(self, group: Sequence[Looked], start: int) -> pa.Table:
        """The rows of a batch whose first one is `start`; figures of what cannot be used are missing."""
        good = [place for place, sample in enumerate(group) if sample.pixels is not None]
        columns: dict[str, Any] = {"row": range(start, start + len(group))}
        columns |= {name: [getattr(sample, name) for sample in group] for name in (*PLACE, *SIZE) if name != "row"}
        if good:
            pixels = torch.stack([group[place].pixels for place in good])  # type: ignore[misc]
            for name, values in self.figure(pixels, [group[place].caption for place in good]).items():
                columns[name] = spread(values, good, len(group))
        empty = [None] * len(group)
        return pa.table({name: columns.get(name, empty) for name in self.schema.names}, schema=self.schema)


def spread(values: np.ndarray | pa.Array, places: Sequence[int], rows: int) -> pa.Array:
    """Values of some rows as a column of all, null elsewhere."""
    values = values if isinstance(values, pa.Array) else pa.array(values)
    if len(places) == rows:
        return values
    order = np.full(rows, -1)
    order[list(places)] = np.arange(len(places))
    return values.take(pa.array(order, mask=order < 0))
