"""Numbers with units, and plans as tables for terminals and Markdown pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

HOUR, MINUTE = 3600.0, 60.0
Rows = dict[str, Any]  # first column of a table -> value in a plan's column, or words
whole = "{:,.0f}".format


class Value(float):
    """A number with its format in tables."""

    show: Callable[[float], str]

    def __new__(cls, number: float, show: Callable[[float], str]) -> Value:
        value = super().__new__(cls, number)
        value.show = show
        return value

    def __str__(self) -> str:
        return self.show(self)


def in_units(*units: tuple[str, float]) -> Callable[[float], str]:
    """Return a function that formats a number with three digits, in the first unit that is not larger."""

    def show(value: float) -> str:
        unit, factor = next((unit for unit in units if value >= unit[1]), units[-1])
        return f"{float(f'{value / factor:.3g}'):g} {unit}"

    return show


size = in_units(("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))
span = in_units(("d", 24 * HOUR), ("h", HOUR), ("min", MINUTE), ("s", 1.0), ("ms", 1e-3), ("us", 1e-6))
many = in_units(("billion", 1e9), ("million", 1e6))


def number(value: float) -> str:
    """Format a number: an integer from 100 on, three digits below, millions and billions in words."""
    return many(value) if value >= 1e6 else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def column(gpus: int) -> str:
    """Return the title of the column of `gpus` GPUs."""
    return f"{gpus:,} GPU{'s' * (gpus > 1)}"


def table(title: str, columns: Mapping[str, Rows]) -> str:
    """Format a table. columns: title -> rows, with the same names in all."""
    names = next(iter(columns.values()))
    return align([[title, *columns], *([name, *(str(rows[name]) for rows in columns.values())] for name in names)])


def align(cells: Sequence[Sequence[str]]) -> str:
    """Format a pipe table; aligns the first column left, the others right."""
    first, *others = (max(map(len, column)) for column in zip(*cells))
    rows = [[row[0].ljust(first), *(text.rjust(width) for text, width in zip(row[1:], others))] for row in cells]
    rows.insert(1, ["-" * first, *("-" * (width - 1) + ":" for width in others)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
