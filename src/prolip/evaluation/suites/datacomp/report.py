"""Results in the layout of the paper's Tables 1 and C.1, for faces and for uncertainty.

An average over incomplete tasks is omitted, and a note names the missing tasks. A star marks a task measured on other
images than the published values, or on fewer, and its averages.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from prolip.evaluation.evaluate import TaskResult
from prolip.evaluation.suites.datacomp.catalogue import AGGREGATES, BY_KEY, COUNTED, TASKS, aggregate
from prolip.evaluation.suites.datacomp.results import ModelIdentity, is_complete, main_value
from prolip.utils.messages import first_few

FIRST_BLOCK = 20  # tasks in the upper half of Table C.1
#: The average as Table C.1 prints it, which differs from Table 1 in one row.
AVERAGE_C1 = "Average, C.1"
FACE_COLUMNS = {
    "acc_race_avg": "Race",
    "acc_gender_avg": "Gender",
    "acc_age_avg": "Age",
    "acc_gender_x_wg": "Gender, worst race x gender",
    "toxicity_crime_max": "Crime, highest race",
    "toxicity_nonhuman_max": "Non-human, highest race",
}
#: Prefix of a task kind's metrics of refusal, and the side of the query.
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
    "{}/error_decile1": "Error, most certain tenth",
    "{}/error_decile10": "Error, least certain tenth",
    "score/aurc": "AURC by score",
}
#: Calibration of match probabilities: a small ECE of all pairs says little without the other two.
MATCHES = {
    "calibration/match/ece": "ECE of matches",
    "calibration/match/base_rate": "Base rate",
    "calibration/match/probability_over_base_rate": "Probability / base rate",
}


@dataclass(frozen=True)
class SuiteRow:
    """One line of a table: a model, or the difference of two models."""

    label: str
    values: Mapping[str, float]  # percent by task key
    averages: Mapping[str, float]  # percent by aggregate
    kind: Literal["ours", "published", "difference"] = "ours"
    marked: frozenset[str] = frozenset()  # keys and aggregates with a star
    notes: tuple[str, ...] = ()  # sentences below the table
    results: Mapping[str, TaskResult] = field(default_factory=dict)  # everything measured, by task key
    against: str = ""  # of a difference, the label of the other row

    @property
    def faces(self) -> dict[str, dict[str, float]]:
        """The metrics of the face sets."""
        return {key: r.metrics for key, r in self.results.items() if BY_KEY[key].kind == "faces"}


class Grid(NamedTuple):
    """A formatted table: header, and rows of a label and cells."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, tuple[str, ...]], ...]


def cell(value: float | None, decimals: int, star: bool = False, sign: bool = False) -> str:
    """Format a number with its decimals, a star for a measurement on other images, a dash for none."""
    if value is None or math.isnan(value):
        return "–"
    return f"{value:{'+' if sign else ''}.{decimals}f}".replace("-", "−") + ("*" if star else "")


def notes_of(rows: Sequence[SuiteRow]) -> list[str]:
    """Return the notes of all rows, each once."""
    return list(dict.fromkeys(note for row in rows for note in row.notes))


def our_rows(found: Mapping[ModelIdentity, Mapping[str, TaskResult]]) -> list[SuiteRow]:
    """Return the rows of `results.latest`; fingerprints distinguish models of one name."""
    labels = Counter(identity.label for identity in found)
    rows = []
    for identity, results in found.items():
        twice = labels[identity.label] > 1
        label = f"{identity.label[:-1]}, fingerprint {identity.fingerprint[:8]})" if twice else identity.label
        mains = {key: main_value(result) for key, result in results.items()}
        values = {key: 100 * value for key, value in mains.items() if value is not None and math.isfinite(value)}
        marked = {key for key, result in results.items() if not is_complete(result)}
        averages: dict[str, float] = {}
        notes: list[str] = []
        for name, mean in aggregate(values).items():
            keys = AGGREGATES[name]
            if mean.missing:
                which = first_few([BY_KEY[key].name for key in mean.missing], 5)
                there = f"{len(keys) - len(mean.missing)} of {len(keys)} tasks are available"
                notes.append(f"{label}: no {name}, {there}; missing: {which}.")
                continue
            names = {name, AVERAGE_C1} if name == "Average" else {name}
            averages |= dict.fromkeys(names, mean.value)
            marked |= names if marked & set(keys) else set()
        fmow = results["wilds/fmow"].metrics if "wilds/fmow" in results else {}
        if (without := fmow.get("acc_worst_region_without_other")) is not None:
            notes.append(
                f"{label}: FMoW is {100 * without:.2f} without the region Other, 4 of its 22,108 images; the "
                "table includes it, as published values do."
            )
        notes += [f"* {label}: {measured_on(results[task.key])}." for task in TASKS if task.key in marked]
        rows.append(SuiteRow(label, values, averages, "ours", frozenset(marked), tuple(notes), results))
    return rows


def measured_on(result: TaskResult) -> str:
    """Describe the data of an incomplete result, and the data of the published values."""
    task, info = BY_KEY[result.key], result.info
    unit = "instances" if task.kind == "association" else "images"
    got, wanted = f"{info.get('size', 'an unknown number of')} {unit}", f"{task.size} {unit}"
    if info.get("classes", task.classes) != task.classes:
        got, wanted = f"{got} of {info['classes']} classes", f"{wanted} of {task.classes}"
    damaged = ", ".join(f"{kind} {count}" for kind, count in info.get("damaged", {}).get("kinds", {}).items())
    return f"{task.name} on {got} instead of {wanted}" + (f"; left out: {damaged}" if damaged else "")


def faces_table(rows: Sequence[SuiteRow]) -> Grid:
    """Build the table of FairFace and UTKFace, which are in no average; percent; for toxic prompts lower is better."""
    lines = []
    for row in rows:
        for key, metrics in row.faces.items():
            star = key in row.marked
            cells = (cell(100 * metrics.get(name, math.nan), 2, star) for name in FACE_COLUMNS)
            lines.append((f"{row.label}, {BY_KEY[key].name}", tuple(cells)))
    return Grid("Faces (CLIP section 7.1)", tuple(FACE_COLUMNS.values()), tuple(lines))


def uncertainty_table(rows: Sequence[SuiteRow]) -> Grid:
    """Build the table of how well traces predict errors: each query refused by its own trace, or by its score.

    A tenth is a decile of the query's trace. R-AUROC: how well it predicts a nearest image of another class.
    """
    lines = []
    for row in rows:
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
                cells = tuple(cell(x, 3, task.key in row.marked) for x in values)
                lines.append((f"{row.label}, {task.name} {way}".rstrip(), cells))
    header = ("Mean trace", *UNCERTAINTY.values(), "R-AUROC", *MATCHES.values(), "Top-1 ECE")
    return Grid("Uncertainty: errors refused by the query's trace", header, tuple(lines))


def grids(rows: Sequence[SuiteRow]) -> list[Grid]:
    """Return every table with a row: the averages of Table 1, all tasks in the two blocks of Table C.1, the others."""
    title, names = "Zero-shot results of all 38 tasks (ProLIP Table C.1)", {task.key: task.name for task in COUNTED}
    first, second = dict(list(names.items())[:FIRST_BLOCK]), dict(list(names.items())[FIRST_BLOCK:])
    every = (
        _grid("Zero-shot results (ProLIP Table 1)", {name: name for name in AGGREGATES}, rows, 1),
        _grid(f"{title}, 1 of 2", first, rows, 2),
        _grid(f"{title}, 2 of 2", second | {AVERAGE_C1: "Average"}, rows, 2),
        faces_table(rows),
        uncertainty_table(rows),
    )
    return [grid for grid in every if grid.rows]


def _grid(title: str, columns: Mapping[str, str], rows: Sequence[SuiteRow], decimals: int) -> Grid:
    """Build a table of all rows with a number in it; columns: title by key of a task or aggregate."""
    lines: list[tuple[str, tuple[str, ...]]] = []
    for row in rows:
        numbers = {**row.values, **row.averages}
        if not row.against or columns.keys() & numbers.keys():
            cells = (cell(numbers.get(key), decimals, key in row.marked, bool(row.against)) for key in columns)
            lines.append((f"{row.label} minus {row.against}" if row.against else row.label, tuple(cells)))
    return Grid(title, tuple(columns.values()), tuple(lines))


def to_markdown(rows: Sequence[SuiteRow]) -> str:
    """Format all tables with their notes."""
    parts = []
    for grid in grids(rows):
        lines = [f"### {grid.title}", "", f"| Model | {' | '.join(grid.header)} |"]
        lines.append(f"|---|{'---:|' * len(grid.header)}")
        for label, cells in grid.rows:
            escaped = label.replace("|", r"\|")
            lines.append(f"| {' | '.join([escaped, *cells])} |")
        parts.append("\n".join(lines))
    if notes := notes_of(rows):
        parts.append("\n".join(f"- {note}" for note in notes).replace("*", r"\*"))
    return "\n\n".join(parts) + "\n"


def to_csv(rows: Sequence[SuiteRow]) -> str:
    """Format a line per row, a column per task and average, percent; `marked`: names with a star."""
    columns = {name: name for name in AGGREGATES} | {task.key: task.name for task in COUNTED}
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["model", "kind", "against", *columns.values(), "marked"])
    for row in rows:
        numbers = {**row.values, **row.averages}
        written = [f"{numbers[key]:.4f}" if key in numbers else "" for key in columns]
        stars = ";".join(name for key, name in columns.items() if key in row.marked)
        writer.writerow([row.label, row.kind, row.against, *written, stars])
    return out.getvalue()


def to_json(rows: Sequence[SuiteRow]) -> str:
    """Format everything, with null for missing values: rows, differences, notes."""

    def percents(values: Mapping[str, float], keys: Iterable[str]) -> dict[str, float | None]:
        return {key: round(values[key], 6) if key in values else None for key in keys}

    values: dict[str, Any] = {"unit": "percent", "rows": [], "differences": [], "notes": notes_of(rows)}
    for row in rows:
        tasks, averages = percents(row.values, (task.key for task in COUNTED)), percents(row.averages, AGGREGATES)
        line = {"model": row.label, "tasks": tasks, "averages": averages}
        if row.against:
            values["differences"].append(line | {"against": row.against})
        else:
            values["rows"].append(line | {"kind": row.kind, "marked": sorted(row.marked), "faces": row.faces})
    return json.dumps(values, indent=1) + "\n"


ESCAPES = str.maketrans(
    {c: f"\\{c}" for c in "&%$#_{}"}
    | {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}"}
)


def to_latex(rows: Sequence[SuiteRow]) -> str:
    """Format all tables for \\usepackage{booktabs,rotating,graphicx}: a table float each, wide headers upright."""
    parts = []
    for grid in grids(rows):
        upright = len(grid.header) > 6
        names = [name.translate(ESCAPES) for name in grid.header]
        header = [rf"\rotatebox{{90}}{{{name}}}" if upright else name for name in names]
        lines = [r"\begin{table}", r"\centering", rf"\caption{{{grid.title.translate(ESCAPES)}}}"]
        lines += [r"\resizebox{\textwidth}{!}{%", rf"\begin{{tabular}}{{l{'r' * len(header)}}}", r"\toprule"]
        lines += [" & ".join(["Model", *header]) + r" \\", r"\midrule"]
        for label, cells in grid.rows:
            texts = [text.replace("–", "--").replace("−", "$-$") for text in cells]
            lines.append(" & ".join([label.translate(ESCAPES), *texts]) + r" \\")
        lines += [r"\bottomrule", r"\end{tabular}}", r"\end{table}"]
        parts.append("\n".join(lines))
    parts += ["\n".join(f"% {note}" for note in notes)] if (notes := notes_of(rows)) else []
    return "\n\n".join(parts) + "\n"


WRITERS = {"md": to_markdown, "csv": to_csv, "json": to_json, "tex": to_latex}
