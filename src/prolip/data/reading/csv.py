"""Strict reading of CSV and TSV: an open quotation mark, or a row of another width, is an error with its line."""

from __future__ import annotations

import csv
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from prolip.utils.console import Notes

log = logging.getLogger(__name__)
DOUBLED = 'write a cell with a quotation mark as "5"" nail", as csv.writer and pandas do'


def show_counts() -> None:
    """Let a command print the log's warnings and the row count of every table it reads."""
    logging.basicConfig(format="%(message)s", handlers=[Notes()])
    log.setLevel(logging.INFO)


class TableError(ValueError):
    """A table that is unreadable or ambiguous."""


class QuotingError(TableError):
    """A table with quotation marks that break the rules of CSV; they may be plain text."""


@contextmanager
def open_table(path: str, separator: str, quoting: bool = True) -> Iterator[CsvTable]:
    """Open a local UTF-8 table; TableError, in the body too, for other bytes except in file names."""
    with open(path, newline="", encoding="utf-8-sig", errors="surrogateescape") as lines:
        try:
            yield CsvTable(path, separator, lines, quoting)
        except UnicodeDecodeError as error:
            remedy = f"convert it, e.g. iconv -f LATIN1 (or UTF-16) -t UTF-8 {path} > new.csv"
            raise TableError(f"{path} is not UTF-8 ({error}): {remedy}") from error


def check_utf8(cells: list[str], but: int | None = None) -> None:
    """Raise UnicodeDecodeError for a cell with other bytes. but: the index of a cell that may have them."""
    for place, cell in enumerate(cells):
        if place != but and not cell.isascii():
            cell.encode(errors="surrogateescape").decode()


class CsvTable:
    """The non-blank rows of a table with a header. quoting: whether quotation marks enclose cells."""

    def __init__(self, path: str, separator: str, lines: Iterable[str], quoting: bool = True):
        self.path, self.separator, self.quoting = path, separator, quoting
        self.number, self._open_end = 0, False
        self._record: list[str] = []  # lines of the current row
        style: Any = csv.QUOTE_MINIMAL if quoting else csv.QUOTE_NONE
        self._reader = csv.reader(self._watch(lines), delimiter=separator, strict=True, quoting=style)
        self.columns: list[str] = []
        self._cells = self._records()
        self.columns = [name.strip() for name in next(self._cells, [])]
        check_utf8(self.columns)

    def place(self, column: str) -> int:
        """Return the index of a column; TableError for a repeated one."""
        if self.columns.count(column) > 1:
            raise TableError(f"{self.path} line 1 has several columns {column!r}: rename all but one")
        return self.columns.index(column)

    def read(self, image: int | None = None, damaged: dict[int, str] | None = None) -> Iterator[list[str]]:
        """Yield the cells of each row. image: the index of image paths; damaged: unquoted rows of other widths."""
        rows = spanning = 0
        for cells in self._cells:
            if len(cells) != len(self.columns):
                wrong = self._error(
                    f" has {len(cells)} cell{'s' * (len(cells) != 1)}, the header {len(self.columns)} columns, the "
                    f"last {self.columns[-1]!r}: put texts that hold {self.separator!r} or line breaks in quotation "
                    "marks, as csv.writer and pandas do, and complete cut lines"
                )
                if damaged is None or isinstance(wrong, QuotingError):
                    raise wrong
                damaged[self.number] = str(wrong)
                continue
            check_utf8(cells, image)
            rows, spanning = rows + 1, spanning + (len(self._record) > 1)
            yield cells
        facts = f"header included, {spanning:,} rows span several lines" + ", no line break at the end" * self._open_end
        lines = f"{rows:,} rows from {self._reader.line_num:,} lines"
        log.info("%s: %s (%s)", os.path.basename(self.path), lines, facts)

    def _watch(self, lines: Iterable[str]) -> Iterator[str]:
        """Yield the lines unchanged; those of a row stay in `_record`."""
        for line in lines:
            self._record.append(line)
            if "\0" in line:
                where = f"{self.path} line {self._reader.line_num + 1}"
                raise TableError(f"{where} has a zero byte: fetch it again, or convert it from UTF-16 to UTF-8")
            yield line
        self._open_end = bool(self._record) and not line.endswith(("\n", "\r"))

    def _records(self) -> Iterator[list[str]]:
        """Yield the cells of each row, without blank ones: spreadsheets write lines of only separators."""
        try:
            for cells in self._reader:
                self.number += 1
                if any(map(str.strip, cells)) or (self._record[0].strip() and len(cells) != len(self.columns)):
                    yield cells
                self._record.clear()
        except csv.Error as error:
            why = f": a quotation mark is not closed, or text follows the closing one; {DOUBLED}" * self.quoting
            raise self._error(f": {error}{why}") from error

    def _error(self, what: str) -> TableError:
        """Return the error of the current row, a QuotingError if its quotation marks may be the cause."""
        message = f"{self.path} line {self._reader.line_num - len(self._record) + 1}{what}"
        if not self.quoting:
            return TableError(f"{message}; quotation marks were read as plain text")
        return (QuotingError if any('"' in line for line in self._record) else TableError)(message)
