"""Tables of papers on image-text retrieval, a CSV each in papers/, and results of one's own above their rows.

    python scripts/studies/papers/papers.py "PCME++ Table 2"
    prolip eval tasks --model local-dir:runs/coco-pcmepp/best --data coco:dataset_coco.json,coco --output found.json
    python scripts/studies/papers/papers.py "B/16, PCME++" --results found.json

Copied from PCME++ (Chun, ICLR 2024), VACSR, PCME (Chun et al., CVPR 2021) and source-free matching (Tian et al. 2024).
Columns have the names of our metrics. All values are percent, but rsum, a sum of six. `eccv/R@1` without a direction is
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

#: Columns that say what a row is; the others are metrics.
LABELS = ("backbone", "method", "noise", "dimensions", "negatives")
#: A table with more metrics than this has a block for each set of labels.
WIDEST = 8
ABOUT_CLIP = "from CLIP's weights"
ABOUT_SOURCE_FREE = "source-free: the paper's method; fine-tuning: on the same pseudo-pairs, all weights equal"


class Printed(NamedTuple):
    """A table. data: how the names of its test sets begin; row: (what it is, metric -> value as printed)."""

    title: str
    data: str
    note: str
    metrics: tuple[str, ...]
    rows: tuple[tuple[str, Mapping[str, str]], ...]

    def labelled(self, row: str) -> str:
        """All that a name may be a part of."""
        return f"{self.title}, {self.data}: {row}"

    def chosen(self, names: Sequence[str]) -> Printed:
        """With the rows that fit one of these names, whatever the case."""
        fits = [row for row in self.rows if any(name.lower() in self.labelled(row[0]).lower() for name in names)]
        return self._replace(rows=tuple(fits))


def read_printed(file: str, title: str, data: str, note: str = "") -> Printed:
    """A CSV of the folder papers."""
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
    """The tables with the rows that any of these is a part of; "all" is a name too.

    Raises ValueError for a name that fits no row.
    """
    if not names or "all" in names:
        return PRINTED
    for name in names:
        if not any(table.chosen([name]).rows for table in PRINTED):
            known = "; ".join(dict.fromkeys(f"{table.title}, {table.data}" for table in PRINTED))
            raise ValueError(f"no published row is called {name!r}: give a part of a method's name, or of {known}")
    return tuple(table for table in (table.chosen(names) for table in PRINTED) if table.rows)


def own_value(metrics: Mapping[str, float], name: str) -> float | None:
    """One's own figure by a printed name, in its unit; a name without a direction is the mean of both.

    What has no `coco_5k/` in its name, PMRP, is of all 5K images where other figures are.
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
    """The tables; with results only those that have a figure of one, under the results and in their columns."""
    blocks: list[str] = []
    for table in tables:
        own = rows_of(table, results or ())
        if results is None or own:
            had = [name for name in table.metrics if results is None or any(name in row for _, row in own)]
            blocks += [block(table, group, own) for group in columns_of(had)]
    return "\n\n".join(blocks)


def rows_of(table: Printed, results: Sequence[TaskResult]) -> list[tuple[str, dict[str, str]]]:
    """Results on the data of a table, with the figures that they have of it."""
    rows = []
    for title, result in zip(titles(results), results):
        if result.key.startswith(table.data):
            values = {name: own_value(result.metrics, name) for name in table.metrics}
            row = {name: f"{value:.2f}" for name, value in values.items() if value is not None}
            rows += [(f"{title}  {result.info['similarity']}", row)] if row else []
    return rows


def columns_of(metrics: Sequence[str]) -> list[list[str]]:
    """What stands beside each other: all, or where these are many the metrics of each set of labels."""
    if len(metrics) <= WIDEST:
        return [list(metrics)]
    groups: dict[str, list[str]] = {}
    for name in metrics:
        groups.setdefault(name.partition("/")[0], []).append(name)
    return list(groups.values())


def block(table: Printed, columns: Sequence[str], own: Sequence[tuple[str, Mapping[str, str]]]) -> str:
    """Title, head and rows; a dash where the paper or the result has no figure."""
    rows = [(label, [values.get(column, "-") for column in columns]) for label, values in [*own, *table.rows]]
    title = f"{table.title}, {table.data}" + (f" ({table.note})" if table.note else "")
    return "\n".join([title, *aligned(columns, rows)])


def read_results(path: str | Path) -> list[TaskResult]:
    """What `prolip eval tasks --output` wrote, without figures that are not finite."""
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
    add("--results", nargs="+", metavar="FILE", help="what prolip eval tasks --output wrote, shown above their rows")
    args = parser.parse_args(arguments)
    try:
        tables = find_printed(args.names)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
    results = args.results and [result for path in args.results for result in read_results(path)]
    print(format_printed(tables, results) or "no published row has a figure of these test sets")


if __name__ == "__main__":
    main()
