"""Scoring of every shard's samples: one table per shard, by any number of processes, resumed when run again."""

from __future__ import annotations

import hashlib
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from PIL import Image
from torch import Tensor

from prolip.curate import tables
from prolip.curate.tables import BITS, SIGNATURE
from prolip.data.captions import CaptionSampler
from prolip.data.faults import SampleFault, ShardFault
from prolip.data.images import decode_image
from prolip.data.reading.named import ROWS, NamedSource, parse_source
from prolip.data.reading.remote import Identity, ReadPolicy
from prolip.data.reading.rows import read_stored
from prolip.data.reading.shard_index import canonical, find_index
from prolip.data.reading.shards import expand_shards
from prolip.data.reading.stream import Note, open_stream
from prolip.data.reading.tar import ShardReader, printable
from prolip.data.samples import Raw, caption_parts, image_bytes, json_record, suffixes_of
from prolip.data.sets import SETS
from prolip.embedder import Embedder, lengths_of
from prolip.gaussian import Gaussian
from prolip.measures import inclusion_test
from prolip.scores import Score, Side
from prolip.uncertainty.readings import FittedReader
from prolip.utils.outputs import replacing
from prolip.utils.secrecy import scrub
from prolip.utils.threads import in_threads

FORMAT = "prolip curation 2"
BATCH = 256  # rows of a batch, within which scores are normalised
GONE, CHANGED = "is gone", "has changed"


class PairSignals:
    """Signals of batches of pairs: the columns of `prolip.curate.rules.MEANINGS`, novelties and signatures."""

    def __init__(self, embedder: Embedder):
        self.embedder = embedder
        self.pad = embedder.tokenizer([""])[0, -1]

    def __call__(self, pixels: Tensor, captions: Sequence[str]) -> dict[str, np.ndarray | pa.Array]:
        """Return columns of a batch, pixels (B, 3, H, W) and B captions."""
        model, ids = self.embedder, self.embedder.tokenizer(list(captions))
        image, text = model.encode(pixels, "image"), model.encode(ids, "text")
        found = pair_columns(model.score, image.z, text.z, model.probabilistic, model.reader)
        found["text_tokens"] = lengths_of(ids, self.pad)
        _, first, own = np.unique(np.array(captions, dtype=object), return_index=True, return_inverse=True)
        found["own_first"] = model.score.pairwise(image.z, text.z.select(first)).argmax(1) == torch.from_numpy(own)
        for side, novelty in (("image", image.novelty), ("text", text.novelty)):
            found |= {f"{side}_novelty_{end}": nats for end, nats in novelty.items()}
        return {name: x.float().numpy() for name, x in found.items()} | {SIGNATURE: signatures(image.z.mean)}


def signatures(mean: Tensor) -> pa.Array:
    """Return BITS signs of projections on random planes, (B, D) -> (B,) packed (Charikar 2002)."""
    planes = torch.randn(mean.shape[1], BITS, generator=torch.Generator().manual_seed(0))
    bits = np.packbits((mean @ planes > 0).numpy(), axis=1)
    return pa.array([row.tobytes() for row in bits], pa.binary(BITS // 8))


def pair_columns(
    score: Score, image: Gaussian, text: Gaussian, probabilistic: bool, reader: FittedReader | None = None
) -> dict[str, Tensor]:
    """Return the columns of a batch of embedded pairs (B, D), (B,) each. reader: the model's. normalised_score compares
    a pair with the others of its batch (Wang et al. 2024, arXiv 2405.19547): l_ii - 1/2 (log mean_j exp l_ij + log
    mean_j exp l_ji) of logits l; means instead of sums make the numbers of a smaller last batch comparable.
    """
    matrix = score.pairwise(image, text)
    own, logits = matrix.diagonal(), score.scaled(matrix)
    found = {"cosine": (image.mean * text.mean).sum(1), "score": own, "match_probability": score.match_probability(own)}
    if logits is not None:
        both = logits.logsumexp(1) + logits.logsumexp(0)
        found["normalised_score"] = logits.diagonal() - (both / 2 - math.log(len(logits)))
    evidence = None if reader is None else reader.evidence(image.mean)
    if (doubt := score.doubts(evidence, evidence)) is not None and score.units is not None:
        probability = score.match_probability(own, doubt, score.units.share(score.uncertainty(text)))
        found |= {"match_probability": probability, "image_doubt": doubt}
    if reader is not None:
        found["image_ambiguity"] = reader.ambiguity(image.mean)
    if probabilistic:
        found |= side_columns(score, score.uncertainty(image), "image")
        found |= side_columns(score, score.uncertainty(text), "text")
        found["inclusion"] = inclusion_test(image, text)
    return {name: x for name, x in found.items() if x is not None}


def side_columns(score: Score, trace: Tensor, side: Side) -> dict[str, Tensor]:
    """Return the columns of uncertainties (B,) of one side: themselves, and bits if the score has units."""
    found = {f"{side}_uncertainty": trace}
    if score.units is not None:
        found[f"{side}_bits"] = score.units.information(trace, "texts" if side == "image" else "images", bits=True)
    return found


@dataclass(frozen=True)
class Scorer:
    """Scores shards."""

    urls: Sequence[str]  # all shards, in order
    folder: Path
    signals: Callable[[Tensor, Sequence[str]], dict[str, Any]]  # a function such as `PairSignals`
    preprocess: Callable[[Image.Image], Tensor]
    captions: CaptionSampler
    about: dict[str, Any]  # model and options that determine the tables
    read: ShardReader = ShardReader()
    threads: int = 1

    @classmethod
    def of(cls, model: Embedder, urls: Sequence[str], folder: Path, captions: str = "txt", threads: int = 1) -> Scorer:
        """Prepare scoring of shards by a model. captions: as --caption-sampling; of several, the likeliest counts."""
        about = {"model": model.name, "fingerprint": model.fingerprint, "precision": model.precision}
        about |= {"captions": captions, "score": model.score.name}
        read, sampler = SourceReader(ReadPolicy(), find_index(urls)), CaptionSampler.parse(captions)
        return cls(urls, folder, PairSignals(model), model.preprocess, sampler, about, read, threads)

    @cached_property
    def schema(self) -> pa.Schema:
        """The columns of every table, independent of its shard: the signals of a grey image."""
        pixels = self.preprocess(Image.new("RGB", (64, 64), "grey"))[None]
        signals = pa.table(dict(self.signals(pixels, ["grey"]))).schema
        return pa.schema([*pa.schema(tables.PLACE | tables.SIZE), *signals])

    @cached_property
    def words(self) -> dict[str, Any]:
        """The manifest of all tables, with addresses without secrets."""
        columns = {field.name: str(field.type) for field in self.schema}
        return {**self.about, "format": FORMAT, "columns": columns, "shards": [name_of(url) for url in self.urls]}

    @cached_property
    def mark(self) -> str:
        """The checksum of the manifest, repeated in every table."""
        return tables.digest(self.words)

    def begin(self) -> None:
        """Write the manifest, or compare it: ValueError for tables of another model, option or data."""
        place = self.folder / tables.SCORES
        tables.agree(place / tables.MANIFEST, self.words, f"give another --output, or delete {place}")

    def path(self, number: int) -> Path:
        return tables.table_path(self.folder / tables.SCORES, number)

    def is_done(self, number: int) -> bool:
        """Return whether a shard has a complete table and is unchanged. ValueError for a table of other scores."""
        path = self.path(number)
        if not path.exists():
            return False
        try:
            table = tables.read_table(path)
        except ValueError:  # damaged: write it again
            return False
        if table.note.get("scores") != self.mark:
            what = f"has an earlier version or other scores than {tables.MANIFEST}"
            raise ValueError(f"{path} {what}. Give another --output, or delete it")
        if table.kinds != self.words["columns"] or table.note["broken"]:
            return False
        return change_of(self.urls[number], table.note["source"], self.read.policy) != CHANGED

    def missing(self, numbers: Iterable[int]) -> dict[int, tables.Stamp]:
        """Return the unfinished shards -> the `stamp` of their table, taken before reading it."""
        stamps = {number: tables.stamp(self.path(number)) for number in numbers}
        done = in_threads(self.is_done, iter(stamps), self.threads, 64)
        return {number: seen for (number, seen), is_done in zip(stamps.items(), done) if not is_done}

    def score(self, number: int) -> dict[str, Any]:
        """Score a shard, write its table and return its note; an interrupted shard is scored again next time."""
        faults: Counter[str] = Counter()
        broken = first = ""

        def rows() -> Iterator[Raw]:
            nonlocal broken
            try:
                yield from self.read(self.urls[number], lambda fault: faults.update([fault.kind]))
            except ShardFault as fault:
                faults.update([fault.kind])
                broken = printable(scrub(str(fault)))

        source = source_of(self.urls[number], self.read.policy)  # before reading, so that a later change is detected
        parts: list[pa.Table] = []
        samples = in_threads(self.decode, enumerate(rows()), self.threads, 2 * BATCH)
        while group := list(islice(samples, BATCH)):
            if good := [sample for sample in group if "pixels" in sample]:
                pixels = torch.stack([sample["pixels"] for sample in good])
                for name, values in self.signals(pixels, [sample["caption"] for sample in good]).items():
                    for sample, value in zip(good, values.tolist()):
                        sample[name] = value
            parts.append(pa.Table.from_pylist(group, schema=self.schema))
        whole = pa.concat_tables([self.schema.empty_table(), *parts]).combine_chunks()
        sums = hashlib.sha256()
        for key, content, fault in zip(*whole.select(["key", "content", "fault"]).to_pydict().values()):
            sums.update(f"{len(key)} {key}".encode() + content)
            if fault:
                first = first or fault
                faults.update([fault.partition(":")[0]])
        note: dict[str, Any] = {"scores": self.mark, "shard": name_of(self.urls[number]), "source": source}
        note |= {"content": sums.hexdigest(), "samples": len(whole), "usable": whole.column("fault").null_count}
        note |= {"faults": dict(faults), "first": first, "broken": broken}
        with replacing(self.path(number)) as temporary:
            tables.write_table(temporary, whole, note)
        return note

    def decode(self, place: tuple[int, Raw]) -> dict[str, Any]:
        """Return the columns of a sample, with its `pixels`, or the `fault` that makes it unusable."""
        row, raw = place
        found = {"row": row, "key": raw["__key__"], "caption": "", "width": 0, "height": 0, "content": content_of(raw)}
        try:
            chances = self.captions.chances(*caption_parts(raw, self.captions))
            found["caption"] = max(chances, key=chances.__getitem__)
            image = decode_image(image_bytes(raw))
            pixels = self.preprocess(image)
            found |= {"width": image.width, "height": image.height, "pixels": pixels}
        except Exception as error:  # for example, an image one pixel wide cannot be resized
            is_known = isinstance(error, SampleFault)
            found["fault"] = printable(str(error) if is_known else f"failed transform: {type(error).__name__}: {error}")
        with suppress(SampleFault):  # damaged JSON
            uid = json_record(raw).get("uid") if "json" in raw else None
            found["uid"] = printable(uid) if isinstance(uid, str) else None
        return found


class SourceReader(ShardReader):
    """A `ShardReader` that also reads a table, image folder or published set, as one shard of all its images."""

    def __call__(self, url: str, on_fault: Note | None = None) -> Iterator[Raw]:
        source = table_of(url)
        return read_stored(source, None) if source else super().__call__(url, on_fault)


def table_of(url: str) -> NamedSource | None:
    """Return the table, image folder or published set at an address, None for a shard."""
    kind, _, address = url.partition(":")
    return NamedSource(kind, address) if kind in ROWS else None


def urls_of(data: str) -> list[str]:
    """Return the shards to score; a table, folder or published set is one. ValueError for other kinds."""
    kind, address = parse_source(data, "--data", (*ROWS, "shards"))
    if kind == "shards":
        return [shard.url for shard in expand_shards(address)]
    return [f"{kind}:{','.join(map(os.path.abspath, address.split(',') if kind in SETS else [address]))}"]


def name_of(url: str) -> str:
    """Return the name of a shard in the tables, without secrets."""
    return url if table_of(url) else canonical(url)


def source_of(url: str, policy: ReadPolicy) -> Identity | None:
    """Return size, version and modification time of a shard or a set's first file; None without an answer."""
    kind, address = table_of(url) or ("shards", url)
    try:
        with closing(open_stream(address.split(",")[0] if kind in SETS else address, policy)) as stream:
            return stream.identity
    except SampleFault:
        return None


def change_of(url: str, was: list | None, policy: ReadPolicy) -> str:
    """Return GONE, CHANGED, or "" if a shard's source looks unchanged without reading it."""
    now = source_of(url, policy)
    if was is None or now is None:
        return "" if was is None else GONE
    return CHANGED if Identity(*was).differs(now) else ""


def content_of(raw: Raw) -> bytes:
    """Return 16 bytes that change with the name or the bytes of any member of a sample."""
    sums = hashlib.blake2b(digest_size=16)
    for suffix in sorted(suffixes_of(raw)):
        sums.update(f"{len(suffix)} {suffix} {len(raw[suffix])} ".encode() + raw[suffix])
    return sums.digest()
