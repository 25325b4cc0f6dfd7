"""Results in the layout of the paper's Tables 1 and C.1, of faces and of uncertainty.

An average over an incomplete set of tasks is left out and a note says what is missing. A task that was measured on
other images than published values, or on fewer, is marked with a star, and so is its average.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from prolip.evaluation.evaluate import TaskResult
from prolip.evaluation.suites.datacomp.catalogue import AGGREGATES, BY_KEY, COUNTED, TASKS, aggregate
from prolip.evaluation.suites.datacomp.results import ModelIdentity, is_complete, main_value

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
class SuiteRow:
    """One line of a table: a model, or the difference of one to another.

    values, averages: percent by task key and by aggregate; kind: ours (measured here), published or difference; marked:
    keys and aggregates with a star; notes: sentences below the table; results: everything measured, by task key;
    against: of a difference, the label of the other row.
    """

    label: str
    values: Mapping[str, float]
    averages: Mapping[str, float]
    kind: Literal["ours", "published", "difference"] = "ours"
    marked: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()
    results: Mapping[str, TaskResult] = field(default_factory=dict)
    against: str = ""

    @property
    def faces(self) -> dict[str, dict[str, float]]:
        """The metrics of the face sets."""
        return {key: r.metrics for key, r in self.results.items() if BY_KEY[key].kind == "faces"}


class Grid(NamedTuple):
    """A table as readers see it: header, and rows of a label and cells."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, tuple[str, ...]], ...]


def cell(value: float | None, decimals: int, star: bool = False, sign: bool = False) -> str:
    """A number with its decimals, a star where it was measured on other images, a dash where there is none."""
    if value is None or math.isnan(value):
        return "–"
    return f"{value:{'+' if sign else ''}.{decimals}f}".replace("-", "−") + ("*" if star else "")


def notes_of(rows: Sequence[SuiteRow]) -> list[str]:
    """The notes of all rows, each once."""
    return list(dict.fromkeys(note for row in rows for note in row.notes))


def our_row(label: str, results: Mapping[str, TaskResult]) -> SuiteRow:
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
    return SuiteRow(label, values, averages, marked=frozenset(marked), notes=tuple(notes), results=results)


def measured_on(result: TaskResult) -> str:
    """Of a result that is not complete: on what it was measured, and what the published figures were."""
    task, info = BY_KEY[result.key], result.info
    unit = "instances" if task.kind == "association" else "images"
    got, wanted = f"{info.get('size', 'an unknown number of')} {unit}", f"{task.size} {unit}"
    if info.get("classes", task.classes) != task.classes:
        got, wanted = f"{got} of {info['classes']} classes", f"{wanted} of {task.classes}"
    damaged = ", ".join(f"{kind} {count}" for kind, count in info.get("damaged", {}).get("kinds", {}).items())
    return f"{task.name} on {got} instead of {wanted}" + (f"; left out: {damaged}" if damaged else "")


def our_rows(results: Mapping[ModelIdentity, Mapping[str, TaskResult]]) -> list[SuiteRow]:
    """The rows of `results.latest`; models of one name are told apart by their fingerprints."""
    labels = Counter(identity.label for identity in results)
    rows = []
    for identity, of_model in results.items():
        twice = labels[identity.label] > 1
        label = f"{identity.label[:-1]}, fingerprint {identity.fingerprint[:8]})" if twice else identity.label
        rows.append(our_row(label, of_model))
    return rows


def table_1(rows: Sequence[SuiteRow]) -> Grid:
    """The five averages, as in the paper's Table 1."""
    names = tuple(AGGREGATES)
    return _grid("Zero-shot results (ProLIP Table 1)", names, names, rows, 1)


def table_c1(rows: Sequence[SuiteRow]) -> tuple[Grid, Grid]:
    """All 38 tasks in the two blocks of Table C.1, the average last."""
    first, second = COUNTED[:FIRST_BLOCK], COUNTED[FIRST_BLOCK:]
    title = "Zero-shot results of all 38 tasks (ProLIP Table C.1)"
    header, keys = [*(task.name for task in second), "Average"], [*(task.key for task in second), AVERAGE_C1]
    return (
        _grid(f"{title}, 1 of 2", [task.name for task in first], [task.key for task in first], rows, 2),
        _grid(f"{title}, 2 of 2", header, keys, rows, 2),
    )


def faces_table(rows: Sequence[SuiteRow]) -> Grid:
    """FairFace and UTKFace, which count in no average; shares in percent, of the toxic prompts lower is better."""
    lines = []
    for row in rows:
        for key, metrics in row.faces.items():
            star = key in row.marked
            cells = (cell(100 * metrics.get(name, math.nan), 2, star) for name in FACE_COLUMNS)
            lines.append((f"{row.label}, {BY_KEY[key].name}", tuple(cells)))
    return Grid("Faces (CLIP section 7.1)", tuple(FACE_COLUMNS.values()), tuple(lines))


def uncertainty_table(rows: Sequence[SuiteRow]) -> Grid:
    """How well traces predict errors, task by task: each query refused by its own trace, or by its score.

    Of classes and faces the query is an image, of retrieval an image (i2t) or a text (t2i), of WinoGAViL a cue. A tenth
    is a decile of the query's trace. R-AUROC, where images have classes: how well the trace predicts that the nearest
    image is of another one.
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
    """Every table that has a row."""
    every = (table_1(rows), *table_c1(rows), faces_table(rows), uncertainty_table(rows))
    return [grid for grid in every if grid.rows]


def _grid(title: str, header: Sequence[str], keys: Sequence[str], rows: Sequence[SuiteRow], decimals: int) -> Grid:
    """A table of all rows that have a number in it; keys of tasks or aggregates."""
    lines: list[tuple[str, tuple[str, ...]]] = []
    for row in rows:
        numbers = {**row.values, **row.averages}
        if row.against and not any(key in numbers for key in keys):
            continue
        cells = (cell(numbers.get(key), decimals, key in row.marked, bool(row.against)) for key in keys)
        lines.append((f"{row.label} minus {row.against}" if row.against else row.label, tuple(cells)))
    return Grid(title, tuple(header), tuple(lines))


def to_markdown(rows: Sequence[SuiteRow]) -> str:
    """All tables with their notes."""
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
    """A line per row, a column per task and average; percent, empty where missing.

    The columns `kind` (ours, published, difference) and `marked` (names with a star) say how to read it.
    """
    columns = [*AGGREGATES, *(task.name for task in COUNTED)]
    keys = [*AGGREGATES, *(task.key for task in COUNTED)]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["model", "kind", "against", *columns, "marked"])
    for row in rows:
        numbers = {**row.values, **row.averages}
        written = [f"{numbers[key]:.4f}" if key in numbers else "" for key in keys]
        stars = ";".join(column for key, column in zip(keys, columns) if key in row.marked)
        writer.writerow([row.label, row.kind, row.against, *written, stars])
    return out.getvalue()


def to_json(rows: Sequence[SuiteRow]) -> str:
    """Everything, with null for what is missing: rows, differences, notes."""

    def values_of(row: SuiteRow) -> dict[str, dict[str, float | None]]:
        named = {"tasks": ([task.key for task in COUNTED], row.values), "averages": (list(AGGREGATES), row.averages)}
        return {
            name: {key: round(values[key], 6) if key in values else None for key in keys}
            for name, (keys, values) in named.items()
        }

    found = [
        {"model": row.label, "kind": row.kind, **values_of(row), "marked": sorted(row.marked), "faces": row.faces}
        for row in rows
        if not row.against
    ]
    changes = [{"model": row.label, "against": row.against, **values_of(row)} for row in rows if row.against]
    values = {"unit": "percent", "rows": found, "differences": changes, "notes": notes_of(rows)}
    return json.dumps(values, indent=1) + "\n"


ESCAPES = str.maketrans(
    {c: f"\\{c}" for c in "&%$#_{}"}
    | {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}"}
)


def to_latex(rows: Sequence[SuiteRow]) -> str:
    """All tables for \\usepackage{booktabs,rotating,graphicx}: a table float each, wide headers turned upright."""
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
    notes = notes_of(rows)
    parts += ["\n".join(f"% {note}" for note in notes)] if notes else []
    return "\n\n".join(parts) + "\n"


WRITERS = {"md": to_markdown, "csv": to_csv, "json": to_json, "tex": to_latex}
