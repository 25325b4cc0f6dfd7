"""Every shard's samples scored: one table a shard, by any number of processes; a run goes on where it broke off."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from PIL import Image
from torch import Tensor

from prolip.curate.claims import Stamp, agree, stamp
from prolip.curate.figures import Figures
from prolip.curate.sources import CHANGED, SourceReader, change_of, content_of, name_of, source_of
from prolip.curate.tables import MANIFEST, PLACE, SCORES, SIZE, digest, read_table, table_path, write_table
from prolip.data.captions import CaptionSampler
from prolip.data.faults import SampleFault, ShardFault
from prolip.data.images import decode_image
from prolip.data.reading.shard_index import find_index
from prolip.data.reading.stream import ReadPolicy
from prolip.data.reading.tar import ShardReader, printable
from prolip.data.samples import Raw, caption_parts, image_bytes, json_record
from prolip.embedder import Embedder
from prolip.utils.outputs import replacing
from prolip.utils.secrecy import scrub
from prolip.utils.threads import in_threads

FORMAT = "prolip curation 2"
#: Rows that a batch holds: normalised scores compare within it.
BATCH = 256

Figure = Callable[[Tensor, Sequence[str]], dict[str, Any]]


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

    @classmethod
    def of(cls, model: Embedder, urls: Sequence[str], folder: Path, captions: str = "txt", threads: int = 1) -> Scorer:
        """What scores these shards by a model. captions: as --caption-sampling; of several captions the likeliest."""
        about = {
            "model": model.name,
            "fingerprint": model.fingerprint,
            "precision": model.precision,
            "captions": captions,
            "score": model.score.name,
        }
        read = SourceReader(ReadPolicy(), find_index(urls))
        return cls(urls, folder, Figures(model), model.preprocess, CaptionSampler.parse(captions), about, read, threads)

    @cached_property
    def schema(self) -> pa.Schema:
        """The columns of every table, whatever is in its shard: the figures are those of a grey image."""
        pixels = self.preprocess(Image.new("RGB", (64, 64), "grey"))[None]
        return pa.schema([*pa.schema(PLACE | SIZE), *pa.table(dict(self.figure(pixels, ["grey"]))).schema])

    @cached_property
    def words(self) -> dict[str, Any]:
        """What the manifest says of all tables. Addresses are without secrets."""
        columns = {field.name: str(field.type) for field in self.schema}
        return {**self.about, "format": FORMAT, "columns": columns, "shards": [name_of(url) for url in self.urls]}

    @cached_property
    def mark(self) -> str:
        """What every table says of the manifest that it belongs to."""
        return digest(self.words)

    def begin(self) -> None:
        """Write the manifest, or compare: ValueError for tables of another model, option or data."""
        agree(self.folder / SCORES / MANIFEST, self.words, f"give another --output, or delete {self.folder / SCORES}")

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
            raise ValueError(
                f"{path} is of an earlier version, or of other scores than {MANIFEST} beside it: give"
                " another --output, or delete it"
            )
        if table.kinds != self.words["columns"] or table.note["broken"]:
            return False
        return change_of(self.urls[number], table.note["source"], self.read.policy) != CHANGED

    def missing(self, numbers: Iterable[int]) -> dict[int, Stamp]:
        """Those of these shards that are not done, each with the `stamp` of its table."""
        stamps = {number: stamp(self.path(number)) for number in numbers}  # before it is asked whether they are done
        done = in_threads(self.is_done, iter(stamps), self.threads, 64)
        return {number: seen for (number, seen), is_done in zip(stamps.items(), done) if not is_done}

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
        samples = in_threads(self.look, enumerate(rows()), self.threads, 2 * BATCH)
        while group := list(islice(samples, BATCH)):
            parts.append(self.table_of(group))
        whole = pa.concat_tables([self.schema.empty_table(), *parts]).combine_chunks()
        sums = hashlib.sha256()
        for key, content, fault in zip(*whole.select(["key", "content", "fault"]).to_pydict().values()):
            sums.update(f"{len(key)} {key}".encode() + content)
            if fault:
                first = first or fault
                faults.update([fault.partition(":")[0]])
        note = {
            "scores": self.mark,
            "shard": name_of(self.urls[number]),
            "source": source,
            "content": sums.hexdigest(),
            "samples": len(whole),
            "usable": whole.column("fault").null_count,
            "faults": dict(faults),
            "first": first,
            "broken": broken,
        }
        with replacing(self.path(number)) as temporary:
            write_table(temporary, whole, note)
        return note

    def look(self, place: tuple[int, Raw]) -> dict[str, Any]:
        """The columns of a sample, and its `pixels` where it can be used; what cannot be keeps its reason."""
        row, raw = place
        found = {"row": row, "key": raw["__key__"], "caption": "", "width": 0, "height": 0, "content": content_of(raw)}
        try:
            chances = self.captions.chances(*caption_parts(raw, self.captions))
            found["caption"] = max(chances, key=chances.__getitem__)
            image = decode_image(image_bytes(raw))
            pixels = self.preprocess(image)
            found |= {"width": image.width, "height": image.height, "pixels": pixels}
        except SampleFault as error:
            found["fault"] = printable(str(error))
        except Exception as error:  # an image one pixel wide that cannot be resized, and more
            found["fault"] = printable(f"failed transform: {type(error).__name__}: {error}")
        with suppress(SampleFault):  # no JSON to look at
            uid = json_record(raw).get("uid") if "json" in raw else None
            found["uid"] = printable(uid) if isinstance(uid, str) else None
        return found

    def table_of(self, group: Sequence[dict[str, Any]]) -> pa.Table:
        """The rows of a batch; figures of what cannot be used are missing."""
        if good := [sample for sample in group if "pixels" in sample]:
            pixels = torch.stack([sample["pixels"] for sample in good])
            for name, values in self.figure(pixels, [sample["caption"] for sample in good]).items():
                for sample, value in zip(good, values.tolist()):
                    sample[name] = value
        return pa.Table.from_pylist(group, schema=self.schema)
