"""CSV files and folders of images as rows that are known beforehand."""
from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from prolip.data.faults import SampleFault
from prolip.data.reading.opening import is_local
from prolip.data.reading.published.sets import read_set
from prolip.data.reading.table import QuotingError, TableError, open_table
from prolip.data.reading.tar import SAMPLE_BYTES, printable
from prolip.data.samples.captions import LIKELY, Plain, Selector
from prolip.data.samples.sample import IMAGE_SUFFIXES, JSON_BYTES, Raw
from prolip.utils.documents import loads, read_file, text_of
from prolip.utils.links import check_inside, walk
from prolip.utils.messages import explain_missing, listing

#: Rows of a CSV that are looked for to tell where relative paths start: the first one may well be missing.
LOOKED_AT = 100
#: What the columns of a flag are often called.
LIKELY_COLUMNS = {
    "--csv-img-key": ("image", "image_path", "filename", "file_name", "path", "file", "img"),
    "--csv-caption-key": LIKELY, "--caption-sampling": LIKELY, "--select": (),
}  # fmt: skip


@dataclass(slots=True)
class ImageRow:
    """An image file with its caption and the record in which caption fields and conditions are looked up.

    copy: how many rows before it have the same image, which a CSV with several captions per image has.
    """

    path: str
    caption: Plain
    record: dict[str, Any]
    copy: int = 0

    @property
    def key(self) -> str:
        """Unlike those of all other rows: a second row of an image has other crops, and a place in a ledger."""
        return printable(self.path) + (f"#{self.copy}" if self.copy else "")


@dataclass(frozen=True)
class ImageRows:
    """Reads row i as a raw sample, as if it came from a shard."""

    rows: Sequence[ImageRow]

    def __len__(self) -> int:
        return len(self.rows)

    def __call__(self, index: int) -> Raw:
        """The raw sample; SampleFault where the file cannot be read."""
        row = self.rows[index]
        try:
            data = read_file(row.path, SAMPLE_BYTES)
        except (OSError, ValueError) as error:  # the latter for a path with a zero byte
            reason = getattr(error, "strerror", None) or error
            raise SampleFault("missing image", f"{printable(row.path)}: {reason}") from error
        suffix = os.path.splitext(row.path)[1][1:].lower()
        # Pillow looks at the bytes, not at the name: a file without a known suffix may well be an image
        return {suffix if suffix in IMAGE_SUFFIXES else "jpg": data, **self.texts(index)}

    def texts(self, index: int) -> Raw:
        """The raw sample without its image."""
        row = self.rows[index]
        plain = {} if row.caption is None else {"txt": row.caption}
        return {"__key__": row.key, "__url__": printable(row.path), **plain, "json": row.record}


def read_published(
    word: str, train_data: str, splits: str | None = None, selector: Selector | None = None
) -> ImageRows:
    """The images of a published set, each with all its captions; errors as `read_set`."""
    images = read_set(word, train_data, splits)
    rows = [ImageRow(image.path, list(image.captions), dict(image.facts)) for image in images]
    return keep_selected(rows, selector, train_data)


def keep_selected(rows: Iterable[ImageRow], selector: Selector | None, what: str) -> ImageRows:
    """The rows that pass, ValueError where there is none."""
    every = list(rows)
    kept = [row for row in every if selector is None or selector(row.record)]
    if not kept:
        fields = f", with the fields {', '.join(every[0].record) or 'none'}" if every else ""
        raise ValueError(f"{what} gives no sample: it has {len(every)} rows{fields}; select is {selector}")
    return ImageRows(kept)


class TableColumns(NamedTuple):
    """The columns of a CSV that are read: image path, plain caption (None where captions are drawn from other columns
    alone), caption fields, fields of conditions."""

    image: str
    caption: str | None
    captions: tuple[str, ...] = ()
    conditions: tuple[str, ...] = ()


def read_csv(
    path: str, columns: TableColumns, separator: str, selector: Selector | None = None, quoting: bool = True
) -> ImageRows:
    """The rows of a CSV with a header. quoting: whether quotation marks enclose cells, or are plain text.

    Relative image paths start from the CSV's folder, or from the working directory where no fewer of the first
    LOOKED_AT are there (as in OpenCLIP). FileNotFoundError without the file, ValueError without the columns or where
    the table can be read in two ways (`prolip.data.reading.table`).
    """
    if os.path.isdir(path) or not is_local(path):
        what = "a folder" if is_local(path) else "a URL"
        raise ValueError(f"{path!r} is {what}, and a CSV is a local file: name the file, or fetch it first")
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{path!r} is missing (looked from {os.getcwd()}). {explain_missing(path)}")
    try:
        with open_table(path, separator, quoting) as table:
            check_columns(path, table.columns, columns, separator)
            image = table.place(columns.image)
            caption = None if columns.caption is None else table.place(columns.caption)
            kept = {name: table.place(name) for name in (*columns.captions, *columns.conditions)}
            rows = [
                ImageRow(cells[image], "" if caption is None else cells[caption],
                         {name: cells[place] for name, place in kept.items()})
                for cells in table.read(image)
            ]  # fmt: skip
    except QuotingError as error:
        remedy = "or, if quotation marks are plain text in the whole file, give --csv-quoting none"
        raise TableError(f"{error}; {remedy}") from error
    looked_at = list(islice((row.path for row in rows if row.path and not os.path.isabs(row.path)), LOOKED_AT))
    beside = os.path.dirname(os.path.abspath(path))
    here, there = (sum(os.path.isfile(os.path.join(base, name)) for name in looked_at) for base in ("", beside))
    base = "" if here and here >= there else beside
    times: Counter[str] = Counter()
    for row in rows:
        row.path = os.path.join(base, row.path)
        row.copy = times[row.path]
        times[row.path] += 1
    return keep_selected(rows, selector, path)


def check_columns(path: str, present: Sequence[str], columns: TableColumns, separator: str) -> None:
    """ValueError naming the flag, the columns there are and, where the separator looks wrong, the right one."""
    flags: list[tuple[str | None, str]] = [(columns.image, "--csv-img-key"), (columns.caption, "--csv-caption-key")]
    flags += [(name, "--caption-sampling") for name in columns.captions]
    flags += [(name, "--select") for name in columns.conditions]
    for column, flag in flags:
        if column is None or column in present:
            continue
        if len(present) == 1:
            for other, name in ((",", ","), ("\t", r"'\t'"), (";", "';'"), ("|", "'|'")):
                if other != separator and column in present[0].split(other):
                    raise ValueError(
                        f"{path} has no column {column!r} when split at {separator!r}: its header is "
                        f"{present[0]!r}; give --csv-separator {name}"
                    )
        near = get_close_matches(column, present, n=1) or [name for name in LIKELY_COLUMNS[flag] if name in present]
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        if f'"{column}"' in present:
            hint = ", or leave out --csv-quoting none: quotation marks enclose the cells of this table"
        raise ValueError(
            f"{path} has no column {column!r}: its columns are {', '.join(present) or 'none'}; "
            f"name the right one with {flag}{hint}"
        )


def read_folder(root: str, selector: Selector | None = None) -> ImageRows:
    """Images below a folder, `<root>/<class>/.../<image>` or `<root>/<image>`.

    The caption is the text of `<image>.txt` (same stem) beside it, else the class name with underscores as spaces. The
    record holds `class` (where there is one) and what `<image>.json` beside it holds. Names that begin with a dot are
    passed over, and links back to a folder that the path goes through. ValueError without any image and for a link
    that leaves the folder, OSError for a folder that cannot be listed.
    """
    if not os.path.isdir(root):
        raise FileNotFoundError(f"image folder {root!r} is missing. {explain_missing(root)}")
    rows = []
    for folder, names in walk(root):
        parts = Path(folder).relative_to(root).parts
        label = parts[0].replace("_", " ") if parts else None
        present = set(names)
        for name in names:
            stem, suffix = os.path.splitext(name)
            if suffix[1:].lower() in IMAGE_SUFFIXES and not name.startswith("."):  # macOS writes "._cat.jpg"
                for beside in {f"{stem}.txt", f"{stem}.json"} & present | {name}:
                    check_inside(root, os.path.join(folder, beside))
                rows.append(folder_row(os.path.join(folder, stem), suffix, label, present))
    if not rows:
        raise ValueError(f"folder {root} holds no image ({', '.join(IMAGE_SUFFIXES)}); it holds {listing(root)}")
    return keep_selected(rows, selector, root)


def folder_row(stem: str, suffix: str, label: str | None, present: set[str]) -> ImageRow:
    """One image of a folder, with the files beside it that `present` lists."""
    name = os.path.basename(stem)
    caption, record = label, {"class": label} if label is not None else {}
    if f"{name}.txt" in present:
        caption = read_text(f"{stem}.txt")
    if f"{name}.json" in present:
        try:
            extra = loads(read_text(f"{stem}.json"), unique=True)
        except ValueError as error:
            raise ValueError(f"{stem}.json is no JSON: {error}; repair or remove it") from error
        if not isinstance(extra, dict):
            raise ValueError(f"{stem}.json holds a {type(extra).__name__}, wanted an object; repair or remove it")
        record = {**record, **extra}
    return ImageRow(stem + suffix, caption, record)


def read_text(path: str) -> str:
    """The text of a file; ValueError with its name where it is no UTF-8."""
    try:
        return text_of(path, JSON_BYTES)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8: {error}; convert or remove it") from error
