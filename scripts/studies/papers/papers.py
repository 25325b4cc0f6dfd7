"""Tables of papers on image-text retrieval, a CSV each in papers/, with your results above their rows.

    python scripts/studies/papers/papers.py "PCME++ Table 2"
    prolip eval tasks --model local-dir:runs/coco-pcmepp/best --data coco:dataset_coco.json,coco --output found.json
    python scripts/studies/papers/papers.py "B/16, PCME++" --results found.json

Copied from PCME++ (Chun, ICLR 2024), VACSR, PCME (Chun et al., CVPR 2021) and source-free matching (Tian et al. 2024).
Columns have the names of our metrics. Values are percent, except rsum, a sum of six. `eccv/R@1` without a direction is
the mean of both.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from prolip.evaluation.evaluate import TaskResult
from prolip.evaluation.table import aligned, titles

#: Columns that describe a row; the others are metrics.
LABELS = ("backbone", "method", "noise", "dimensions", "negatives")
#: A table with more metrics than this has a block for each set of labels.
WIDEST = 8
ABOUT_CLIP = "from CLIP's weights"
ABOUT_SOURCE_FREE = "source-free: the paper's method; fine-tuning: on the same pseudo-pairs, all weights equal"


class Printed(NamedTuple):
    """A table. data: prefix of the names of its test sets; row: (description, metric -> value as printed)."""

    title: str
    data: str
    note: str
    metrics: tuple[str, ...]
    rows: tuple[tuple[str, Mapping[str, str]], ...]

    def labelled(self, row: str) -> str:
        """Return the text in which names are searched."""
        return f"{self.title}, {self.data}: {row}"

    def chosen(self, names: Sequence[str]) -> Printed:
        """Return the table with the rows that contain one of these names, ignoring case."""
        fits = [row for row in self.rows if any(name.lower() in self.labelled(row[0]).lower() for name in names)]
        return self._replace(rows=tuple(fits))


def read_printed(file: str, title: str, data: str, note: str = "") -> Printed:
    """Read a CSV of the folder papers."""
    with open(Path(__file__).parent / "tables" / file, encoding="utf-8", newline="") as opened:
        lines = list(csv.DictReader(opened))
    metrics = tuple(name for name in lines[0] if name not in LABELS)

    def words(line: Mapping[str, str]) -> str:
        noise = f"{line['noise']}% noise" if "noise" in line else ""
        parts = (line.get("backbone", ""), line["method"], line.get("dimensions", ""), noise)
        negatives = f"{line['negatives']} negatives" if "negatives" in line else ""
        return ", ".join(filter(None, (*parts, negatives)))

    rows = tuple((words(line), {name: line[name] for name in metrics if line[name]}) for line in lines)
    return Printed(title, data, note, metrics, rows)


PRINTED: tuple[Printed, ...] = (
    read_printed("pcmepp-1.csv", "PCME++ Table 1", "coco", f"{ABOUT_CLIP}; means of three runs"),
    read_printed("pcmepp-2.csv", "PCME++ Table 2", "coco", f"{ABOUT_CLIP}; captions shuffled"),
    read_printed("pcmepp-c8-c11.csv", "PCME++ Tables C.8 to C.11", "coco", f"{ABOUT_CLIP}; means of three runs"),
    read_printed("vacsr-1-2.csv", "VACSR Tables 1 and 2", "coco", f"{ABOUT_CLIP}; the others' are PCME++'s"),
    read_printed("vacsr-3.csv", "VACSR Table 3", "coco", f"{ABOUT_CLIP}; captions shuffled"),
    read_printed("vacsr-7.csv", "VACSR Table 7", "coco", ABOUT_CLIP),
    read_printed("pcme-e4-e5.csv", "PCME Tables E.4 and E.5", "coco", "ResNet-152 and GRU"),
    read_printed("pcme-e2.csv", "PCME Table E.2", "cub", "50 unseen classes (--split unseen); ResNet-50 and GRU"),
    read_printed("source-free-1-coco.csv", "Source-free Table I from Flickr30k", "coco", ABOUT_SOURCE_FREE),
    read_printed("source-free-1-flickr.csv", "Source-free Table I from IAPR TC-12", "flickr", ABOUT_SOURCE_FREE),
    read_printed("source-free-2-coco.csv", "Source-free Table II", "coco", ABOUT_SOURCE_FREE),
    read_printed("source-free-2-flickr.csv", "Source-free Table II", "flickr", ABOUT_SOURCE_FREE),
)


def find_printed(names: Sequence[str]) -> tuple[Printed, ...]:
    """Return the tables with the rows that contain any of these names; "all" means every row.

    Raises ValueError for a name that no row contains.
    """
    if not names or "all" in names:
        return PRINTED
    for name in names:
        if not any(table.chosen([name]).rows for table in PRINTED):
            known = "; ".join(dict.fromkeys(f"{table.title}, {table.data}" for table in PRINTED))
            raise ValueError(f"no published row contains {name!r}. Give a part of a method's name, or of {known}")
    return tuple(table for table in (table.chosen(names) for table in PRINTED) if table.rows)


def own_value(metrics: Mapping[str, float], name: str) -> float | None:
    """Return your metric by its printed name, in the printed unit; without a direction, the mean of both.

    PMRP, which has no `coco_5k/` in its name, refers to all 5K images if other metrics do.
    """
    value = metrics.get(name)
    if value is None and "coco_5k/i2t/R@1" in metrics and name.startswith("coco_5k/"):
        value = metrics.get(name.removeprefix("coco_5k/"))
    if value is None:
        labels, _, figure = name.rpartition("/")
        ways = [metrics[key] for key in (f"{labels}/{way}/{figure}" for way in ("i2t", "t2i")) if key in metrics]
        value = fmean(ways) if len(ways) == 2 else None
    if value is None or name.endswith("rsum"):
        return value
    return 100 * value


def format_printed(tables: Sequence[Printed], results: Sequence[TaskResult] | None = None) -> str:
    """Format the tables; with results, only tables that share a metric with one, below the results."""
    blocks: list[str] = []
    for table in tables:
        own = rows_of(table, results or ())
        if results is None or own:
            had = [name for name in table.metrics if results is None or any(name in row for _, row in own)]
            blocks += [block(table, group, own) for group in columns_of(had)]
    return "\n\n".join(blocks)


def rows_of(table: Printed, results: Sequence[TaskResult]) -> list[tuple[str, dict[str, str]]]:
    """Return the results on the data of a table, with the metrics they share with it."""
    rows = []
    for title, result in zip(titles(results), results):
        if result.key.startswith(table.data):
            values = {name: own_value(result.metrics, name) for name in table.metrics}
            row = {name: f"{value:.2f}" for name, value in values.items() if value is not None}
            rows += [(f"{title}  {result.info['similarity']}", row)] if row else []
    return rows


def columns_of(metrics: Sequence[str]) -> list[list[str]]:
    """Group the columns: all in one group, or one group per set of labels if there are many."""
    if len(metrics) <= WIDEST:
        return [list(metrics)]
    groups: dict[str, list[str]] = {}
    for name in metrics:
        groups.setdefault(name.partition("/")[0], []).append(name)
    return list(groups.values())


def block(table: Printed, columns: Sequence[str], own: Sequence[tuple[str, Mapping[str, str]]]) -> str:
    """Format title, head and rows, with a dash if the paper or the result lacks a metric."""
    rows = [(label, [values.get(column, "-") for column in columns]) for label, values in [*own, *table.rows]]
    title = f"{table.title}, {table.data}" + (f" ({table.note})" if table.note else "")
    return "\n".join([title, *aligned(columns, rows)])


def read_results(path: str | Path) -> list[TaskResult]:
    """Read a file of `prolip eval tasks --output`, without non-finite metrics."""
    return [
        TaskResult(
            line["key"],
            {name: value for name, value in line["metrics"].items() if value is not None},
            line["main_metric"],
            line["info"],
        )
        for line in json.loads(Path(path).read_text(encoding="utf-8"))
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="parts of a table's, a backbone's or a method's name (default: all)")
    add("--results", nargs="+", metavar="FILE", help="files of prolip eval tasks --output, shown above the rows")
    args = parser.parse_args(arguments)
    try:
        tables = find_printed(args.names)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
    results = args.results and [result for path in args.results for result in read_results(path)]
    print(format_printed(tables, results) or "no published row has a metric of these test sets")


if __name__ == "__main__":
    main()
