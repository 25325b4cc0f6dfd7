"""Published rows of DataComp's 38 tasks next to your results, and a check of their printed averages.

    python scripts/studies/papers/published_datacomp.py
    python scripts/studies/papers/published_datacomp.py runs/b16/datacomp --rows 12.8B --output runs/b16/compared

published_datacomp.csv, all percent, is copied from ProLIP (Chun et al., ICLR 2025): values from Table C.1, the five
averages from Tables 1 and C.2. OpenCLIP's are from docs/openclip_results.csv of mlfoundations/open_clip (commit
f862f86cd92123615a8695ce8bcb6ecc066af452). Three rows of Table C.1 are printed in an order other than the header's, as
their notes say; tests/scripts/papers/test_published_datacomp.py has the orders and the evidence for them.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from prolip.evaluation.suites.datacomp.catalogue import AGGREGATES, COUNTED, aggregate
from prolip.evaluation.suites.datacomp.report import AVERAGE_C1, SuiteRow, our_rows
from prolip.evaluation.suites.datacomp.results import latest
from prolip.evaluation.suites.datacomp.run import save_tables, summary

#: A printed number: percent, the unit of its last digit, its source.
Reading = tuple[float, float, str]


@dataclass(frozen=True)
class PublishedRow:
    """One model as printed.

    values: task key -> percent; printed: aggregate -> its printed numbers, one or two; unit: of the last digit of the
    values; note: a remark for the reader on how the row was read.
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
        """Return model and samples seen."""
        return f"{self.model}, {self.seen}" if self.seen else self.model


class Check(NamedTuple):
    """One printed average against the mean of the row's own values.

    slack: largest effect of rounding the entries and the average, 0.5 unit each.
    """

    aggregate: str
    printed: float
    recomputed: float
    slack: float
    source: str

    @property
    def explained(self) -> bool:
        """Return whether rounding explains the difference."""
        return abs(self.recomputed - self.printed) <= self.slack + 1e-9

    def __str__(self) -> str:
        return (
            f"{self.aggregate} is printed as {self.printed} ({self.source}), its values give "
            f"{self.recomputed:.2f}; rounding explains {self.slack:.3f} at most"
        )


def reproduce(row: PublishedRow) -> list[Check]:
    """Recompute every printed average of a row from its values."""
    means = aggregate(row.values)
    return [
        Check(name, value, means[name].value, 0.5 * (unit + row.unit), source)
        for name, readings in row.printed.items()
        for value, unit, source in readings
    ]


def published_report(rows: Sequence[PublishedRow]) -> str:
    """Report the averages: a line for each that its values do not give, and a line for each row without such."""
    lines = []
    for row in rows:
        checks = reproduce(row)
        failed = [check for check in checks if not check.explained]
        if not failed:
            lines.append(f"{row.label}: all {len(checks)} printed averages follow from its 38 values")
        lines += [f"{row.label}: {check}" for check in failed]
    return "\n".join(lines)


def read_row(line: Mapping[str, str]) -> PublishedRow:
    """Read a line of the CSV: five averages with one decimal, and the one next to the values with two."""
    printed: dict[str, tuple[Reading, ...]] = {
        name: ((float(line[name]), 0.1, line["averages from"]),) for name in AGGREGATES if line[name]
    }
    source = line["values from"]
    beside = (float(line["Average next to the values"]), 0.01, source)
    printed["Average"] = (*printed.get("Average", ()), beside)
    values = {task.key: float(line[task.name]) for task in COUNTED}
    return PublishedRow(line["model"], line["seen"], values, printed, 0.01, source, line["note"])


with open(Path(__file__).with_suffix(".csv"), encoding="utf-8", newline="") as _file:
    PUBLISHED = tuple(map(read_row, csv.DictReader(_file)))
PAPER = tuple(row for row in PUBLISHED if row.source == "ProLIP Table C.1")
OPENCLIP_ROWS = PUBLISHED[len(PAPER) :]
#: Default rows: the paper's, and the CLIP of the same size, data and length of training.
DEFAULT = (*PAPER, OPENCLIP_ROWS[0])


def find_published(names: Sequence[str] | None) -> tuple[PublishedRow, ...]:
    """Return the rows whose label contains one of the names, ignoring case, or "all"; without names, `DEFAULT`.

    Raises ValueError for a name that no row contains.
    """
    if not names:
        return DEFAULT
    chosen: dict[str, PublishedRow] = {}
    for name in names:
        fitting = {row.label: row for row in PUBLISHED if name == "all" or name.lower() in row.label.lower()}
        if not fitting:
            raise ValueError(f"no published row contains {name!r}. Give one of {'; '.join(r.label for r in PUBLISHED)}")
        chosen |= fitting
    return tuple(chosen.values())


def published_row(row: PublishedRow) -> SuiteRow:
    """Return a published row with its printed averages. A note names those that its values do not give."""
    averages = {name: readings[0][0] for name, readings in row.printed.items()}
    averages |= {name: mean.value for name, mean in aggregate(row.values).items() if name not in averages}
    averages[AVERAGE_C1] = row.printed["Average"][-1][0]
    notes = [f"{row.label}: {row.note} ({row.source})."] if row.note else []
    notes += [f"{row.label}: {check}." for check in reproduce(row) if not check.explained]
    return SuiteRow(row.label, row.values, averages, "published", notes=tuple(notes))


def difference(row: SuiteRow, against: SuiteRow) -> SuiteRow:
    """Return row - against, in percentage points, for the values that both have."""
    values = {key: row.values[key] - against.values[key] for key in row.values if key in against.values}
    averages = {key: row.averages[key] - against.averages[key] for key in row.averages if key in against.averages}
    marked = row.marked & (values.keys() | averages.keys())
    return SuiteRow(row.label, values, averages, "difference", marked, against=against.label)


def compare(ours: Sequence[SuiteRow], published: Sequence[PublishedRow]) -> list[SuiteRow]:
    """Return published rows, our rows, and each of ours minus each published one."""
    others = [published_row(row) for row in published]
    return [*others, *ours, *(difference(row, other) for row in ours for other in others)]


def main(words: Sequence[str] | None = None) -> None:
    """Print the published rows, or write `tables.*` that compare the results of some folders with them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", help="--output folders of prolip eval datacomp, one per model")
    parser.add_argument("--rows", nargs="+", metavar="NAME", help="parts of the names of published rows, or all")
    parser.add_argument("--output", metavar="FOLDER", default="datacomp", help="folder for tables.*")
    args = parser.parse_args(words)
    if not args.folders:
        print(published_report(find_published(args.rows or ["all"])))
        return
    rows = compare(our_rows(latest(args.folders)), find_published(args.rows))
    save_tables(rows, args.output)
    print(f"{summary(rows)}\ntables: {args.output}")


if __name__ == "__main__":
    main()
