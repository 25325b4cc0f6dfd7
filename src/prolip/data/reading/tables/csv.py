"""CSV and TSV files read strictly: what can be read in two ways is refused, with its line, its column and a remedy.

A lenient reader loses rows in silence: all of them behind a quotation mark that is not closed, up to the next one, and
the end of a text that holds separators and no quotation marks. What csv.writer and pandas write is never ambiguous,
line breaks and doubled quotation marks in quoted cells included, and is always read.
"""
from __future__ import annotations

import csv
import logging
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from prolip.data.samples.sample import IMAGE_SUFFIXES

log = logging.getLogger(__name__)

LINE_BREAK = re.compile(r"\r\n|\r|\n")
QUOTED = re.compile(r'"[^"]*(?:""[^"]*)*"(?!")')
SUFFIX = re.compile(r"\.\w{1,5}$")
#: Rows at the beginning of a table whose paths are looked for where they have no suffix.
LOOKED_AT = 100
DOUBLED = (
    'write a cell with a quotation mark as "5"" nail", in quotation marks and with its own doubled, as csv.writer and '
    "pandas do"
)


def show_counts() -> None:
    """Let a command print the log's warnings, and the count of every table that it reads."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    log.setLevel(logging.INFO)


class TableError(ValueError):
    """A table that cannot be read, or in two ways."""


class QuotingError(TableError):
    """A table whose quotation marks do not follow the rules of CSV: in some they are plain text."""


@contextmanager
def open_table(path: str, separator: str, quoting: bool = True) -> Iterator[Table]:
    """A local table in UTF-8, with or without a byte order mark. TableError, in the body too, where it is none.

    Paths of images alone may hold other bytes, as names of files do.

    quoting: see `Table`. How many rows were read of how many lines goes into the log at the end, level INFO, which
    commands show.
    """
    with open(path, newline="", encoding="utf-8-sig", errors="surrogateescape") as lines:
        try:
            table = Table(path, separator, lines, quoting)
            yield table
        except UnicodeDecodeError as error:
            with open(path, "rb") as file:
                coding = "UTF-16" if file.read(2) in (b"\xff\xfe", b"\xfe\xff") else "LATIN1"
            raise TableError(
                f"{path} is no UTF-8 ({error}): convert it, e.g. iconv -f {coding} -t UTF-8 {path} > new.csv"
            ) from error


def check_utf8(cells: list[str], but: int | None = None) -> None:
    """UnicodeDecodeError for a cell with other bytes. but: the place of one that may hold them."""
    for place, cell in enumerate(cells):
        if place != but and not cell.isascii():
            cell.encode(errors="surrogateescape").decode()


class Table:
    """The rows of a table whose first row names the columns; blank lines are passed over.

    quoting: whether quotation marks enclose cells, or are plain text as in tables that were written without a library.
    rows, blank, spanning, enclosed: rows read so far, blank lines, rows that hold line breaks, and those with a cell in
    quotation marks that were kept; number: the present row as a spreadsheet counts, the header being 1; open_end:
    whether the last line has no line break, as that of a file that was cut has none.
    """

    def __init__(self, path: str, separator: str, lines: Iterable[str], quoting: bool = True):
        self.path, self.separator, self.quoting = path, separator, quoting
        self.rows = self.blank = self.spanning = self.enclosed = self.number = 0
        self.open_end = False
        self._record: list[str] = []  # the lines of the row that is being read
        self._reader = csv.reader(
            self._watch(lines), delimiter=separator, strict=True,
            quoting=csv.QUOTE_MINIMAL if quoting else csv.QUOTE_NONE,
        )  # fmt: skip
        self.columns: list[str] = []
        self._cells = self._records()
        header = next((cells for cells in self._cells if not self._is_blank(cells)), [])
        self.columns = [name.strip() for name in header]
        check_utf8(self.columns)

    def __str__(self) -> str:
        """What was read, for a log."""
        facts = ["header included", f"{self.spanning:,} rows span several lines"]
        facts += [f"{self.blank:,} blank"] if self.blank else []
        facts += ["no line break at the end"] if self.open_end else []
        facts += [f"{self.enclosed:,} with a cell in quotation marks, which are kept"] if self.enclosed else []
        name, lines = os.path.basename(self.path), self._reader.line_num
        return f"{name}: {self.rows:,} rows from {lines:,} lines ({', '.join(facts)})"

    def place(self, column: str) -> int:
        """Where a column stands; TableError where it stands twice, as one of the two would be read unasked."""
        places = [number for number, name in enumerate(self.columns) if name == column]
        if len(places) > 1:
            numbers = " and ".join(str(number + 1) for number in places)
            raise TableError(
                f"{self.path} line 1 calls columns {numbers} {column!r}: rename all but the one that is meant"
            )
        return places[0]

    def read(self, image: int | None = None, damaged: dict[int, str] | None = None) -> Iterator[list[str]]:
        """The cells of each row. image: the place of the column that holds image paths; damaged: takes the rows with
        another number of cells and no quotation mark, row -> what is wrong, which otherwise are an error.
        """
        width, record = len(self.columns), self._record
        named, doubt = False, None  # whether paths have suffixes; the first one that looks like none
        for cells in self._cells:
            if len(cells) != width:
                if self._is_blank(cells):
                    continue
                if damaged is None or any('"' in line for line in record):
                    raise self._miscounted(cells)
                damaged[self.number] = str(self._miscounted(cells))
                continue
            if not self.quoting:
                self.enclosed += any(len(cell) > 1 and cell[0] == cell[-1] == '"' for cell in cells)
            elif len(record) > 1 or ('"' in record[0] and '"' in "".join(cells)):  # all others only enclose cells
                self._check_quotes(cells, image)
            check_utf8(cells, image)
            if image is not None:
                if SUFFIX.search(cells[image]):
                    named = True
                elif self._is_blank(cells):
                    continue
                elif doubt is None and (named or self.rows < LOOKED_AT) and not self._is_image(cells[image]):
                    what = f"{cells[image][:40]!r} is no file and lacks the suffix that other paths have"
                    doubt = self._ambiguous(image, what, "put a text that holds line breaks in quotation marks")
                if named and doubt is not None:
                    raise doubt
            self.rows += 1
            yield cells
        log.info("%s", self)

    def _watch(self, lines: Iterable[str]) -> Iterator[str]:
        """The lines as they are; those of a row stay in `_record`."""
        for line in lines:
            self._record.append(line)
            if "\0" in line:
                raise TableError(
                    f"{self.path} line {self._reader.line_num + 1} holds a zero byte: the file is damaged or UTF-16; "
                    f"fetch it again, or convert it, e.g. iconv -f UTF-16LE -t UTF-8 {self.path} > new.csv"
                )
            yield line
        self.open_end = bool(self._record) and not line.endswith(("\n", "\r"))

    def _records(self) -> Iterator[list[str]]:
        """The cells of each row and blank line."""
        try:
            for cells in self._reader:
                self.number += 1
                yield cells
                self._record.clear()
        except csv.Error as error:
            number, closed = broken_cell("".join(self._record), self.separator)
            if not self.quoting:
                raise TableError(f"{self.path} line {self._line()}: {error}: is it a table?") from error
            if "limit" in str(error):
                what = f"it has more than {csv.field_size_limit():,} characters: is its quotation mark not closed?"
            elif closed:
                what = f"text follows its closing quotation mark in line {self._reader.line_num}, or it was not closed"
            else:
                what = "its quotation mark is not closed"
            raise self._ambiguous(number, what, f"close it where the text ends; {DOUBLED}") from error

    def _is_blank(self, cells: list[str]) -> bool:
        """Whether a line is blank, which is counted; spreadsheets write those of separators alone."""
        blank = not any(map(str.strip, cells)) and (len(cells) == len(self.columns) or not self._record[0].strip())
        self.blank += blank
        return blank

    def _check_quotes(self, cells: list[str], image: int | None) -> None:
        """TableError where a quotation mark seems to be missing; `_record` holds one."""
        text, at = "".join(self._record), 0
        self.spanning += len(self._record) > 1
        for number, cell in enumerate(cells):
            quoted = text.startswith('"', at)
            at += len(cell) + (cell.count('"') + 3 if quoted else 1)
            if not quoted and '"' in cell:
                if cell.endswith('"') and cell.count('"') % 2:
                    raise self._ambiguous(number, "it ends in a quotation mark that nothing opened", DOUBLED)
                if '""' in cell:
                    raise self._ambiguous(number, "it holds doubled quotation marks, but is in none itself", DOUBLED)
                if cell.lstrip().startswith('"'):
                    what = "a blank stands before its quotation mark, which then is plain text"
                    raise self._ambiguous(number, what, f"remove the blank; {DOUBLED}")
            elif quoted and len(self._record) > 1 and self._holds_rows(number, cell, image):
                what = "the quoted text goes on over line breaks and holds what looks like rows of the table"
                remedy = "close its quotation mark; if it is one text, put blanks in place of its line breaks"
                raise self._ambiguous(number, what, remedy)

    def _holds_rows(self, number: int, cell: str, image: int | None) -> bool:
        """Whether a quoted cell has swallowed rows: a line in it has an image path where a row would have it.

        The quotation mark that closed it by accident ended the same column of a later row, or the count of cells would
        not fit. So each line behind the first begins a row, and each but the last ends one.
        """
        if image is None:
            return False
        lines, width = LINE_BREAK.split(cell), len(self.columns)
        if image == number:
            return len(lines) > 1 and not self._is_file(cell)
        least, place = (number + 1, image) if image < number else (width - number, image - width)
        looked_at = lines[1:] if image < number else lines[:-1]
        split = (next(csv.reader([line], delimiter=self.separator)) for line in looked_at)
        return any(len(parts) >= least and self._is_image(parts[place]) for parts in split)

    def _is_image(self, name: str) -> bool:
        """Whether a cell has the suffix of an image, or is a file."""
        return os.path.splitext(name)[1][1:].lower() in IMAGE_SUFFIXES or self._is_file(name)

    def _is_file(self, name: str) -> bool:
        return bool(name) and any(os.path.isfile(os.path.join(base, name)) for base in ("", os.path.dirname(self.path)))

    def _line(self) -> int:
        """The line where the present row begins, from 1."""
        return self._reader.line_num - len(self._record) + 1

    def _ambiguous(self, number: int, what: str, remedy: str) -> TableError:
        name = repr(self.columns[number]) if number < len(self.columns) else f"{number + 1}"
        return self._error(f"{self.path} line {self._line()}, column {name}: {what}; {remedy}")

    def _miscounted(self, cells: list[str]) -> TableError:
        """A row with too many cells or too few."""
        line, width, sign = self._line(), len(self.columns), repr(self.separator)
        got = f"{self.path} line {line} has {len(cells)} cell{'s' * (len(cells) != 1)}, the header {width} columns"
        if len(cells) > width:
            return self._error(
                f"{got}, the last {self.columns[-1]!r}: put texts that hold {sign} in quotation marks (without a blank "
                "before the first), as csv.writer and pandas do"
            )
        return self._error(
            f"{got}: nothing stands in column {self.columns[len(cells)]!r}; complete the line if it was cut, and look "
            f"for a text with a line break that is in no quotation marks, or for another separator than {sign}"
        )

    def _error(self, message: str) -> TableError:
        """The error of a row, which may be wrong because of its quotation marks or not."""
        if not self.quoting:
            return TableError(f"{message}; quotation marks were read as plain text and enclose nothing")
        return (QuotingError if any('"' in line for line in self._record) else TableError)(message)


def broken_cell(text: str, separator: str) -> tuple[int, bool]:
    """The number of the cell in which a row ceases to be one, and whether its opening quotation mark is closed."""
    number = at = 0
    while True:
        quoted = QUOTED.match(text, at)
        if quoted and text[quoted.end() : quoted.end() + 1] in ("", separator, "\r", "\n"):
            at = quoted.end()
        elif text.startswith('"', at) or separator not in text[at:]:
            return number, quoted is not None
        else:
            at = text.index(separator, at)
        number, at = number + 1, at + 1
