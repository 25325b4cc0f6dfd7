"""Sources by name: KIND:ADDRESS, or a bare path or URL whose kind is recognised."""

from __future__ import annotations

import os
from collections.abc import Collection
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from prolip.data.reading.stream import check_address, is_local, local_path
from prolip.data.sets import SETS
from prolip.utils.messages import explain_missing
from prolip.utils.secrecy import redacted

#: Every kind of data -> the form in which to give it.
KINDS = {
    "csv": "csv:FILE",
    "parquet": "parquet:FILE or FOLDER",
    "jsonl": "jsonl:FILE",
    "images": "images:FOLDER",
    "shards": "shards:TARS",
    "wds": "wds:FOLDER or URL",
    **{word: published.form for word, published in SETS.items()},
    "imagenet": "imagenet:FOLDER",
    "captions": "captions:FOLDER",
    "winogavil": "winogavil:FOLDER",
    "texts": "texts:FILE",
    "features": "features:FOLDER[,NAME]",
    "emoji": "emoji:TARS",
    "synthetic": "synthetic:SAMPLES",
}
#: Tables, which are local files; the kinds that `read_rows` reads; the kinds of test sets.
TABLES = ("csv", "parquet", "jsonl")
ROWS = (*TABLES, "images", *SETS)
TESTED = tuple(kind for kind in KINDS if kind not in ("texts", "features", "synthetic"))
#: Suffix of a file -> its kind.
SUFFIXES = {".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".jsonl": "jsonl"}
SUFFIXES |= dict.fromkeys((".tar", ".tar.gz", ".tgz"), "shards")


class NamedSource(NamedTuple):
    """Data by its kind, a word of KINDS, and its address: a path, a URL, or several in the form of the kind."""

    kind: str
    address: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.address}"


def parse_source(text: str, flag: str = "--data", kinds: Collection[str] = tuple(KINDS)) -> NamedSource:
    """Return the source of KIND:ADDRESS, or of a bare address by its form or content; errors start with the flag."""
    word, colon, address = text.partition(":")
    forms = ", ".join(KINDS[kind] for kind in KINDS if kind in kinds)
    if colon and word in KINDS:
        source = NamedSource(word, address)
        if not address.strip():
            raise ValueError(f"{flag} {text!r} has no address: write {KINDS[word]}")
    else:
        source = NamedSource(kind_of(text, flag, forms), text)
    if source.kind not in kinds:
        what = f"{flag} {redacted(text)!r} is data of the kind {source.kind}, which this flag does not accept"
        raise ValueError(f"{what}: give one of {forms}")
    return source


def without_word(text: str) -> str:
    """Return the address of a source with or without its kind."""
    word, colon, address = text.partition(":")
    return address if colon and word in KINDS else text


def shortened(path: str | None) -> str:
    """Shorten absolute paths of a source to their last two parts, for other readers."""
    text = path or ""
    word, parts = text.removesuffix(without_word(text)), without_word(text).split("::")
    return word + "::".join("/".join(Path(part).parts[-2:]) if Path(part).is_absolute() else part for part in parts)


def kind_of(address: str, flag: str, forms: str) -> str:
    """Return the kind of a bare address; errors as in `parse_source`."""
    path, (word, colon, _) = local_path(address), address.partition(":")
    shown = f"{flag} {redacted(address)!r}"
    if address.startswith("pipe:"):
        return "shards"
    if colon and "://" not in address and not os.path.exists(path) and (near := get_close_matches(word, KINDS)):
        offer = " or ".join(KINDS[kind] for kind in near)
        raise ValueError(f"{shown}: {word!r} is not a kind of data. Did you mean {offer}? Known are {forms}")
    if "::" in address:
        return "shards"
    if is_local(address) and os.path.isdir(path):

        def holds(*patterns: str) -> bool:
            return any(any(Path(path).glob(pattern)) for pattern in patterns)

        if holds("*/nshards.txt", "test/*.tar") or (holds("*.tar") and holds("nshards.txt", "classnames.txt")):
            return "wds"  # layout of clip_benchmark
        return "shards" if holds("*.tar") else "parquet" if holds("*.parquet") else "images"
    for suffix, kind in SUFFIXES.items():
        if address.lower().endswith(suffix):
            return kind
    if not is_local(address) or address.endswith(("}", "*")):
        return "shards"
    check_address(address)
    if not colon and not os.path.exists(address):
        raise FileNotFoundError(f"{shown} is missing (looked from {os.getcwd()}). {explain_missing(address)}")
    what = f"{shown} is not a folder and has no suffix of {', '.join(SUFFIXES)}"
    raise ValueError(f"{what}: check the name, or put its kind before it: {forms}")
