"""Tables written and damaged at random, seeded. What is promised, and asserted here:

What csv.writer writes, with any of its separators, quotings and line ends, and captions that hold quotation marks,
separators and line breaks, is read cell by cell and never refused. A table that was damaged is either refused, in one
line that names the file and the damaged row's line and says what to do (in several where the damage led to more), or
read as the sound one. (Where a quotation mark closes by accident and its row looks whole, the line is that of a row
behind it.) Only where quotation marks are gone, or the separator before one, may the others pair up by accident: then a
cell has other text.

What no reader can see is left out: letters that changed within a cell, the end of a last cell that is in no quotation
marks, whole cells at the end and whole rows that are gone, and captions of quotation marks alone.
"""

import csv
import io
import random
import re
from collections import Counter
from typing import NamedTuple

import pytest
from tiny_loaders import read_csv

from prolip.data.reading.csv import TableError, open_table
from prolip.data.reading.tables import TableColumns, TableProblems

WORDS = ["cat", "dog", "a", "nice", "screen", "of", "two", "naïve", "日本", "x\u2028y", "\x85", "5", "red;", "|", "#1"]
COLUMNS = TableColumns("filepath", "title", ("name",))


class Style(NamedTuple):
    """How a table is written."""

    separator: str
    quoting: int
    end: str
    columns: tuple[str, ...]


class Written(NamedTuple):
    """The text of each cell, header first, and what a reader is to find: path, caption and name of each row."""

    style: Style
    cells: list[list[str]]
    truth: list[tuple[str, str, str]]

    def lines(self):
        return [self.style.separator.join(row) for row in self.cells]

    def text(self, lines=None):
        return "".join(line + self.style.end for line in lines or self.lines())


def encode(style, cell):
    """A cell as csv.writer writes it among others."""
    out = io.StringIO()
    csv.writer(out, delimiter=style.separator, quoting=style.quoting).writerow([cell, "x"])
    return out.getvalue().rpartition(style.separator)[0]


def caption(rng, separator):
    """A few words with what makes quoting necessary; blank ones, and quotation marks at either end, too."""
    words = [rng.choice(WORDS) for _ in range(rng.randint(0, 6))]
    for _ in range(rng.choice([0, 0, 1, 2, 3])):
        some = ['"', '""', f"{separator} ", separator, "\n", "\r\n", "\n\n", f"\nthen{separator} more", '"hi"']
        words.insert(rng.randint(0, len(words)), rng.choice(some))
    text = rng.choice([" ", " ", ""]).join(words)
    return text if re.search(r"\w", text) else ""


def path_of(rng, number):
    """The path of an image that no other row has."""
    return f"{rng.choice(['img', 'a b', 'x;y|z,'])}/{rng.randrange(10**4)}-{number}{rng.choice(['.jpg', '.PNG'])}"


def write(rng):
    """A table of a few rows in a random style."""
    names = ["filepath", "title", "name", *rng.choice([[], ["id"], ["id", "note"]])]
    rng.shuffle(names)
    quoting = rng.choice([csv.QUOTE_MINIMAL, csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC])
    style = Style(rng.choice([",", "\t", ";", "|"]), quoting, rng.choice(["\n", "\r\n", "\r"]), tuple(names))
    rows = [
        {name: caption(rng, style.separator) for name in names} | {"filepath": path_of(rng, number)}
        for number in range(rng.randint(1, 8))
    ]
    cells = [[encode(style, cell) for cell in row] for row in ([*names], *([row[n] for n in names] for row in rows))]
    return Written(style, cells, [(row["filepath"], row["title"], row["name"]) for row in rows])


def read(path, text, separator):
    """What `read_csv` finds: path, caption and name of each row."""
    path.write_bytes(text.encode())
    found = read_csv(str(path), COLUMNS, separator)
    start = f"{path.parent}/"
    return [(row.path.removeprefix(start), row.caption, row.record["name"]) for row in found.rows]


# --- what is done to a row: (rng, table, number of the row) -> its text
def chosen_quote(rng, table, row):
    """One quotation mark is gone."""
    text = table.lines()[row]
    places = [at for at, letter in enumerate(text) if letter == '"']
    at = rng.choice(places) if places else len(text)
    return text[:at] + text[at + 1 :]


def quotes_around(rng, table, row):
    """The quotation marks around one cell are gone."""
    cells = list(table.cells[row])
    quoted = [number for number, cell in enumerate(cells) if cell.startswith('"')]
    if quoted:
        number = rng.choice(quoted)
        cells[number] = cells[number][1:-1]
    return table.style.separator.join(cells)


def all_quotes_around(rng, table, row):
    """The quotation marks around all cells of the row are gone."""
    return table.style.separator.join(cell[1:-1] if cell.startswith('"') else cell for cell in table.cells[row])


def cut(rng, table, row):
    """The row ends before its last cell, or in the midst of its quotation marks."""
    text, last = table.lines()[row], table.cells[row][-1]
    start = len(text) - len(last)
    inside = range(start + 1, len(text)) if last.startswith('"') else ()
    places = [*range(1, start), *(at for at in inside if not last[: at - start].rstrip('"') or text[at - 1] != '"')]
    return text[: rng.choice(places)]


def separator_more(rng, table, row):
    """A separator stands in a cell that is in no quotation marks, or at its end."""
    cells = list(table.cells[row])
    number = rng.randrange(len(cells))
    at = len(cells[number]) if cells[number].startswith('"') else rng.randint(0, len(cells[number]))
    cells[number] = cells[number][:at] + table.style.separator + cells[number][at:]
    return table.style.separator.join(cells)


def separator_less(rng, table, row):
    """Two cells are one."""
    cells = list(table.cells[row])
    number = rng.randrange(len(cells) - 1)
    cells[number : number + 2] = [cells[number] + rng.choice(["", " "]) + cells[number + 1]]
    return table.style.separator.join(cells)


def line_break_more(rng, table, row):
    """A line break stands in a cell that is in no quotation marks, or at its end."""
    return (
        separator_more(rng, table._replace(style=table.style._replace(separator="\0")), row)
        .replace("\0\0", "\0" + table.style.end, 1)
        .replace("\0", table.style.separator)
    )


def zero_byte(rng, table, row):
    text = table.lines()[row]
    at = rng.randint(0, len(text))
    return text[:at] + "\0" + text[at:]


DAMAGES = (
    chosen_quote,
    quotes_around,
    all_quotes_around,
    cut,
    separator_more,
    separator_less,
    line_break_more,
    zero_byte,
)
#: Damages after which quotation marks may pair up by accident.
UNQUOTED = (chosen_quote, quotes_around, all_quotes_around, separator_less)


def breaks(text):
    return len(re.findall(r"\r\n|\r|\n", text))


def stripped(rows):
    """As captions are used."""
    return [tuple(map(str.strip, row)) for row in rows]


def judge(path, table, row, damaged, unquoted=False):
    """`refused`, `right` or, where quotation marks are gone, `paired`; AssertionError for anything else. damaged: the
    text in place of that of the row."""
    lines = table.lines()
    first = 1 + sum(1 + breaks(line) for line in lines[:row])
    text = table.text([*lines[:row], damaged, *lines[row + 1 :]])
    try:
        found = read(path, text, table.style.separator)
    except TableError as error:
        reported = str(error)
        assert ("\n" not in reported or isinstance(error, TableProblems)) and "\r" not in reported, reported
        assert str(path) in reported and ("; " in reported or ": " in reported), reported
        line = int(re.search(r" line (\d+)", reported)[1])
        assert first <= line, reported
        return "refused" if line <= first + breaks(damaged) else "refused behind it"
    except ValueError as error:
        assert row == 0 and "has no column" in str(error)
        return "refused"
    if unquoted and stripped(found) != stripped(table.truth):
        return "paired by accident"
    assert stripped(found) == stripped(table.truth), text
    return "right"


def fuzz_damage(path, seed):
    rng = random.Random(f"damaged table {seed}")
    table, damage = write(rng), DAMAGES[seed % len(DAMAGES)]
    row = rng.randrange(len(table.cells))
    return f"{damage.__name__} {judge(path, table, row, damage(rng, table, row), damage in UNQUOTED)}"


def fuzz_sound(path, seed):
    rng = random.Random(f"sound table {seed}")
    table = write(rng)
    mark = rng.choice(["", "\ufeff"])
    blank = rng.random() < 0.3
    text = table.text([*table.lines(), "", " "]) if blank else table.text()
    assert read(path, mark + text, table.style.separator) == table.truth
    with open_table(str(path), table.style.separator) as again:
        list(again.read())
    spanning = sum(bool(breaks(line)) for line in table.lines()[1:])
    counted = f"{len(table.truth)} rows from {breaks(text)} lines (header included, {spanning} rows span several lines"
    assert str(again) == f"{path.name}: {counted})"


@pytest.mark.parametrize("part", range(2))
def test_sound_tables_are_read_cell_by_cell(tmp_path, part):
    for seed in range(part * 60, part * 60 + 60):
        fuzz_sound(tmp_path / "captions.csv", seed)


@pytest.mark.parametrize("part", range(4))
def test_damaged_tables_are_refused_or_read_as_they_were(tmp_path, part):
    verdicts = Counter(fuzz_damage(tmp_path / "captions.csv", seed) for seed in range(part * 64, part * 64 + 64))
    refused = Counter(verdict.split()[0] for verdict in verdicts.elements() if "refused" in verdict)
    assert refused["zero_byte"] == refused["separator_more"] == 8
    assert refused.total() > 35 and sum("behind" in verdict for verdict in verdicts.elements()) < 10
