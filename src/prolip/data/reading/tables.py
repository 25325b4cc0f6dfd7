"""Tables (CSV, JSON lines, Parquet) as rows of images: columns are recognised, all problems reported together."""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from prolip.data.captions import LIKELY, Plain, Selector
from prolip.data.reading.csv import QuotingError, TableError, log, open_table
from prolip.data.reading.folders import ImageRow, ImageRows, keep_selected
from prolip.data.reading.named import NamedSource
from prolip.data.reading.stream import is_local, local_path
from prolip.data.reading.tar import printable
from prolip.data.samples import IMAGE_SUFFIXES
from prolip.utils.documents import loads
from prolip.utils.messages import explain_missing, first_few
from prolip.utils.secrecy import redacted

if TYPE_CHECKING:
    from prolip.data.reading.parquet import EmbeddedImages

HEAD, ROWS = 2**16, 100  # characters of a CSV, and rows of any table, that determine the columns
SEPARATORS = {",": "','", "\t": r"'\t'", ";": "';'", "|": "'|'"}
#: Columns with a class; every record keeps them under these names.
LABELS = ("class", "label", "category", "class_name")
#: Common column names, in lower case with underscores.
IMAGES: tuple[str, ...] = ("image", "image_path", "image_file", "image_name", "img", "img_path", "filename")
IMAGES += ("file_name", "filepath", "file_path", "file", "path", "picture", "photo")
CAPTIONS = tuple(name for name in LIKELY if name not in ("name", *LABELS))
#: Rows that show the start of relative paths, files checked in advance, and rows that a message names.
LOOKED_AT, LOOKED_FOR, NAMED = 100, 5_000, 3


class TableProblems(TableError):
    """All problems of a table's rows, one per line."""

    many_lines = True


class TableColumns(NamedTuple):
    """Columns and format of a table; None: recognise it."""

    image: str | None = None  # the column of image paths or bytes
    caption: str | None = None  # of the plain caption; "" if captions come only from other columns
    captions: tuple[str, ...] = ()  # columns of caption fields
    conditions: tuple[str, ...] = ()  # columns of conditions
    needs_caption: bool = True  # whether to refuse a table without a caption
    separator: str | None = None  # CSV only
    quoting: bool = True
    image_root: str | None = None  # start of relative paths


class ChosenColumns(NamedTuple):
    """The chosen columns of a table."""

    image: str
    caption: str | None
    others: list[str]  # all but the image's: the caption, if there is one, then the record's
    record: list[str]  # names of the record's columns in the record
    guessed: list[str]  # description of the recognised columns

    def row(self, path: Any, values: Sequence[Any], number: int) -> ImageRow:
        """Return one row from the values of `others`."""
        caption: Plain = None
        if self.caption is not None:
            value, *values = values
            caption = value if isinstance(value, (str, list)) else "" if value is None else str(value)
        return ImageRow(path if isinstance(path, str) else "", caption, dict(zip(self.record, values)), number)


IsImage = Callable[[Any], bool]  # whether a cell seems to name or contain an image
#: The columns of a table, its rows, and a reader of its embedded bytes.
Content = tuple[ChosenColumns, Iterable[ImageRow], Callable[[], "EmbeddedImages | None"]]


def plain(name: str) -> str:
    """Return a column name in the spelling of IMAGES and CAPTIONS."""
    return re.sub(r"[\s-]+", "_", name.strip().lower())


def peek(path: str, columns: TableColumns) -> tuple[str, list[list[str]]]:
    """Return a CSV's separator, header and first rows, read leniently; ValueError for several possible separators."""
    with open_table(path, ",", quoting=False):
        pass  # refuses encodings other than UTF-8
    with open(path, newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
        text, whole = file.read(HEAD), not file.read(1)
    known = {columns.image, columns.caption, *columns.captions, *IMAGES}
    style: Any = csv.QUOTE_MINIMAL if columns.quoting else csv.QUOTE_NONE
    found: dict[str, list[list[str]]] = {}
    for sign in [columns.separator] if columns.separator else SEPARATORS:
        every = csv.reader(io.StringIO(text, newline=""), delimiter=sign, quoting=style)
        records = [cells for cells in every if any(map(str.strip, cells))] or [[]]
        records = records[: ROWS + 1] if whole or len(records) < 2 else records[:-1][: ROWS + 1]
        found[sign] = [[name.strip() for name in records[0]], *records[1:]]
    several = [sign for sign, records in found.items() if len(records[0]) > 1]
    even = [sign for sign in several if len({len(cells) for cells in found[sign]}) == 1]
    named = [sign for sign in even or several if known & {*found[sign][0], *map(plain, found[sign][0])}]
    fits = named or even or several or [columns.separator or ","]
    if len(fits) > 1:
        signs = " or at ".join(SEPARATORS[sign] for sign in fits)
        raise ValueError(f"{path} can be split at {signs}: choose one with --csv-separator")
    return fits[0], found[fits[0]]


def choose(
    path: str, present: Sequence[str], head: Sequence[Mapping[str, Any]], columns: TableColumns, is_image: IsImage
) -> ChosenColumns:
    """Return the columns of a table to read: given, or recognised by their names and by `head`, its first rows."""
    flags = [(columns.image, "--csv-img-key"), (columns.caption or None, "--csv-caption-key")]
    flags += [(name, "--caption-sampling") for name in columns.captions]
    flags += [(name, "--select") for name in columns.conditions]
    for name, flag in flags:
        if name is not None and name not in present:
            usual = {"--csv-img-key": IMAGES, "--select": ()}.get(flag, CAPTIONS)
            near = get_close_matches(name, present, n=1) or [one for one in present if plain(one) in usual]
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            if len(present) == 1 and any(sign in present[0] for sign in SEPARATORS):
                hint = ", or give the right --csv-separator"
            has = f"its columns are {', '.join(present) or 'none'}"
            raise ValueError(f"{path} has no column {name!r}: {has}; name the right one with {flag}{hint}")
    label = [name for word in LABELS for name in present if plain(name) == word][:1]
    guessed = []
    if (image := columns.image) is None:
        filled = [name for name in present if 2 * sum(is_image(row.get(name)) for row in head) >= max(len(head), 1)]
        known = [name for name in present if plain(name) in IMAGES]
        fits = [name for name in known if name in filled] or filled or known
        image = only(path, present, fits, "--csv-img-key")
        guessed.append(f"images from column {image!r}")
    caption = columns.caption or None
    if columns.caption is None:
        others = [name for name in present if name not in (image, *label)]
        known = [name for name in others if plain(name) in CAPTIONS]
        texts = [name for name in others if any(is_text(row.get(name)) for row in head)]
        fits = known or texts or label
        if fits or columns.needs_caption:
            caption = fits[0] if not columns.needs_caption else only(path, present, fits, "--csv-caption-key")
            guessed.append(f"captions from column {caption!r}")
    record = list(dict.fromkeys((*columns.captions, *columns.conditions)))
    plain_one = [] if caption is None else [caption]
    return ChosenColumns(image, caption, [*plain_one, *record, *label], [*record, *map(plain, label)], guessed)


def only(path: str, present: Sequence[str], fits: Sequence[str], flag: str) -> str:
    """Return the only fitting column; ValueError for none or several."""
    if len(fits) == 1:
        return fits[0]
    what = "images" if flag == "--csv-img-key" else "captions"
    said = f"the columns {', '.join(fits)} may all be the {what}" if fits else f"no column seems to be the {what}"
    raise ValueError(f"{path}: {said}; its columns are {', '.join(present) or 'none'}: name the right one with {flag}")


def is_text(value: Any) -> bool:
    """Return whether a cell contains words, or a list of them."""
    value = value[0] if isinstance(value, list) and value else value
    return isinstance(value, str) and re.search(r"[^\W\d_]", value) is not None


def looks_like_image(value: Any, folders: Sequence[str]) -> bool:
    """Return whether a cell contains an image's bytes, or names an image by its suffix or as a file in the folders."""
    if not isinstance(value, str):
        return isinstance(value, bytes)
    if os.path.splitext(value)[1][1:].lower() in IMAGE_SUFFIXES:
        return True
    return bool(value) and is_local(value) and any(os.path.isfile(os.path.join(folder, value)) for folder in folders)


def read_table(
    source: NamedSource, columns: TableColumns, selector: Selector | None, max_bad: float | None
) -> ImageRows:
    """Read the rows of a table and merge those of one image, which then has several captions.

    Relative paths start from `columns.image_root`, else from the table's folder or the working directory, whichever has
    more of the first LOOKED_AT files (as in OpenCLIP). TableProblems lists everything wrong with the rows.
    """
    path, root = local_path(source.address), columns.image_root
    if not is_local(source.address) or (source.kind != "parquet" and os.path.isdir(path)):
        what = "a folder" if os.path.isdir(path) else "a URL"
        raise ValueError(f"{path!r} is {what}, but a {source.kind} table is a local file. Give it, or fetch it first")
    if source.kind != "parquet" and not os.path.isfile(path):
        raise FileNotFoundError(f"{path!r} is missing (looked from {os.getcwd()}). {explain_missing(path)}")
    if root is not None and not os.path.isdir(root):
        raise FileNotFoundError(f"--image-root {root!r} is not a folder. Give the folder where image paths start")
    beside = os.path.abspath(path if os.path.isdir(path) else os.path.dirname(path))
    folders = ["", beside] if root is None else [root]
    damaged: dict[int, str] = {}
    chosen, every, embedded = READERS[source.kind](path, columns, partial(looks_like_image, folders=folders), damaged)
    rows: list[ImageRow] = []
    broken = None
    try:
        rows.extend(every)
    except TableError as error:  # check the rows before it as well
        broken = error
    if chosen.guessed:
        log.info("%s: recognised %s", os.path.basename(path), ", ".join(chosen.guessed))
    if rows or not (broken or damaged):
        rows = list(keep_selected(rows, selector, path).rows)
    lacking, share = problems_of(rows, columns, folders, rooted=max_bad not in (None, 1.0))
    problems = lacking if share > (max_bad or 0) else []
    if lacking and not problems:
        log.warning("%s: these rows are skipped: %s", printable(path), "; ".join(map(printable, lacking)))
    if damaged:
        first, count = next(iter(damaged.values())).removeprefix(f"{path} "), len(damaged)
        what = "1 row is" if count == 1 else f"{count:,} rows are"
        problems = [*problems, f"{what} damaged: {name_rows(damaged)}: {first}"]
    if broken is not None:
        if not problems:
            raise broken
        problems = [*problems, str(broken).removeprefix(f"{path} ")]
    if problems:
        flag = "add --skip-damaged" if max_bad is None else "raise --max-bad-fraction"
        remedy = "correct the table" if damaged or broken is not None else f"correct or delete these rows, or {flag}"
        header = f"{printable(path)} ({'the header' if source.kind == 'csv' else 'the first'} is row 1)"
        if len(problems) == 1:
            raise TableError(f"{header}: {problems[0]}; {remedy}")
        raise TableProblems("\n  ".join([f"{header}:", *map(printable, problems), remedy.capitalize() + "."]))
    return ImageRows(merged(rows, columns.captions), embedded())


def problems_of(
    rows: Sequence[ImageRow], columns: TableColumns, folders: Sequence[str], rooted: bool
) -> tuple[list[str], float]:
    """Return the problems of rows as texts, and the affected share. rooted: the command has the flag --image-root."""

    def has_caption(row: ImageRow) -> bool:
        cells = [row.caption, *(row.record.get(name) for name in columns.captions)]
        texts = [text for cell in cells for text in (cell if isinstance(cell, list) else [cell])]
        return any(isinstance(text, str) and text.strip() for text in texts)

    files = [row for row in rows if row.inside is None]
    looked_at = list(islice((row.path for row in files if row.path and not os.path.isabs(row.path)), LOOKED_AT))
    counts = [sum(os.path.isfile(os.path.join(folder, name)) for name in looked_at) for folder in folders]
    base = folders[0] if counts[0] and counts[0] >= counts[-1] else folders[-1]
    for row in files:
        row.path = os.path.join(base, row.path) if row.path else ""
    looked_for = rows[:: -(-len(rows) // LOOKED_FOR) or 1]
    missing = [row for row in looked_for if row.inside is None and not os.path.isfile(row.path)]
    empty = [row for row in rows if columns.needs_caption and not has_caption(row)]
    problems = []
    if missing:
        name = redacted(missing[0].path)
        spread = "" if len(looked_for) == len(rows) else f" that were looked for, of {len(rows):,}"
        where = f"relative paths start from {os.path.abspath(base)}"
        where += "; --image-root FOLDER sets another start" if rooted else ""
        where += f". {explain_missing(missing[0].path).rstrip('.')}" if name else ""
        if "://" in name:
            where = "URLs are not files. Fetch the images first, for example with img2dataset"
        said = f"{len(missing):,} of {len(looked_for):,} rows{spread} name a missing image"
        problems.append(f"{said}: {name_rows(row.number for row in missing)} ({name or 'an empty cell'}); {where}")
    if empty:
        named = name_rows(row.number for row in empty)
        problems.append(f"{len(empty):,} of {len(rows):,} rows have no caption: {named}")
    lost = {row.number for row in missing}
    rest = sum(row.number not in lost for row in empty)
    return problems, len(missing) / max(len(looked_for), 1) + rest / max(len(rows), 1)


def name_rows(numbers: Iterable[int]) -> str:
    """Return the first few row numbers as text."""
    found = [str(number) for number in numbers]
    return f"row{'s' * (len(found) > 1)} {first_few(found, NAMED)}"


def merged(rows: Sequence[ImageRow], fields: Sequence[str]) -> list[ImageRow]:
    """Return the rows with those of one file merged: plain captions and fields become lists."""
    found: dict[str, ImageRow] = {}
    for row in rows:
        first = found.setdefault(row.path, row)
        if first is not row:
            first.caption = both(first.caption, row.caption)
            for name in fields:
                first.record[name] = both(first.record.get(name), row.record.get(name))
    return list(found.values())


def both(one: Any, other: Any) -> Any:
    """Join the captions of two cells without repeats."""
    if one == other or not other:
        return one
    parts = [part if isinstance(part, list) else [part] for part in (one, other) if part]
    return list(dict.fromkeys(text for part in parts for text in part))


def read_csv(path: str, columns: TableColumns, is_image: IsImage, damaged: dict[int, str]) -> Content:
    """Read a CSV with a header; ValueError if it is ambiguous (`prolip.data.reading.csv`)."""
    separator, (header, *head) = peek(path, columns)
    chosen = choose(path, header, [dict(zip(header, cells)) for cells in head], columns, is_image)
    if columns.separator is None and len(header) > 1:
        chosen.guessed.insert(0, f"the separator {separator!r}")

    def rows() -> Iterator[ImageRow]:
        try:
            with open_table(path, separator, columns.quoting) as table:
                image, places = table.place(chosen.image), [table.place(name) for name in chosen.others]
                for cells in table.read(image, damaged):
                    yield chosen.row(cells[image], [cells[place] for place in places], table.number)
        except QuotingError as error:
            remedy = "if all quotation marks in the file are plain text, give --csv-quoting none"
            raise TableError(f"{error}; {remedy}") from error

    return chosen, rows(), lambda: None


def read_jsonl(path: str, columns: TableColumns, is_image: IsImage, damaged: dict[int, str]) -> Content:
    """Read JSON lines: each line is an object with a row's cells."""

    def lines() -> Iterator[tuple[int, dict[str, Any]]]:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    found = loads(line, unique=True)
                    if not isinstance(found, dict):
                        raise ValueError(f'a {type(found).__name__}, expected an object such as {{"image": ...}}')
                    yield number, found
                except ValueError as error:
                    damaged[number] = str(error)

    head = [found for _, found in islice(lines(), ROWS)]
    damaged.clear()
    chosen = choose(path, list(dict.fromkeys(name for found in head for name in found)), head, columns, is_image)
    rows = (chosen.row(row.get(chosen.image), [row.get(name) for name in chosen.others], n) for n, row in lines())
    return chosen, rows, lambda: None


def read_parquet(path: str, columns: TableColumns, is_image: IsImage, damaged: dict[int, str]) -> Content:
    """Read Parquet tables: a file, or all files of a folder or wildcard."""
    from prolip.data.reading.parquet import ParquetTable  # late: pyarrow is slow to import

    table = ParquetTable(path, ROWS)
    chosen = choose(path, table.columns, table.head, columns, is_image)

    def rows() -> Iterator[ImageRow]:
        for file, number, inside, (image, *values) in table.read(chosen.image, chosen.others):
            row = chosen.row(image if inside is None else f"{file}#{number}", values, number)
            row.inside = inside
            yield row

    return chosen, rows(), lambda: table.embedded


READERS = {"csv": read_csv, "jsonl": read_jsonl, "parquet": read_parquet}
