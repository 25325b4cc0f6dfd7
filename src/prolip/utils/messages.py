"""Parts of error messages: the flag, the kind of a file, the names similar to a missing one."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import NamedTuple

#: Bytes that determine a file's kind, characters shown of a text, names suggested.
HEAD, SHOWN, NAMED = 1024, 60, 3
FETCH = "fetch it again"


class Appearance(NamedTuple):
    """The kind of a file, as a noun with its article, and the remedy if another kind was expected."""

    what: str
    remedy: str = "check the path"


ANSWER = "a server's answer instead of the file: check the address and the login, and fetch it again"
#: First bytes of a file -> its kind and (by default "check the path") the remedy.
KINDS: dict[bytes, tuple[str, ...]] = {
    b"version https://git-lfs": ("a Git LFS pointer", "fetch the file: git lfs pull"),
    b"\x1f\x8b": ("gzip-compressed data", "unpack it: gunzip -c FILE"),
    b"BZh": ("bzip2-compressed data", "unpack it: bunzip2 -c FILE"),
    b"\xfd7zXZ\x00": ("xz-compressed data", "unpack it: xz -dc FILE"),
    b"\x28\xb5\x2f\xfd": ("zstd-compressed data", "unpack it: zstd -dc FILE"),
    b"PK\x03\x04": ("a zip archive", "unpack it"),
    b"PAR1": ("a Parquet table", "if it is a table of addresses, fetch its images (img2dataset)"),
    b"\x89HDF\r\n\x1a\n": ("an HDF5 file (TensorFlow, Keras)",),
    b"\x93NUMPY": ("a NumPy array",),
    b"\xff\xd8\xff": ("a JPEG image",),
    b"\x89PNG": ("a PNG image",),
    b"\x80": ("a Python pickle",),
}
#: First letters of a text -> its kind.
MARKUP = {"<!doctype html": "an HTML page", "<html": "an HTML page", "<": "XML", "{": "JSON", "[": "JSON"}


def appearance(head: bytes) -> Appearance:
    """Return the kind of a file from its first HEAD bytes, with the beginning of a text or of unknown bytes."""
    if not any(head):
        return Appearance("only zeros" if head else "an empty file", FETCH)
    for begin, found in KINDS.items():
        if head.startswith(begin):
            return Appearance(*found)
    if head[257:262] == b"ustar":
        return Appearance("a tar archive")
    if head[8:10] == b'{"' and int.from_bytes(head[:8], "little") < 2**32:
        return Appearance("a safetensors file")
    text = head.decode("utf-8", "ignore").lstrip("\ufeff \t\r\n")
    line = text.splitlines()[0][:SHOWN] if text else ""
    # at most one character, cut by HEAD, may be missing at the end
    if len(text.encode()) + 8 < len(head.strip()) or not all(c.isprintable() or c.isspace() for c in text):
        return Appearance(f"data of unknown format ({head[:8].hex(' ')}...)", FETCH)
    markup = next((what for begin, what in MARKUP.items() if text.lower().startswith(begin)), None)
    return Appearance(f"{markup} ({line!r})", ANSWER) if markup else Appearance(f"text ({line!r})")


def appearance_of(path: str | os.PathLike) -> Appearance:
    """Return the kind of a local file."""
    with open(path, "rb") as file:
        return appearance(file.read(HEAD))


def explain_missing(path: str) -> str:
    """Suggest names similar to a missing file or folder in the nearest existing folder, or list that folder."""
    folder, name = os.path.split(os.path.abspath(path))
    there = os.path.isdir(folder)
    while not os.path.isdir(folder):
        folder, name = os.path.split(folder)
    near = " or ".join(get_close_matches(name, os.listdir(folder), n=NAMED, cutoff=0.5))
    if there:
        return f"Did you mean {near} in {folder}?" if near else f"{folder} holds {listing(folder)}."
    return f"There is no {name} in {folder}" + (f": did you mean {near}?" if near else ".")


def listing(folder: str, most: int = 5) -> str:
    """List the first few names in a folder."""
    names = sorted(os.listdir(folder), key=lambda name: (name.startswith("."), name))
    return first_few(names, most) or "nothing"


def first_few(names: Sequence[str], most: int) -> str:
    """List the first `most` names, and the number of others."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


@contextmanager
def naming(flag: str) -> Iterator[None]:
    """Put the typed flag before the message of an error about its value, which may begin with the quoted value."""
    try:
        yield
    except (OSError, ValueError, ImportError) as error:
        if str(error).startswith("--"):
            raise
        begins_with_value = str(error).startswith(("'", '"')) and not isinstance(error, UnicodeError)
        raise _with_message(error, f"{flag}{'' if begins_with_value else ':'} {error}") from error


@contextmanager
def respelling(flags: Mapping[str, str]) -> Iterator[None]:
    """Replace training's flags with those of this command in error messages."""
    try:
        yield
    except (OSError, ValueError) as error:
        words = re.split(r"(?<![\w-])(--[\w-]+)", str(error))
        if not flags.keys() & set(words):
            raise
        raise _with_message(error, "".join(flags.get(word, word) for word in words)) from error


def _with_message(error: Exception, text: str) -> Exception:
    """Return the error with another message, as ValueError, OSError or ImportError if its class needs more."""
    try:
        return type(error)(text)
    except TypeError:
        return next(kind for kind in (OSError, ValueError, ImportError) if isinstance(error, kind))(text)
