"""Which column of a table holds the images, which the captions, and what separates them: where only one choice fits."""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

from prolip.data.reading.opening import is_local
from prolip.data.reading.tables.csv import open_table
from prolip.data.samples.captions import LIKELY
from prolip.data.samples.sample import IMAGE_SUFFIXES

#: Characters of a CSV, and rows of any table, by whose content columns are recognised.
HEAD, ROWS = 2**16, 100
SEPARATORS = {",": "','", "\t": r"'\t'", ";": "';'", "|": "'|'"}
#: Columns that hold a class, which every record keeps under these names.
LABELS = ("class", "label", "category", "class_name")
#: What columns are often called, in lower case and with underscores.
IMAGES = (
    "image",
    "image_path",
    "image_file",
    "image_name",
    "img",
    "img_path",
    "filename",
    "file_name",
    "filepath",
    "file_path",
    "file",
    "path",
    "picture",
    "photo",
)
CAPTIONS = tuple(name for name in LIKELY if name not in ("name", *LABELS))
KNOWN = {"--csv-img-key": IMAGES, "--csv-caption-key": CAPTIONS, "--caption-sampling": CAPTIONS, "--select": ()}


class TableColumns(NamedTuple):
    """How a table is read; None is recognised.

    image, caption: the columns of the image's path (or bytes) and of the plain caption, "" where captions are drawn
    from other columns alone; captions, conditions: columns of caption fields and of conditions; needs_caption: whether
    a table without a caption is refused; separator, quoting: of a CSV; image_root: where relative paths start.
    """

    image: str | None = None
    caption: str | None = None
    captions: tuple[str, ...] = ()
    conditions: tuple[str, ...] = ()
    needs_caption: bool = True
    separator: str | None = None
    quoting: bool = True
    image_root: str | None = None


class Chosen(NamedTuple):
    """The columns of images, captions and labels, None where there is none, and what was guessed, in words."""

    image: str
    caption: str | None
    label: str | None
    guessed: tuple[str, ...]


def plain(name: str) -> str:
    """The name of a column as IMAGES and CAPTIONS write it."""
    return re.sub(r"[\s-]+", "_", name.strip().lower())


def peek(path: str, separator: str | None, quoting: bool, wanted: Iterable[str]) -> tuple[str, list[list[str]]]:
    """The separator of a CSV, and its header with its first rows, read leniently. TableError for what is no text.

    wanted: columns that are asked for. ValueError where several separators fit.
    """
    with open_table(path, ",", quoting=False):
        pass  # which refuses what is no UTF-8
    with open(path, newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
        text = file.read(HEAD)
        whole = not file.read(1)
    known = {*wanted, *IMAGES}
    found: dict[str, list[list[str]]] = {}
    for sign in [separator] if separator else SEPARATORS:
        style: Any = csv.QUOTE_MINIMAL if quoting else csv.QUOTE_NONE
        every = csv.reader(io.StringIO(text, newline=""), delimiter=sign, quoting=style)
        records = [cells for cells in every if any(map(str.strip, cells))]
        records = records[: ROWS + 1] if whole or len(records) < 2 else records[:-1][: ROWS + 1]
        found[sign] = [[name.strip() for name in records[0]], *records[1:]] if records else [[]]
    several = [sign for sign, records in found.items() if len(records[0]) > 1]
    even = [sign for sign in several if len({len(cells) for cells in found[sign]}) == 1]
    named = [sign for sign in even or several if known & {*found[sign][0], *map(plain, found[sign][0])}]
    fits = named or even or several or [separator or ","]
    if len(fits) > 1:
        raise ValueError(
            f"{path} can be split at {' or at '.join(SEPARATORS[sign] for sign in fits)}: name the right "
            "one with --csv-separator"
        )
    return fits[0], found[fits[0]]


def choose(
    path: str,
    present: Sequence[str],
    head: Sequence[Mapping[str, Any]],
    columns: TableColumns,
    is_image: Callable[[Any], bool],
    separator: str | None = None,
) -> Chosen:
    """The columns of a table that are read, given or recognised by their names and by what `head`, its first rows,
    holds. ValueError naming the flag, the columns there are and, where the separator looks wrong, the right one.
    """
    flags = [(columns.image, "--csv-img-key"), (columns.caption or None, "--csv-caption-key")]
    flags += [(name, "--caption-sampling") for name in columns.captions]
    flags += [(name, "--select") for name in columns.conditions]
    for name, flag in flags:
        if name is not None and name not in present:
            raise ValueError(absent(path, present, name, flag, separator))
    label = next((name for word in LABELS for name in present if plain(name) == word), None)
    guessed = []
    if (image := columns.image) is None:
        shown = [name for name in present if 2 * sum(is_image(row.get(name)) for row in head) >= max(len(head), 1)]
        known = [name for name in present if plain(name) in IMAGES]
        image = only(path, present, [name for name in known if name in shown] or shown or known, "--csv-img-key")
        guessed.append(f"images from column {image!r}")
    caption = columns.caption or None
    if columns.caption is None:
        others = [name for name in present if name not in (image, label)]
        known = [name for name in others if plain(name) in CAPTIONS]
        texts = [name for name in others if any(is_text(row.get(name)) for row in head)]
        fits = known or texts or ([label] if label else [])
        if fits or columns.needs_caption:
            caption = fits[0] if not columns.needs_caption else only(path, present, fits, "--csv-caption-key")
            guessed.append(f"captions from column {caption!r}")
    return Chosen(image, caption, label, tuple(guessed))


def only(path: str, present: Sequence[str], fits: Sequence[str], flag: str) -> str:
    """The one column that fits; ValueError where none or several do."""
    if len(fits) == 1:
        return fits[0]
    what = "images" if flag == "--csv-img-key" else "captions"
    said = f"the columns {', '.join(fits)} may all hold the {what}" if fits else f"no column seems to hold the {what}"
    raise ValueError(f"{path}: {said}; its columns are {', '.join(present) or 'none'}: name the right one with {flag}")


def is_text(value: Any) -> bool:
    """Whether a cell holds words, or a list of them."""
    value = value[0] if isinstance(value, list) and value else value
    return isinstance(value, str) and re.search(r"[^\W\d_]", value) is not None


def looks_like_image(value: Any, folders: Sequence[str]) -> bool:
    """Whether a cell holds an image's bytes, a name with the suffix of an image, or that of a file in the folders."""
    if isinstance(value, bytes):
        return True
    if not isinstance(value, str) or not value:
        return False
    if os.path.splitext(value)[1][1:].lower() in IMAGE_SUFFIXES:
        return True
    return is_local(value) and any(os.path.isfile(os.path.join(folder, value)) for folder in folders)


def absent(path: str, present: Sequence[str], column: str, flag: str, separator: str | None) -> str:
    """The words on a column that a table lacks."""
    if separator and len(present) == 1:
        for other, name in SEPARATORS.items():
            if other != separator and column in present[0].split(other):
                return (
                    f"{path} has no column {column!r} when split at {separator!r}: its header is {present[0]!r}; "
                    f"give --csv-separator {name}"
                )
    near = get_close_matches(column, present, n=1) or [name for name in present if plain(name) in KNOWN[flag]]
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    if f'"{column}"' in present:
        hint = ", or leave out --csv-quoting none: quotation marks enclose the cells of this table"
    return (
        f"{path} has no column {column!r}: its columns are {', '.join(present) or 'none'}; "
        f"name the right one with {flag}{hint}"
    )
