"""Results in the layout of the paper's Tables 1 and C.1, published rows beside them, and the differences.

An average over a set that is not complete is no average: it is left out and a note says what is missing. A task that
was measured on other images than the published figures, or on fewer, is marked with a star, and so is its average.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from prolip.evaluation.suites.datacomp.published import PublishedRow, reproduce
from prolip.evaluation.suites.datacomp.store import Identity, is_complete, main_value
from prolip.evaluation.suites.datacomp.tasks import AGGREGATES, BY_KEY, COUNTED, TASKS, aggregate
from prolip.evaluation.task import TaskResult

#: Tasks in the upper half of Table C.1.
FIRST_BLOCK = 20
#: The average as Table C.1 prints it, which for one row is another than in Table 1.
AVERAGE_C1 = "Average, C.1"
FACE_COLUMNS = {
    "acc_race_avg": "Race",
    "acc_gender_avg": "Gender",
    "acc_age_avg": "Age",
    "acc_gender_x_wg": "Gender, worst race x gender",
    "toxicity_crime_max": "Crime, highest race",
    "toxicity_nonhuman_max": "Non-human, highest race",
}
#: Where a kind of task has its figures of refusal, and whose trace is the query's.
QUERIES = {
    "classification": (("refusal", "image"),),
    "faces": (("refusal", "image"),),
    "association": (("refusal", "text"),),
    "retrieval": (("refusal/i2t", "image"), ("refusal/t2i", "text")),
}
UNCERTAINTY = {
    "score/error": "Error",
    "{}/aurc": "AURC",
    "{}/aurc_gain": "Gain",
    "{}/spearman": "Spearman",
    "{}/auroc": "AUROC",
    "{}/error_decile1": "Error, surest tenth",
    "{}/error_decile10": "Error, least sure tenth",
    "score/aurc": "AURC by score",
}
#: How well match probabilities are kept: a small ECE of all pairs says little without the other two.
MATCHES = {
    "calibration/match/ece": "ECE of matches",
    "calibration/match/base_rate": "Base rate",
    "calibration/match/probability_over_base_rate": "Probability / base rate",
}


@dataclass(frozen=True)
class Row:
    """One line of a table: a model, or one of ours minus a published one.

    kind: ours (measured here), published or difference; values, averages: percent by task key and by aggregate; marked:
    keys and aggregates with a star; notes: sentences below the table; results: everything measured, by task key;
    against: of a difference, the label of the published row.
    """

    label: str
    values: Mapping[str, float]
    averages: Mapping[str, float]
    kind: Literal["ours", "published", "difference"]
    marked: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()
    results: Mapping[str, TaskResult] = field(default_factory=dict)
    against: str = ""

    @property
    def numbers(self) -> dict[str, float]:
        """Values and averages."""
        return {**self.values, **self.averages}

    @property
    def faces(self) -> dict[str, dict[str, float]]:
        """The metrics of the face sets."""
        return {key: r.metrics for key, r in self.results.items() if BY_KEY[key].kind == "faces"}


class Cell(NamedTuple):
    """A number of a table, None where there is none."""

    value: float | None
    marked: bool = False
    difference: bool = False


class Grid(NamedTuple):
    """A table ready to be written: header, rows of a label and cells, and how many decimals."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Cell, ...]], ...]
    decimals: int


@dataclass(frozen=True)
class Report:
    """Our rows and the published ones."""

    ours: tuple[Row, ...]
    published: tuple[Row, ...]

    @property
    def differences(self) -> list[Row]:
        """Every row of ours against every published one."""
        return [difference(row, other) for row in self.ours for other in self.published]

    @property
    def notes(self) -> tuple[str, ...]:
        """Of all rows, each once."""
        return tuple(dict.fromkeys(note for row in (*self.ours, *self.published) for note in row.notes))


def our_row(label: str, results: Mapping[str, TaskResult]) -> Row:
    """The row of a model from its finished tasks."""
    mains = {key: main_value(result) for key, result in results.items()}
    values = {key: 100 * value for key, value in mains.items() if value is not None and math.isfinite(value)}
    marked = {key for key, result in results.items() if not is_complete(result)}
    averages: dict[str, float] = {}
    notes: list[str] = []
    for name, mean in aggregate(values).items():
        if not mean.missing:
            names = {name, AVERAGE_C1} if name == "Average" else {name}
            averages |= dict.fromkeys(names, mean.value)
            marked |= names if marked & set(AGGREGATES[name]) else set()
        else:
            there = len(AGGREGATES[name]) - len(mean.missing)
            which = ", ".join(BY_KEY[key].name for key in mean.missing[:5]) + (" ..." if len(mean.missing) > 5 else "")
            notes.append(f"{label}: no {name}, {there} of {len(AGGREGATES[name])} tasks are there; missing: {which}.")
    without = results["wilds/fmow"].metrics.get("acc_worst_region_without_other") if "wilds/fmow" in results else None
    if without is not None:
        notes.append(
            f"{label}: FMoW is {100 * without:.2f} without the region Other, 4 of its 22,108 images; the "
            "table's figure holds it, as published ones do."
        )
    notes += [f"* {label}: {measured_on(results[task.key])}." for task in TASKS if task.key in marked]
    return Row(label, values, averages, "ours", frozenset(marked), tuple(notes), results)


def measured_on(result: TaskResult) -> str:
    """Of a result that is not complete: on what it was measured, and what the published figures were."""
    task, info = BY_KEY[result.key], result.info
    unit = "instances" if task.kind == "association" else "images"
    got, wanted = f"{info.get('size', 'an unknown number of')} {unit}", f"{task.size} {unit}"
    if info.get("classes", task.classes) != task.classes:
        got, wanted = f"{got} of {info['classes']} classes", f"{wanted} of {task.classes}"
    damaged = ", ".join(f"{kind} {count}" for kind, count in info.get("damaged", {}).get("kinds", {}).items())
    return f"{task.name} on {got} instead of {wanted}" + (f"; left out: {damaged}" if damaged else "")


def published_row(row: PublishedRow) -> Row:
    """A published row; averages are the printed ones, and a note says which of them its values do not give."""
    averages = {name: readings[0][0] for name, readings in row.printed.items()}
    means = aggregate(row.values)
    averages |= {name: mean.value for name, mean in means.items() if name not in averages}
    averages[AVERAGE_C1] = row.printed["Average"][-1][0]
    notes = [f"{row.label}: {row.note} ({row.source})."] if row.note else []
    notes += [f"{row.label}: {check}." for check in reproduce(row) if not check.explained]
    return Row(row.label, row.values, averages, "published", notes=tuple(notes))


def build_report(
    results: Mapping[Identity, Mapping[str, TaskResult]], published: Iterable[PublishedRow] = ()
) -> Report:
    """The rows of `store.latest` and the published ones; models of one name are told apart by their fingerprints."""
    labels = Counter(identity.label for identity in results)
    ours = []
    for identity, of_model in results.items():
        twice = labels[identity.label] > 1
        label = f"{identity.label[:-1]}, fingerprint {identity.fingerprint[:8]})" if twice else identity.label
        ours.append(our_row(label, of_model))
    return Report(tuple(ours), tuple(published_row(row) for row in published))


def difference(row: Row, against: Row) -> Row:
    """row - against, in points of percent, where both have a value."""
    values = {key: row.values[key] - against.values[key] for key in row.values if key in against.values}
    averages = {key: row.averages[key] - against.averages[key] for key in row.averages if key in against.averages}
    marked = row.marked & (values.keys() | averages.keys())
    return Row(row.label, values, averages, "difference", marked, against=against.label)


def table_1(report: Report) -> Grid:
    """The five averages, as in the paper's Table 1."""
    names = tuple(AGGREGATES)
    return _grid("Zero-shot results (ProLIP Table 1)", names, names, report, 1)


def table_c1(report: Report) -> tuple[Grid, Grid]:
    """All 38 tasks in the two blocks of Table C.1, the average last."""
    first, second = COUNTED[:FIRST_BLOCK], COUNTED[FIRST_BLOCK:]
    title = "Zero-shot results of all 38 tasks (ProLIP Table C.1)"
    header, keys = [*(task.name for task in second), "Average"], [*(task.key for task in second), AVERAGE_C1]
    return (
        _grid(f"{title}, 1 of 2", [task.name for task in first], [task.key for task in first], report, 2),
        _grid(f"{title}, 2 of 2", header, keys, report, 2),
    )


def faces_table(report: Report) -> Grid:
    """FairFace and UTKFace, which count in no average; shares in percent, of the toxic prompts lower is better."""
    rows = []
    for row in report.ours:
        for key, metrics in row.faces.items():
            star = key in row.marked
            cells = (Cell(100 * metrics[name], star) if name in metrics else Cell(None) for name in FACE_COLUMNS)
            rows.append((f"{row.label}, {BY_KEY[key].name}", tuple(cells)))
    return Grid("Faces (CLIP section 7.1)", tuple(FACE_COLUMNS.values()), tuple(rows), 2)


def uncertainty_table(report: Report) -> Grid:
    """What the traces are worth, task by task: each query refused by its own trace, or by its score.

    Of classes and faces the query is an image, of retrieval an image (i2t) or a text (t2i), of WinoGAViL a cue. A tenth
    is a decile of the query's trace. R-AUROC, where images have classes: does the trace tell that the nearest image is
    of another one?
    """
    rows = []
    for row in report.ours:
        for task in TASKS:
            if task.key not in row.results:
                continue
            m, info = row.results[task.key].metrics, row.results[task.key].info
            for prefix, own in QUERIES[task.kind]:
                if f"{prefix}/score/aurc" not in m:
                    continue
                values = [info.get(f"{own}_trace"), *(m.get(f"{prefix}/{name.format(own)}") for name in UNCERTAINTY)]
                way = prefix.removeprefix("refusal").removeprefix("/")
                top = f"calibration/match_{way or 'top1'}/ece"
                values += [m.get(key) for key in ("refusal/R-AUROC", *MATCHES, top)]
                cells = (Cell(None if x is None or math.isnan(x) else x, task.key in row.marked) for x in values)
                rows.append((f"{row.label}, {task.name} {way}".rstrip(), tuple(cells)))
    header = ("Mean trace", *UNCERTAINTY.values(), "R-AUROC", *MATCHES.values(), "Top-1 ECE")
    return Grid("Uncertainty: errors refused by the query's trace", header, tuple(rows), 3)


def grids(report: Report) -> list[Grid]:
    """Every table that has a row."""
    every = (table_1(report), *table_c1(report), faces_table(report), uncertainty_table(report))
    return [grid for grid in every if grid.rows]


def _grid(title: str, header: Sequence[str], keys: Sequence[str], report: Report, decimals: int) -> Grid:
    """Published rows, our rows, and our rows minus the published ones; keys of tasks or aggregates."""
    rows: list[tuple[str, tuple[Cell, ...]]] = []
    for row in (*report.published, *report.ours, *report.differences):
        change, numbers = row.kind == "difference", row.numbers
        cells = tuple(Cell(numbers.get(key), key in row.marked, change) for key in keys)
        if not change:
            rows.append((row.label, cells))
        elif any(cell.value is not None for cell in cells):
            rows.append((f"{row.label} minus {row.against}", cells))
    return Grid(title, tuple(header), tuple(rows), decimals)


def text_of(cell: Cell, decimals: int, missing: str = "–", minus: str = "−") -> str:
    """A cell as readers see it: differences with their sign, a star where marked, a dash for nothing."""
    if cell.value is None:
        return missing
    number = f"{cell.value:{'+' if cell.difference else ''}.{decimals}f}"
    return number.replace("-", minus) + ("*" if cell.marked else "")


def to_markdown(report: Report) -> str:
    """All tables with their notes."""
    parts = []
    for grid in grids(report):
        lines = [f"### {grid.title}", "", f"| Model | {' | '.join(grid.header)} |"]
        lines.append(f"|---|{'---:|' * len(grid.header)}")
        for label, cells in grid.rows:
            texts = [label.replace("|", r"\|"), *(text_of(cell, grid.decimals) for cell in cells)]
            lines.append(f"| {' | '.join(texts)} |")
        parts.append("\n".join(lines))
    if report.notes:
        parts.append("\n".join(f"- {note}" for note in report.notes).replace("*", r"\*"))
    return "\n\n".join(parts) + "\n"


def to_csv(report: Report) -> str:
    """A line per row, ours, published and differences, a column per task and average; percent, empty where missing.

    The columns `kind` (ours, published, difference) and `marked` (names with a star) say how to read it.
    """
    columns = [*AGGREGATES, *(task.name for task in COUNTED)]
    keys = [*AGGREGATES, *(task.key for task in COUNTED)]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["model", "kind", "against", *columns, "marked"])
    for row in (*report.ours, *report.published, *report.differences):
        numbers = row.numbers
        written = [f"{numbers[key]:.4f}" if key in numbers else "" for key in keys]
        stars = ";".join(column for key, column in zip(keys, columns) if key in row.marked)
        writer.writerow([row.label, row.kind, row.against, *written, stars])
    return out.getvalue()


def to_json(report: Report) -> str:
    """Everything, with null for what is missing: rows, differences, notes."""

    def full(values: Mapping[str, float], keys: Iterable[str]) -> dict[str, float | None]:
        return {key: round(values[key], 6) if key in values else None for key in keys}

    tasks = [task.key for task in COUNTED]
    rows = [
        {
            "model": row.label,
            "kind": row.kind,
            "tasks": full(row.values, tasks),
            "averages": full(row.averages, AGGREGATES),
            "marked": sorted(row.marked),
            "faces": row.faces,
        }
        for row in (*report.ours, *report.published)
    ]
    changes = [
        {
            "model": row.label,
            "against": row.against,
            "tasks": full(row.values, tasks),
            "averages": full(row.averages, AGGREGATES),
        }
        for row in report.differences
    ]
    return json.dumps({"unit": "percent", "rows": rows, "differences": changes, "notes": report.notes}, indent=1) + "\n"


ESCAPES = str.maketrans(
    {c: f"\\{c}" for c in "&%$#_{}"}
    | {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}"}
)


def to_latex(report: Report) -> str:
    """All tables for \\usepackage{booktabs,rotating,graphicx}: a table float each, wide headers turned upright."""
    parts = []
    for grid in grids(report):
        upright = len(grid.header) > 6
        names = [name.translate(ESCAPES) for name in grid.header]
        header = [rf"\rotatebox{{90}}{{{name}}}" if upright else name for name in names]
        lines = [r"\begin{table}", r"\centering", rf"\caption{{{grid.title.translate(ESCAPES)}}}"]
        lines += [r"\resizebox{\textwidth}{!}{%", rf"\begin{{tabular}}{{l{'r' * len(header)}}}", r"\toprule"]
        lines += [" & ".join(["Model", *header]) + r" \\", r"\midrule"]
        for label, cells in grid.rows:
            texts = [text_of(cell, grid.decimals, "--", "$-$") for cell in cells]
            lines.append(" & ".join([label.translate(ESCAPES), *texts]) + r" \\")
        lines += [r"\bottomrule", r"\end{tabular}}", r"\end{table}"]
        parts.append("\n".join(lines))
    parts += ["\n".join(f"% {note}" for note in report.notes)] if report.notes else []
    return "\n\n".join(parts) + "\n"


WRITERS = {"md": to_markdown, "csv": to_csv, "json": to_json, "tex": to_latex}
