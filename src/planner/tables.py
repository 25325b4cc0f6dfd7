"""Numbers with units, and plans as tables that can be read on a terminal and pasted into a page."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

HOUR, MINUTE = 3600.0, 60.0
whole = "{:,.0f}".format


class Value(float):
    """A number, and the function that a table shows it by."""

    show: Callable[[float], str]

    def __new__(cls, number: float, show: Callable[[float], str]) -> Value:
        value = super().__new__(cls, number)
        value.show = show
        return value

    def __str__(self) -> str:
        return self.show(self)


#: What stands in the first column of a table -> the value in a plan's column, or words.
Rows = dict[str, Any]


def size(value: float) -> str:
    """Format bytes with three digits and a unit."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= factor:
            return f"{value / factor:.3g} {unit}" if value < 999.5 * factor else f"{value / factor:.0f} {unit}"
    return f"{value:.0f} B"


def span(seconds: float) -> str:
    """Format a duration with three digits and a unit."""
    if not seconds:
        return "0 s"
    for unit, factor in (("d", 24 * HOUR), ("h", HOUR), ("min", MINUTE), ("s", 1.0)):
        if seconds >= 2 * factor or (unit == "s" and seconds >= 1):
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def number(value: float) -> str:
    """Format a number: whole from 100 on, three digits below, millions and billions in words."""
    for unit, factor in (("billion", 1e9), ("million", 1e6)):
        if value >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def column(gpus: int) -> str:
    """Title of the column of so many GPUs."""
    return f"{gpus:,} GPU{'s' * (gpus > 1)}"


def table(title: str, columns: Mapping[str, Rows]) -> str:
    """Format a table; columns: title -> rows, the same in all."""
    names = next(iter(columns.values()))
    return align([[title, *columns], *([name, *(str(rows[name]) for rows in columns.values())] for name in names)])


def align(cells: Sequence[Sequence[str]]) -> str:
    """Format a pipe table; the first column to the left, the others to the right."""
    first, *others = (max(map(len, column)) for column in zip(*cells))
    rows = [[row[0].ljust(first), *(text.rjust(width) for text, width in zip(row[1:], others))] for row in cells]
    rows.insert(1, ["-" * first, *("-" * (width - 1) + ":" for width in others)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
