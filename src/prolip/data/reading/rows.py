"""A source of data as rows of images with captions: tables, folders of images and published sets alike."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from prolip.data.reading.folders import ImageRow, ImageRows, keep_selected, read_folder
from prolip.data.reading.named import NamedSource
from prolip.data.reading.opening import is_local, local_path
from prolip.data.reading.published.sets import read_set
from prolip.data.reading.tables.columns import ROWS, Chosen, TableColumns, choose, looks_like_image, peek, plain
from prolip.data.reading.tables.csv import QuotingError, TableError, log, open_table
from prolip.data.reading.tar import printable
from prolip.data.samples.captions import Plain, Selector
from prolip.data.samples.split import Split
from prolip.utils.documents import loads
from prolip.utils.messages import explain_missing, first_few
from prolip.utils.secrecy import redacted

if TYPE_CHECKING:
    from prolip.data.reading.tables.parquet import EmbeddedImages

RECOGNISED = TableColumns()
#: Rows of a table that are looked for to tell where relative paths start: the first one may well be missing.
LOOKED_AT = 100
#: Files that are looked for beforehand; of more rows, so many that are spread evenly.
LOOKED_FOR = 5_000
#: Rows that a message names.
NAMED = 3


class TableProblems(TableError):
    """What is wrong with the rows of a table, a line each."""

    many_lines = True


class Read(NamedTuple):
    """What a table holds: its rows, those that are damaged (row -> why), the columns, and a reader of bytes in it."""

    rows: Iterable[ImageRow]
    damaged: dict[int, str]
    chosen: Chosen
    embedded: Callable[[], EmbeddedImages | None] = lambda: None


def read_rows(
    source: NamedSource,
    columns: TableColumns = RECOGNISED,
    selector: Selector | None = None,
    splits: str | None = None,
    split: Split | None = None,
    max_bad: float | None = None,
) -> ImageRows:
    """The images of a source, one of the kinds ROWS, each with all of its captions and its record.

    columns: of tables; selector: keeps rows by their record; splits: of a published set, joined by '+'; split: the side
    of a share that is held out by content, for which all images are read; max_bad: the share of a table's rows that may
    lack their image or caption (None: none, and no flag is offered). FileNotFoundError, ValueError.
    """
    if source.kind == "images":
        rows = read_folder(local_path(source.address), selector)
    elif source.kind in READERS:
        rows = read_table(source, columns, selector, max_bad)
    else:
        images = read_set(source.kind, str(source), splits).images
        every = [ImageRow(image.path, list(image.captions), dict(image.facts)) for image in images]
        rows = keep_selected(every, selector, str(source))
    return rows.part(split) if split is not None else rows


def read_table(
    source: NamedSource, columns: TableColumns, selector: Selector | None, max_bad: float | None
) -> ImageRows:
    """The rows of a table, those of one image together: their captions are several of it.

    Relative paths start from `columns.image_root`, else from the table's folder or from the working directory, where no
    fewer of the first LOOKED_AT are there (as in OpenCLIP). TableProblems for all that is wrong with its rows.
    """
    path = local_path(source.address)
    if not is_local(source.address) or (source.kind != "parquet" and os.path.isdir(path)):
        what = "a folder" if os.path.isdir(path) else "a URL"
        raise ValueError(f"{path!r} is {what}, and a {source.kind} table is a local file: name it, or fetch it first")
    if source.kind != "parquet" and not os.path.isfile(path):
        raise FileNotFoundError(f"{path!r} is missing (looked from {os.getcwd()}). {explain_missing(path)}")
    folders = starts(path, columns.image_root)
    found = READERS[source.kind](path, columns, partial(looks_like_image, folders=folders))
    rows: list[ImageRow] = []
    broken = None
    try:
        rows.extend(found.rows)
    except TableError as error:  # nothing behind it can be read, and what came before is looked at
        broken = error
    if found.chosen.guessed:
        log.info("%s: recognised %s", os.path.basename(path), ", ".join(found.chosen.guessed))
    if rows or not (broken or found.damaged):
        rows = list(keep_selected(rows, selector, path).rows)
    base = place_files(rows, folders)
    lacking, share = problems_of(rows, columns, base)
    problems = lacking if share > (max_bad or 0) else []
    if lacking and not problems:
        log.warning("%s: these rows are left out: %s", printable(path), "; ".join(map(printable, lacking)))
    if found.damaged:
        first, count = next(iter(found.damaged.values())).removeprefix(f"{path} "), len(found.damaged)
        what = "1 row is" if count == 1 else f"{count:,} rows are"
        problems = [*problems, f"{what} damaged: {name_rows(found.damaged)}: {first}"]
    if broken is not None and not problems:
        raise broken
    if broken is not None:
        problems = [*problems, str(broken).removeprefix(f"{path} ")]
    if problems:
        tolerated = max_bad is not None and not found.damaged and broken is None
        remedy = "correct the table" + (", or raise --max-bad-fraction" if tolerated else "")
        header = f"{printable(path)} ({'the header' if source.kind == 'csv' else 'the first'} is row 1)"
        if len(problems) == 1:
            raise TableError(f"{header}: {problems[0]}; {remedy}")
        raise TableProblems("\n  ".join([f"{header}:", *map(printable, problems), remedy.capitalize() + "."]))
    return ImageRows(merged(rows, columns.captions), found.embedded())


def starts(path: str, image_root: str | None) -> list[str]:
    """Where relative paths of a table may start."""
    if image_root is None:
        return ["", os.path.abspath(path if os.path.isdir(path) else os.path.dirname(path))]
    if not os.path.isdir(image_root):
        raise FileNotFoundError(f"--image-root {image_root!r} is no folder: give the one that images' paths start from")
    return [image_root]


def place_files(rows: Sequence[ImageRow], folders: Sequence[str]) -> str:
    """Make paths start where they do, which is returned: in the first folder if no fewer are there than in the last."""
    files = [row for row in rows if row.inside is None]
    looked_at = list(islice((row.path for row in files if row.path and not os.path.isabs(row.path)), LOOKED_AT))
    counts = [sum(os.path.isfile(os.path.join(folder, name)) for name in looked_at) for folder in folders]
    base = folders[0] if counts[0] and counts[0] >= counts[-1] else folders[-1]
    for row in files:
        row.path = os.path.join(base, row.path) if row.path else ""
    return os.path.abspath(base)


def problems_of(rows: Sequence[ImageRow], columns: TableColumns, base: str) -> tuple[list[str], float]:
    """What rows lack, in words, and the share of them that lacks something. base: where relative paths start."""
    looked_for = rows[:: -(-len(rows) // LOOKED_FOR) or 1]
    missing = [row for row in looked_for if row.inside is None and not os.path.isfile(row.path)]
    empty = [
        row
        for row in rows
        if columns.needs_caption
        and not any(map(filled, (row.caption, *(row.record.get(name) for name in columns.captions))))
    ]
    problems = []
    if missing:
        name = missing[0].path
        spread = "" if len(looked_for) == len(rows) else f" that were looked for, of {len(rows):,}"
        where = f"relative paths start from {base}; --image-root FOLDER sets another start"
        where += f". {explain_missing(name).rstrip('.')}" if name else ""
        name = redacted(name)
        if "://" in name:
            where = "addresses are no files: fetch the images first, e.g. by img2dataset"
        problems.append(
            f"{len(missing):,} of {len(looked_for):,} rows{spread} name no image that is there: "
            f"{name_rows(row.number for row in missing)} ({name or 'an empty cell'}); {where}"
        )
    if empty:
        named = name_rows(row.number for row in empty)
        problems.append(f"{len(empty):,} of {len(rows):,} rows have no caption: {named}")
    lost = {row.number for row in missing}
    rest = sum(row.number not in lost for row in empty)
    return problems, len(missing) / max(len(looked_for), 1) + rest / max(len(rows), 1)


def filled(value: Any) -> bool:
    """Whether a cell holds a caption."""
    return any(isinstance(text, str) and text.strip() for text in (value if isinstance(value, list) else [value]))


def name_rows(numbers: Iterable[int]) -> str:
    """The first few of some rows."""
    found = [str(number) for number in numbers]
    return f"row{'s' * (len(found) > 1)} {first_few(found, NAMED)}"


def merged(rows: Sequence[ImageRow], fields: Sequence[str]) -> list[ImageRow]:
    """The rows with those of one file joined into its first: plain captions and fields become lists."""
    found: dict[str, ImageRow] = {}
    for row in rows:
        first = found.setdefault(row.path, row)
        if first is not row:
            first.caption = both(first.caption, row.caption)
            for name in fields:
                first.record[name] = both(first.record.get(name), row.record.get(name))
    return list(found.values())


def both(one: Any, other: Any) -> Any:
    """The captions of two cells, each once."""
    if one == other or not other:
        return one
    parts = [part if isinstance(part, list) else [part] for part in (one, other) if part]
    return list(dict.fromkeys(text for part in parts for text in part))


def make_row(path: Any, values: Sequence[Any], chosen: Chosen, names: Sequence[str], number: int) -> ImageRow:
    """One row of a table. values: of the caption, where there is one, and of the columns `names` of the record."""
    caption: Plain = None
    if chosen.caption is not None:
        value, *values = values
        caption = value if isinstance(value, (str, list)) else "" if value is None else str(value)
    return ImageRow(path if isinstance(path, str) else "", caption, dict(zip(names, values)), number)


def wanted(chosen: Chosen, columns: TableColumns) -> tuple[list[str], list[str]]:
    """The columns that are read beside the images', and what those of the record are called there."""
    record = list(dict.fromkeys((*columns.captions, *columns.conditions)))
    label = [chosen.label] if chosen.label else []
    return [*([chosen.caption] if chosen.caption is not None else []), *record, *label], [*record, *map(plain, label)]


def read_csv(path: str, columns: TableColumns, is_image: Callable[[Any], bool]) -> Read:
    """A CSV with a header; ValueError where it can be read in two ways (`prolip.data.reading.tables.csv`)."""
    given = [name for name in (columns.image, columns.caption, *columns.captions) if name]
    separator, (header, *head) = peek(path, columns.separator, columns.quoting, given)
    chosen = choose(path, header, [dict(zip(header, cells)) for cells in head], columns, is_image, separator)
    if columns.separator is None and len(header) > 1:
        chosen = chosen._replace(guessed=(f"the separator {separator!r}", *chosen.guessed))
    every, record = wanted(chosen, columns)
    damaged: dict[int, str] = {}

    def rows() -> Iterator[ImageRow]:
        try:
            with open_table(path, separator, columns.quoting) as table:
                image, places = table.place(chosen.image), [table.place(name) for name in every]
                for cells in table.read(image, damaged):
                    yield make_row(cells[image], [cells[place] for place in places], chosen, record, table.number)
        except QuotingError as error:
            remedy = "or, if quotation marks are plain text in the whole file, give --csv-quoting none"
            raise TableError(f"{error}; {remedy}") from error

    return Read(rows(), damaged, chosen)


def read_jsonl(path: str, columns: TableColumns, is_image: Callable[[Any], bool]) -> Read:
    """JSON lines: an object with a row's cells in each."""
    damaged: dict[int, str] = {}

    def lines() -> Iterator[tuple[int, dict[str, Any]]]:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    found = loads(line, unique=True)
                    if not isinstance(found, dict):
                        raise ValueError(f'a {type(found).__name__}, wanted an object such as {{"image": ...}}')
                    yield number, found
                except ValueError as error:
                    damaged[number] = str(error)

    head = [found for _, found in islice(lines(), ROWS)]
    damaged.clear()
    chosen = choose(path, list(dict.fromkeys(name for found in head for name in found)), head, columns, is_image)
    every, record = wanted(chosen, columns)
    rows = (
        make_row(found.get(chosen.image), [found.get(name) for name in every], chosen, record, number)
        for number, found in lines()
    )
    return Read(rows, damaged, chosen)


def read_parquet(path: str, columns: TableColumns, is_image: Callable[[Any], bool]) -> Read:
    """Parquet tables: a file, or those of a folder or a wildcard."""
    from prolip.data.reading.tables.parquet import ParquetTable  # late: pyarrow takes a moment

    table = ParquetTable(path, ROWS)
    chosen = choose(path, table.columns, table.head, columns, is_image)
    every, record = wanted(chosen, columns)

    def rows() -> Iterator[ImageRow]:
        for file, number, inside, (image, *values) in table.read(chosen.image, every):
            row = make_row(image if inside is None else f"{file}#{number}", values, chosen, record, number)
            row.inside = inside
            yield row

    return Read(rows(), {}, chosen, lambda: table.embedded)


READERS = {"csv": read_csv, "jsonl": read_jsonl, "parquet": read_parquet}
