"""Any source as rows of images with captions, or as samples of shards; their captions and classes."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any

from prolip.data.captions import LIKELY, PLAIN, Selector, texts
from prolip.data.faults import SampleFault, ShardFault
from prolip.data.reading.folders import ImageRow, ImageRows, keep_selected, read_folder
from prolip.data.reading.named import TABLES, NamedSource
from prolip.data.reading.shards import expand_shards
from prolip.data.reading.stream import local_path
from prolip.data.reading.tables import LABELS, READERS, TableColumns, plain, read_table
from prolip.data.reading.tar import Note, ShardReader, printable, strict_note
from prolip.data.samples import IMAGE_SUFFIXES, SEVERAL, Raw, json_record, plain_text
from prolip.data.sets import read_set
from prolip.data.split import Split
from prolip.utils.secrecy import redacted

RECOGNISED = TableColumns()
Stated = tuple[Sequence[str], str | None]  # the captions and the class of an image


def read_rows(
    source: NamedSource,
    columns: TableColumns = RECOGNISED,
    selector: Selector | None = None,
    splits: str | None = None,
    split: Split | None = None,
    max_bad: float | None = None,
) -> ImageRows:
    """Return the images of a source, one of the kinds ROWS, each with all captions and its record.

    splits: of a published set, joined by '+'; split: part of a split by content; max_bad: share of a table's rows that
    may lack their image or caption (None: none, the error names --skip-damaged). FileNotFoundError, ValueError.
    """
    if source.kind == "images":
        rows = read_folder(local_path(source.address), selector)
    elif source.kind in READERS:
        rows = read_table(source, columns, selector, max_bad)
    else:
        _, images = read_set(source.kind, str(source), splits)
        every = [ImageRow(image.path, list(image.captions), dict(image.facts)) for image in images]
        rows = keep_selected(every, selector, str(source))
    return rows.part(split) if split is not None else rows


def base_of(source: NamedSource) -> str:
    """Return the folder from which keys of a source's images start: the images' or the table's."""
    places = [source.address] if source.kind in (*TABLES, "images") else source.address.split(",")
    return next((place for place in reversed(places) if os.path.isdir(place)), os.path.dirname(places[0]))


def key_of(row: ImageRow, base: str) -> str:
    """Return the key of a row, relative to a folder above its image."""
    whole, base = os.path.abspath(row.path), os.path.abspath(base)
    if os.path.commonpath([whole, base]) != base:
        return row.key
    return printable(os.path.relpath(whole, base).replace(os.sep, "/"))


def file_of(row: ImageRow) -> str:
    """Return the file that contains an image: its own, or a table."""
    return row.path.rpartition("#")[0] if row.inside else row.path


def stated_by_row(row: ImageRow) -> Stated:
    """Return the captions and the class of a row."""
    return texts(row.caption, PLAIN), label_of(row.record)


def stated_by(raw: Raw) -> Stated:
    """Return captions (`.txt`, or the likeliest `.json` field) and class (`.cls`, or a field) of a shard's sample."""
    record: dict[str, Any] = {}
    with suppress(SampleFault) if PLAIN in raw else nullcontext():
        record = json_record(raw) if "json" in raw else {}
    label = raw["cls"].decode(errors="replace").strip() if "cls" in raw else label_of(record)
    if PLAIN in raw:
        return [line for line in str(plain_text(raw)).splitlines() if line.strip()], label
    names = (name for name in (SEVERAL, *LIKELY) if name not in LABELS and record.get(name))
    return next((texts(record[name], name) for name in names), []), label


def label_of(record: Mapping[str, Any]) -> str | None:
    """Return the class in a record, None without one."""
    values = (value for word in LABELS for name, value in record.items() if plain(name) == word)
    return next((str(x).strip() for x in values if isinstance(x, (str, int)) and str(x).strip()), None)


def read_stored(source: NamedSource, on_fault: Note | None, split: str | Split | None = None) -> Iterator[Raw]:
    """Yield the samples of shards, or images as in shards; without on_fault, keep the texts of an unreadable image."""
    part = split if isinstance(split, Split) else None
    if source.kind == "shards":
        for url, *_ in expand_shards(source.address):
            try:
                yield from ShardReader(split=part)(url, on_fault)
            except ShardFault as fault:
                (on_fault or strict_note)(ShardFault(fault.kind, f"{redacted(url)}: {fault.message}"))
        return
    named, most = split if isinstance(split, str) else None, None if on_fault is strict_note else 1.0
    rows, base = read_rows(source, splits=named, split=part, max_bad=most), base_of(source)
    for number, row in enumerate(rows.rows):
        try:
            raw = rows(number)
        except SampleFault as fault:
            if on_fault is not None:
                on_fault(fault)
                continue
            raw = rows.texts(number)
        yield as_stored(raw, key_of(row, base))


def as_stored(raw: Raw, key: str) -> Raw:
    """Return a row as a shard stores it, under a key without dots: one caption as `.txt`, several in its `.json`."""
    captions = texts(raw.get(PLAIN), PLAIN)
    single = len(captions) == 1 and len(captions[0].splitlines()) == 1  # readers take each line for a caption
    record = raw["json"] | ({SEVERAL: captions} if captions and not single else {})
    name = re.sub(rf"\.({'|'.join(IMAGE_SUFFIXES)})$", "", key.strip("/"), flags=re.IGNORECASE)
    found: Raw = {"__key__": re.sub(r"[^\w/-]+", "_", name)}
    found |= {suffix: raw[suffix] for suffix in IMAGE_SUFFIXES if suffix in raw}
    found |= {PLAIN: captions[0].encode()} if single else {}
    return found | ({"json": json.dumps(record, ensure_ascii=False, default=str).encode()} if record else {})
