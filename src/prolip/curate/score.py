"""Every shard's samples scored: one table a shard, by any number of processes; a run goes on where it broke off."""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from PIL import Image
from torch import Tensor

from prolip.curate.tables import PLACE, read_note, table_path, write_table
from prolip.data.faults import SampleFault, ShardFault
from prolip.data.reading.tar import ShardReader
from prolip.data.samples.captions import CaptionSampler
from prolip.data.samples.decoding import decode_image
from prolip.data.samples.sample import Raw, caption_parts, image_bytes, json_record
from prolip.utils.threads import in_threads

SCORES = "scores"
#: Rows that a batch holds: normalised scores compare within it.
BATCH = 256

Figure = Callable[[Tensor, Sequence[str]], dict[str, Any]]


class Looked(NamedTuple):
    """A sample before the model sees it; pixels None: it cannot be used, and `fault` says why."""

    key: str
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

    def note_of(self, number: int) -> dict[str, Any]:
        """What the table of a shard has to say of itself to count as this one's."""
        return {"shard": self.urls[number], **self.about}

    def is_done(self, number: int) -> bool:
        """Whether a shard has its table. ValueError for a table of another model, option or shard."""
        path = table_path(self.folder / SCORES, number)
        if not path.exists():
            return False
        note, wanted = read_note(path), self.note_of(number)
        for name, value in wanted.items():
            if note.get(name) != value:
                raise ValueError(f"{path} was made with {name} {note.get(name)!r}, this is {value!r}: give another"
                                 " --out, or delete it")  # fmt: skip
        return "broken" not in note

    def score(self, number: int) -> Counter[str]:
        """Score a shard and write its table; what was wrong with it, by kind.

        A shard that breaks off has a table of what came before, which says so and is made again by the next run.
        """
        faults: Counter[str] = Counter()
        broken = ""

        def rows() -> Iterator[Raw]:
            nonlocal broken
            try:
                yield from self.read(self.urls[number], lambda fault: faults.update([fault.kind]))
            except ShardFault as fault:
                faults.update([fault.kind])
                broken = str(fault)

        parts: list[dict[str, Any]] = []
        samples = in_threads(self.look, rows(), self.threads, 2 * BATCH)
        while group := list(islice(samples, BATCH)):
            parts.append(self.columns_of(group, sum(len(part["key"]) for part in parts)))
            faults.update(sample.fault.partition(":")[0] for sample in group if sample.fault)
        note = self.note_of(number) | {"faults": dict(faults)} | ({"broken": broken} if broken else {})
        write_table(table_path(self.folder / SCORES, number), joined(parts), note)
        return faults

    def look(self, raw: Raw) -> Looked:
        """Decode a sample; what cannot be used keeps its reason."""
        uid, caption, size, pixels, fault = None, "", (0, 0), None, None
        try:
            chances = self.captions.chances(*caption_parts(raw, self.captions))
            caption = max(chances, key=chances.__getitem__)
            image = decode_image(image_bytes(raw))
            size, pixels = image.size, self.preprocess(image)
        except SampleFault as error:
            fault = str(error)
        except Exception as error:  # an image one pixel wide that cannot be resized, and more
            fault = f"failed transform: {type(error).__name__}: {error}"
        try:
            found = json_record(raw).get("uid") if "json" in raw else None
            uid = found if isinstance(found, str) else None
        except SampleFault:  # no JSON to look at
            pass
        return Looked(raw["__key__"], uid, caption, *size, pixels, fault)

    def columns_of(self, group: Sequence[Looked], start: int) -> dict[str, Any]:
        """The columns of a batch whose first row is `start`; figures of what cannot be used are missing."""
        good = [place for place, sample in enumerate(group) if sample.pixels is not None]
        columns: dict[str, Any] = {
            "row": pa.array(range(start, start + len(group)), PLACE["row"]),
            **{name: pa.array([getattr(sample, name) for sample in group], PLACE[name])
               for name in ("key", "uid", "caption", "fault")},
            **{name: np.array([getattr(sample, name) for sample in group], np.int32) for name in ("width", "height")},
        }  # fmt: skip
        if not good:
            return columns
        pixels = torch.stack([group[place].pixels for place in good])  # type: ignore[misc]
        for name, values in self.figure(pixels, [group[place].caption for place in good]).items():
            columns[name] = spread(values, good, len(group))
        return columns


def spread(values: np.ndarray | pa.Array, places: Sequence[int], rows: int) -> pa.Array:
    """Values of some rows as a column of all, null elsewhere."""
    values = values if isinstance(values, pa.Array) else pa.array(values)
    if len(places) == rows:
        return values
    order = np.full(rows, -1)
    order[list(places)] = np.arange(len(places))
    return values.take(pa.array(order, mask=order < 0))


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The columns of all batches under each other; a batch without a figure has nulls. No batch: an empty table."""
    if not parts:
        return {name: pa.array([], kind) for name, kind in PLACE.items()}
    tables = [pa.table(part) for part in parts]
    whole = pa.concat_tables(tables, promote_options="default").combine_chunks()
    return {name: whole.column(name).combine_chunks() for name in whole.column_names}


def shares(count: int, part: int, parts: int) -> range:
    """The numbers of the shards of one part of `parts`, every parts-th."""
    return range(part, count, parts)

