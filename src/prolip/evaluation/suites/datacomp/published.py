"""Published rows of the 38 tasks, and whether their printed averages follow from them.

published.csv, all percent, was transcribed from ProLIP (Chun et al., ICLR 2025): values from Table C.1, the five
averages from Tables 1 and C.2. OpenCLIP's are from docs/openclip_results.csv of mlfoundations/open_clip (commit
f862f86cd92123615a8695ce8bcb6ecc066af452). Three rows of Table C.1 are not printed in its header's order, as
their notes say; tests/prolip/evaluation/datacomp/test_datacomp_published.py has the orders and what speaks for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from prolip.evaluation.suites.datacomp.tasks import AGGREGATES, COUNTED, aggregate, read_lines

#: A printed figure: percent, the unit of its last digit, where it is printed.
Reading = tuple[float, float, str]


@dataclass(frozen=True)
class PublishedRow:
    """One model as printed.

    values: task key -> percent; printed: aggregate -> how it is printed, in one place or two; unit: of the values' last
    digit; note: what a reader should know of the reading.
    """

    model: str
    seen: str
    values: Mapping[str, float]
    printed: Mapping[str, tuple[Reading, ...]]
    unit: float
    source: str
    note: str = ""

    @property
    def label(self) -> str:
        """Model and samples seen."""
        return f"{self.model}, {self.seen}" if self.seen else self.model


class Check(NamedTuple):
    """One printed average against the mean of the row's own values.

    slack: how far rounding of the entries and of the average can move it, 0.5 unit each; explained: it does.
    """

    aggregate: str
    printed: float
    recomputed: float
    slack: float
    source: str

    @property
    def explained(self) -> bool:
        """Whether rounding explains the difference."""
        return abs(self.recomputed - self.printed) <= self.slack + 1e-9

    def __str__(self) -> str:
        return (
            f"{self.aggregate} is printed as {self.printed} ({self.source}), its values give "
            f"{self.recomputed:.2f}; rounding explains {self.slack:.3f} at most"
        )


def reproduce(row: PublishedRow) -> list[Check]:
    """Every printed average of a row, recomputed from its values."""
    means = aggregate(row.values)
    return [
        Check(name, value, means[name].value, 0.5 * (unit + row.unit), source)
        for name, readings in row.printed.items()
        for value, unit, source in readings
    ]


def published_report(rows: Sequence[PublishedRow]) -> str:
    """What follows and what does not, one line per average that does not and one per row where all do."""
    lines = []
    for row in rows:
        checks = reproduce(row)
        failed = [check for check in checks if not check.explained]
        if not failed:
            lines.append(f"{row.label}: all {len(checks)} printed averages follow from its 38 values")
        lines += [f"{row.label}: {check}" for check in failed]
    return "\n".join(lines)


def read_row(line: Mapping[str, str]) -> PublishedRow:
    """A line of published.csv: five averages with one decimal, and the one that stands beside the values with two."""
    printed: dict[str, tuple[Reading, ...]] = {
        name: ((float(line[name]), 0.1, line["averages from"]),) for name in AGGREGATES if line[name]
    }
    source = line["values from"]
    beside = (float(line["Average beside the values"]), 0.01, source)
    printed["Average"] = (*printed.get("Average", ()), beside)
    values = {task.key: float(line[task.name]) for task in COUNTED}
    return PublishedRow(line["model"], line["seen"], values, printed, 0.01, source, line["note"])


PUBLISHED: tuple[PublishedRow, ...] = tuple(map(read_row, read_lines("published.csv")))
PAPER = tuple(row for row in PUBLISHED if row.source == "ProLIP Table C.1")
OPENCLIP_ROWS = PUBLISHED[len(PAPER) :]
#: Without a choice: the paper's rows, and the CLIP of the same size, data and length of training.
DEFAULT = (*PAPER, OPENCLIP_ROWS[0])


def find_published(names: Sequence[str] | None) -> tuple[PublishedRow, ...]:
    """`DEFAULT` without names; otherwise all rows whose label has one of the names in it, whatever the case.

    "all" and "none" are names too. Raises ValueError for a name that fits no row.
    """
    if not names:
        return DEFAULT
    if "none" in names:
        return ()
    chosen: list[PublishedRow] = []
    for name in names:
        fitting = [row for row in PUBLISHED if name == "all" or name.lower() in row.label.lower()]
        if not fitting:
            raise ValueError(f"no published row is called {name!r}: there are {'; '.join(r.label for r in PUBLISHED)}")
        chosen += [row for row in fitting if row not in chosen]
    return tuple(chosen)
