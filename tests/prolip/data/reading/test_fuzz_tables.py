"""Tables written and damaged at random, seeded.

What csv.writer writes is read cell by cell. A damaged table is refused in a line that names the file and the damaged
row's line (or a later row's, where a quotation mark closes by accident), or it is read as the sound one. Only where
quotation marks are gone, or the separator before one, may the others pair up by accident: a cell has other text then.
"""

import csv
import io
import random
import re
from collections import Counter
from typing import NamedTuple

import pytest
from tiny_loaders import read_csv

from prolip.data.reading.csv import TableError
from prolip.data.reading.tables import TableColumns, TableProblems

WORDS = ["cat", "dog", "a", "nice", "screen", "of", "two", "naïve", "日本", "x\u2028y", "\x85", "5", "red;", "|", "#1"]
COLUMNS = TableColumns("filepath", "title", ("name",))


class Style(NamedTuple):
    """The writing style of a table."""

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
    rows = [{name: caption(rng, style.separator) for name in names} for _ in range(rng.randint(1, 8))]
    for number, row in enumerate(rows):
        row["filepath"] = path_of(rng, number)
    cells = [[encode(style, cell) for cell in row] for row in ([*names], *([row[n] for n in names] for row in rows))]
    return Written(style, cells, [(row["filepath"], row["title"], row["name"]) for row in rows])


def read(path, text, separator):
    """Return the result of `read_csv`: path, caption and name of each row."""
    path.write_bytes(text.encode())
    found = read_csv(str(path), COLUMNS, separator)
    start = f"{path.parent}/"
    return [(row.path.removeprefix(start), row.caption, row.record["name"]) for row in found.rows]


DAMAGES = ("quote less", "quotes less", "cut", "separator more", "separator less", "line break more", "zero byte")
#: Damages after which quotation marks may pair up by accident.
UNQUOTED = ("quote less", "quotes less", "separator less")


def damage(kind, rng, cells, style):
    """The text of a row, given as its cells are written."""
    text, last = style.separator.join(cells), cells[-1]
    places = [at for at, letter in enumerate(text) if letter == '"'] or [len(text)]
    at = rng.choice(places) if kind == "quote less" else rng.randint(0, len(text))
    if kind in ("quote less", "zero byte"):
        return text[:at] + "\0" * (kind == "zero byte") + text[at + (kind == "quote less") :]
    if kind == "quotes less":  # around one cell, or all
        quoted = [number for number, cell in enumerate(cells) if cell.startswith('"')]
        chosen = quoted if rng.random() < 0.5 else quoted and [rng.choice(quoted)]
        return style.separator.join(cell[1:-1] if n in chosen else cell for n, cell in enumerate(cells))
    if kind == "cut":  # before the last cell, or in the midst of its quotation marks
        start = len(text) - len(last)
        inside = range(start + 1, len(text)) if last.startswith('"') else ()
        before = [at for at in inside if not last[: at - start].rstrip('"') or text[at - 1] != '"']
        return text[: rng.choice([*range(1, start), *before])]
    if kind == "separator less":  # two cells are one
        number = rng.randrange(len(cells) - 1)
        one = cells[number] + rng.choice(["", " "]) + cells[number + 1]
        return style.separator.join([*cells[:number], one, *cells[number + 2 :]])
    number = rng.randrange(len(cells))  # something more, outside of quotation marks
    at = len(cells[number]) if cells[number].startswith('"') else rng.randint(0, len(cells[number]))
    more = style.separator if kind == "separator more" else style.end
    one = cells[number][:at] + more + cells[number][at:]
    return style.separator.join([*cells[:number], one, *cells[number + 1 :]])


def breaks(text):
    return len(re.findall(r"\r\n|\r|\n", text))


def stripped(rows):
    """Return the rows with captions stripped, as they are used."""
    return [tuple(map(str.strip, row)) for row in rows]


def judge(path, table, row, damaged, unquoted):
    """Return whether a table was refused; AssertionError for an unexpected result. damaged: the text of a row."""
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
        return "refused" if line <= first + breaks(damaged) else "refused after it"
    except ValueError as error:
        assert row == 0 and "has no column" in str(error)
        return "refused"
    assert unquoted or stripped(found) == stripped(table.truth), text
    return "read"


def test_sound_tables_are_read_cell_by_cell(tmp_path, caplog):
    path = tmp_path / "captions.csv"
    caplog.set_level("INFO")
    for seed in range(80):
        rng = random.Random(f"sound table {seed}")
        table = write(rng)
        mark = rng.choice(["", "\ufeff"])
        text = table.text([*table.lines(), "", " "] if rng.random() < 0.3 else None)
        assert read(path, mark + text, table.style.separator) == table.truth
        spanning = sum(bool(breaks(line)) for line in table.lines()[1:])
        lines = f"{len(table.truth)} rows from {breaks(text)} lines"
        assert f"captions.csv: {lines} (header included, {spanning} rows span several lines)" in caplog.messages
        caplog.clear()


@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_tables_are_refused_or_read_as_they_were(tmp_path, kind):
    verdicts = Counter()
    for seed in range(32):
        rng = random.Random(f"damaged table {kind} {seed}")
        table = write(rng)
        row = rng.randrange(len(table.cells))
        text = damage(kind, rng, list(table.cells[row]), table.style)
        verdicts[judge(tmp_path / "captions.csv", table, row, text, kind in UNQUOTED)] += 1
    assert kind not in ("zero byte", "separator more") or not verdicts["read"]
    assert verdicts["refused"] > 8 and verdicts["refused after it"] < 8
