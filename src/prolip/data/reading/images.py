"""A source as images: each once, with all of its captions and its class; and as a shard holds it."""
from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from prolip.data.reading.folders import ImageRows
from prolip.data.reading.published.images import CaptionedImage
from prolip.data.reading.tar import printable
from prolip.data.samples.captions import LIKELY, PLAIN, texts
from prolip.data.samples.sample import IMAGE_SUFFIXES, SEVERAL, Raw, json_record, plain_text

#: Fields of a record that hold the class of its image; the first one counts.
CLASSES = ("class", "label", "category", "class_name")


def images_of(rows: ImageRows, base: str = "") -> list[CaptionedImage]:
    """The images in the order of their first rows, each with the captions of all its rows and the record of the first.

    base: folder from which the keys of images below it start.
    """
    found: dict[str, CaptionedImage] = {}
    for row in rows.rows:
        first = found.setdefault(row.path, CaptionedImage(short(row.path, base), row.path, (), row.record))
        found[row.path] = first._replace(captions=(*first.captions, *texts(row.caption, PLAIN)))
    return list(found.values())


def short(path: str, base: str) -> str:
    """A path from a folder that it lies below, else the whole one."""
    whole, base = os.path.abspath(path), os.path.abspath(base)
    inside = os.path.commonpath([whole, base]) == base
    return printable((os.path.relpath(whole, base) if inside else whole).replace(os.sep, "/"))


def label_of(record: Mapping[str, Any]) -> str | None:
    """The class that a record states, None without one."""
    values = (record.get(name) for name in CLASSES)
    return next((str(x).strip() for x in values if isinstance(x, (str, int)) and str(x).strip()), None)


def captions_of(raw: Raw) -> list[str]:
    """The captions of a shard's sample: the lines of its `.txt`, or the field of its `.json` that is called so."""
    if PLAIN in raw:
        return [line for line in str(plain_text(raw)).splitlines() if line.strip()]
    record = json_record(raw) if "json" in raw else {}
    names = (name for name in (SEVERAL, *LIKELY) if name not in CLASSES and record.get(name))
    return next((texts(record[name], name) for name in names), [])


def as_stored(raw: Raw, key: str, captions: Sequence[str]) -> Raw:
    """A sample as a shard holds it: one caption as `.txt`, several as `captions` of its `.json`."""
    plain = len(captions) == 1 and len(captions[0].splitlines()) == 1  # readers take each line for a caption
    record = dict(raw.get("json") or {}) | ({SEVERAL: list(captions)} if captions and not plain else {})
    found: Raw = {"__key__": re.sub(r"[^\w/-]+", "_", os.path.splitext(key)[0].strip("/"))}
    found |= {suffix: raw[suffix] for suffix in IMAGE_SUFFIXES if suffix in raw}
    found |= {PLAIN: captions[0].encode()} if plain else {}
    return found | ({"json": json.dumps(record, ensure_ascii=False).encode()} if record else {})
