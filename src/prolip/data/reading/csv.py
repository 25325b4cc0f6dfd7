"""CSV and TSV files read strictly: an open quotation mark, or a row of another width, is an error that names its line.

Output of csv.writer and pandas is always read, line breaks and doubled quotation marks in quoted cells included. Rows
that a stray quotation mark joins to one cell show in the log's count of rows that span several lines.
"""

from __future__ import annotations

import csv
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

log = logging.getLogger(__name__)
DOUBLED = 'write a cell with a quotation mark as "5"" nail", as csv.writer and pandas do'


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
    """A local table in UTF-8, with or without a byte order mark; TableError, in the body too, for other bytes.

    Paths of images alone may hold other bytes, as names of files do. quoting: see `Table`.
    """
    with open(path, newline="", encoding="utf-8-sig", errors="surrogateescape") as lines:
        try:
            yield Table(path, separator, lines, quoting)
        except UnicodeDecodeError as error:
            with open(path, "rb") as file:
                coding = "UTF-16" if file.read(2) in (b"\xff\xfe", b"\xfe\xff") else "LATIN1"
            remedy = f"convert it, e.g. iconv -f {coding} -t UTF-8 {path} > new.csv"
            raise TableError(f"{path} is no UTF-8 ({error}): {remedy}") from error


def check_utf8(cells: list[str], but: int | None = None) -> None:
    """UnicodeDecodeError for a cell with other bytes. but: the place of one that may hold them."""
    for place, cell in enumerate(cells):
        if place != but and not cell.isascii():
            cell.encode(errors="surrogateescape").decode()


class Table:
    """The rows of a table whose first row names the columns; blank lines are passed over.

    quoting: whether quotation marks enclose cells, or are plain text as in tables that were written without a library.
    number: the present row as a spreadsheet counts, the header being 1.
    """

    def __init__(self, path: str, separator: str, lines: Iterable[str], quoting: bool = True):
        self.path, self.separator, self.quoting = path, separator, quoting
        self.rows = self.spanning = self.number = 0
        self.open_end = False
        self._record: list[str] = []  # the lines of the row that is being read
        style: Any = csv.QUOTE_MINIMAL if quoting else csv.QUOTE_NONE
        self._reader = csv.reader(self._watch(lines), delimiter=separator, strict=True, quoting=style)
        self.columns: list[str] = []
        self._cells = self._records()
        self.columns = [name.strip() for name in next(self._cells, [])]
        check_utf8(self.columns)

    def __str__(self) -> str:
        """The counts for a log."""
        facts = ["header included", f"{self.spanning:,} rows span several lines"]
        facts += ["no line break at the end"] if self.open_end else []
        name, lines = os.path.basename(self.path), self._reader.line_num
        return f"{name}: {self.rows:,} rows from {lines:,} lines ({', '.join(facts)})"

    def place(self, column: str) -> int:
        """The place of a column; TableError for one that is there twice."""
        places = [number for number, name in enumerate(self.columns) if name == column]
        if len(places) > 1:
            numbers = " and ".join(str(number + 1) for number in places)
            what = f"{self.path} line 1 calls columns {numbers} {column!r}"
            raise TableError(f"{what}: rename all but the one that is meant")
        return places[0]

    def read(self, image: int | None = None, damaged: dict[int, str] | None = None) -> Iterator[list[str]]:
        """The cells of each row. image: the place of the column that holds image paths; damaged: takes the rows with
        another number of cells and no quotation mark, row -> what is wrong, which otherwise are an error.
        """
        for cells in self._cells:
            if len(cells) != len(self.columns):
                wrong = self._miscounted(cells)
                if damaged is None or isinstance(wrong, QuotingError):
                    raise wrong
                damaged[self.number] = str(wrong)
                continue
            check_utf8(cells, image)
            self.rows += 1
            self.spanning += len(self._record) > 1
            yield cells
        log.info("%s", self)

    def _watch(self, lines: Iterable[str]) -> Iterator[str]:
        """The lines as they are; those of a row stay in `_record`."""
        for line in lines:
            self._record.append(line)
            if "\0" in line:
                where = f"{self.path} line {self._reader.line_num + 1}"
                raise TableError(f"{where} holds a zero byte: fetch it again, or convert it from UTF-16 to UTF-8")
            yield line
        self.open_end = bool(self._record) and not line.endswith(("\n", "\r"))

    def _records(self) -> Iterator[list[str]]:
        """The cells of each row, without blank ones: spreadsheets write lines of separators alone."""
        try:
            for cells in self._reader:
                self.number += 1
                if any(map(str.strip, cells)) or (self._record[0].strip() and len(cells) != len(self.columns)):
                    yield cells
                self._record.clear()
        except csv.Error as error:
            why = f": a quotation mark is not closed, or text follows the closing one; {DOUBLED}" * self.quoting
            raise self._error(f"{self.path} line {self._line()}: {error}{why}") from error

    def _line(self) -> int:
        """The line where the present row begins, from 1."""
        return self._reader.line_num - len(self._record) + 1

    def _miscounted(self, cells: list[str]) -> TableError:
        """A row with too many cells or too few."""
        count, sign = f"{len(cells)} cell{'s' * (len(cells) != 1)}", repr(self.separator)
        return self._error(
            f"{self.path} line {self._line()} has {count}, the header {len(self.columns)} columns, the last "
            f"{self.columns[-1]!r}: put texts that hold {sign} or line breaks in quotation marks, as csv.writer and "
            "pandas do, and complete a line that was cut"
        )

    def _error(self, message: str) -> TableError:
        """The error of a row; a QuotingError if its quotation marks may be the cause."""
        if not self.quoting:
            return TableError(f"{message}; quotation marks were read as plain text and enclose nothing")
        return (QuotingError if any('"' in line for line in self._record) else TableError)(message)
