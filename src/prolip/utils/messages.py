"""Words that error messages of all parts share: which flag is meant, what a file is, what is where one is missing."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import NamedTuple

#: Bytes of a file that are looked at.
HEAD = 1024
SHOWN = 60
NAMED = 3
QUOTES = ("'", '"')
FETCH = "fetch it again"


class Appearance(NamedTuple):
    """What a file is, as a noun with its article, and what to do about it where something else was wanted."""

    what: str
    remedy: str = "check the path"


ANSWER = "a server's answer and not the file: see that the address and the login are right, and fetch it again"
#: What begins with these bytes.
BEGINNINGS: tuple[tuple[bytes, Appearance], ...] = (
    (b"version https://git-lfs", Appearance("a Git LFS pointer", "fetch what it stands for: git lfs pull")),
    (b"\x1f\x8b", Appearance("gzip-compressed data", "unpack it: gunzip -c FILE")),
    (b"BZh", Appearance("bzip2-compressed data", "unpack it: bunzip2 -c FILE")),
    (b"\xfd7zXZ\x00", Appearance("xz-compressed data", "unpack it: xz -dc FILE")),
    (b"\x28\xb5\x2f\xfd", Appearance("zstd-compressed data", "unpack it: zstd -dc FILE")),
    (b"PK\x03\x04", Appearance("a zip archive", "unpack it")),
    (b"PK\x05\x06", Appearance("an empty zip archive")),
    (b"PAR1", Appearance("a Parquet table", "a table of addresses is no data yet: fetch its images (img2dataset)")),
    (b"ARROW1", Appearance("an Arrow table")),
    (b"\x89HDF\r\n\x1a\n", Appearance("an HDF5 file (TensorFlow, Keras)")),
    (b"\x93NUMPY", Appearance("a NumPy array")),
    (b"\xff\xd8\xff", Appearance("a JPEG image")),
    (b"\x89PNG", Appearance("a PNG image")),
    (b"RIFF", Appearance("a WebP image or another RIFF file")),
    (b"GIF8", Appearance("a GIF image")),
    (b"%PDF", Appearance("a PDF document")),
    (b"GGUF", Appearance("a GGUF model")),
    (b"7z\xbc\xaf\x27\x1c", Appearance("a 7z archive", "unpack it")),
    (b"Rar!", Appearance("a RAR archive", "unpack it")),
    (b"\x80", Appearance("a Python pickle")),
)
#: What text in angle brackets or braces begins with, in lower case.
MARKUP: tuple[tuple[str, Appearance], ...] = (
    ("<!doctype html", Appearance("an HTML page", ANSWER)),
    ("<html", Appearance("an HTML page", ANSWER)),
    ("<", Appearance("XML", ANSWER)),
    ("{", Appearance("JSON", ANSWER)),
    ("[", Appearance("JSON", ANSWER)),
)


def appearance(head: bytes) -> Appearance:
    """What the first HEAD bytes of a file say that it is; text is shown, and bytes that nobody knows."""
    if not head:
        return Appearance("an empty file", FETCH)
    if not any(head):
        return Appearance("zeros alone", FETCH)
    for begin, found in BEGINNINGS:
        if head.startswith(begin):
            return found
    if head[257:262] == b"ustar":
        return Appearance("a tar archive")
    if head[8:10] == b'{"' and int.from_bytes(head[:8], "little") < 2**32:
        return Appearance("a safetensors file")
    if head[:1] == b"\x08" and (b"pytorch" in head[:64] or b"onnx" in head[:64] or head[2:3] == b"\x12"):
        return Appearance("an ONNX or TensorFlow graph")
    text = head.decode("utf-8", "ignore").lstrip("\ufeff \t\r\n")
    line = text.splitlines()[0][:SHOWN] if text else ""
    # a character that HEAD cut in two may be missing at the end, and no more
    if len(text.encode()) + 8 < len(head.strip()) or not all(c.isprintable() or c.isspace() for c in text):
        return Appearance(f"bytes of no known format ({head[:8].hex(' ')}...)", FETCH)
    for opening, (what, remedy) in MARKUP:
        if text.lower().startswith(opening):
            return Appearance(f"{what} ({line!r})", remedy)
    return Appearance(f"text ({line!r})")


def appearance_of(path: str | os.PathLike) -> Appearance:
    """What a local file is."""
    with open(path, "rb") as file:
        return appearance(file.read(HEAD))


def explain_missing(path: str) -> str:
    """What is where a missing file was looked for: names close to it, or the nearest folder that exists."""
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(folder):
        near = get_close_matches(os.path.basename(path), os.listdir(folder), n=NAMED, cutoff=0.5)
        if near:
            return f"Did you mean {' or '.join(near)} in {folder}?"
        return f"{folder} holds {listing(folder)}."
    while not os.path.isdir(folder):
        folder, below = os.path.dirname(folder), os.path.basename(folder)
    near = get_close_matches(below, os.listdir(folder), n=NAMED, cutoff=0.5)
    return f"There is no {below} in {folder}" + (f": did you mean {' or '.join(near)}?" if near else ".")


def listing(folder: str, most: int = 5) -> str:
    """The first few names in a folder."""
    names = sorted(os.listdir(folder), key=lambda name: (name.startswith("."), name))
    return first_few(names, most) or "nothing"


def first_few(names: Sequence[str], most: int) -> str:
    """The first `most` of some names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


@contextmanager
def naming(flag: str) -> Iterator[None]:
    """Put the flag that a person typed before the message of an error about its value, which may begin with it quoted.

    Errors whose message begins with a flag already stay as they are. A class of error that a message alone does not
    make, such as UnicodeDecodeError, becomes the plain ValueError or OSError.
    """
    try:
        yield
    except (OSError, ValueError, ImportError) as error:
        if str(error).startswith("--"):
            raise
        begins_with_value = str(error).startswith(QUOTES) and not isinstance(error, UnicodeError)
        raise _told_as(error, f"{flag}{'' if begins_with_value else ':'} {error}") from error


@contextmanager
def respelling(flags: Mapping[str, str]) -> Iterator[None]:
    """In messages of errors, replace training's flags by those of this command."""
    try:
        yield
    except (OSError, ValueError) as error:
        words = re.split(r"(?<![\w-])(--[\w-]+)", str(error))
        if not flags.keys() & set(words):
            raise
        raise _told_as(error, "".join(flags.get(word, word) for word in words)) from error


def _told_as(error: Exception, text: str) -> Exception:
    kind = next(kind for kind in (OSError, ValueError, ImportError) if isinstance(error, kind))
    try:
        return type(error)(text)
    except TypeError:
        return kind(text)
