#!/usr/bin/env python
"""Draw the plot of each study and benchmark from the tables of its page.

    python scripts/studies/plots.py --write          all plots, into docs/images
    python scripts/studies/plots.py                  the numbers of all plots as JSON

Each PNG holds its numbers as JSON in the field `Numbers`. A test compares them with the page, and so finds stale plots.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "src"))

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from prolip.utils.outputs import replacing
from prolip.utils.style import LOOKS, MUTED, styled

IMAGES = ROOT / "docs" / "images"
WIDTH, DPI = 5.2, 150
#: Series -> label or place on the x axis -> value, and the ends of its interval where the page has them.
Numbers = dict[str, dict[str, list[float]]]
Rows = list[dict[str, str]]


# --- reading ----------------------------------------------------------------------------------------------------------
def tables(text: str) -> list[Rows]:
    """The tables of a page: a dict per row, by the heads; equal heads after the first get a number, such as `t2i 2`."""
    found = []
    for block in re.findall(r"(?:^\|.*\n)+", text, re.M):
        lines = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in block.splitlines()]
        heads = [f"{h} {lines[0][:i].count(h) + 1}" if h in lines[0][:i] else h for i, h in enumerate(lines[0])]
        found.append([dict(zip(heads, cells)) for cells in lines[2:]])
    return found


def table(text: str, *heads: str, among: int = 0) -> Rows:
    """The first table with these heads, or the one `among` places later. Raises ValueError if there is none."""
    found = [rows for rows in tables(text) if rows and set(heads) <= rows[0].keys()]
    if len(found) <= among:
        raise ValueError(f"the page has no table with the heads {heads}")
    return found[among]


def numbers(cell: str) -> list[float]:
    """Every number of a cell: `1,024 GPUs`, `-.11 [-.2, +.1]`, `**2.96** (2.89 to 3.07)`."""
    return [float(word.replace(",", "")) for word in re.findall(r"[-+]?(?:\d[\d,]*)?\.?\d+", cell.replace("−", "-"))]


def columns(rows: Rows, label: str, heads: dict[str, str]) -> Numbers:
    """Columns as series: heads, by the name of the series. Cells without a number are left out."""
    return {
        said: {row[label]: numbers(row[head])[:1] for row in rows if numbers(row[head])} for said, head in heads.items()
    }


def read_methods(text: str) -> Numbers:
    shares = ("clean captions", "20% wrong", "50% wrong")
    found = [table(text, "", "names RSUM", "seconds", among=place) for place in range(3)]
    return {said: columns(rows, "", {said: "names RSUM"})[said] for said, rows in zip(shares, found)}


def read_uncertainty(text: str) -> Numbers:
    return columns(
        table(text, "", "rho log n", "kept out"), "", {"all texts": "rho log n", "kept-out texts": "kept out"}
    )


#: Model and designer of a row, short enough for a label.
SHORT = {"without twemoji": "no Twemoji", "without noto and noto-v1": "no Noto", "remixicon": "remix"}
SHORT |= {"without fluent-emoji-flat and fluent-emoji": "no Fluent", "fluent-emoji-": "fluent-"}


def read_new_designers(text: str) -> Numbers:
    found: Numbers = {"fitted as before": {}, "now, with a gallery": {}}
    for row in table(text, "model", "first captions, with a gallery"):
        model, _, before = row["model"].partition(", ")
        label = f"{model}: {row['drawings of']}"
        for long, short in SHORT.items():
            label = label.replace(long, short)
        head = "first captions, model's own" if before else "first captions, with a gallery"
        found["fitted as before" if before else "now, with a gallery"][label] = numbers(row[head])[:1]
    return found


def read_paper_traces(text: str) -> Numbers:
    found = {}
    for row in table(text, "variant", "rho matches given tokens"):
        mean, half = numbers(row["rho matches given tokens"])
        found[row["variant"]] = [mean, round(mean - half, 6), round(mean + half, 6)]
    return {"correlation": found}


def read_training(text: str) -> Numbers:
    rows = table(text, "method", "step / clip")
    return {"step / clip": {row["method"]: numbers(row["step / clip"]) for row in rows}}


def read_data(text: str) -> Numbers:
    found = {}
    for size in ("512x512", "1024x768"):
        rows = next(rows for rows in tables(text) if next(iter(rows[0])).startswith(f"{size},"))
        found[size] = {next(iter(row.values())): numbers(row["images/s/core"]) for row in rows}
    return found


def read_search(text: str) -> Numbers:
    names = {"exactly": "exact", "ivf": "ivf", "exactly, faiss alone": "exact, faiss", "ivf, faiss alone": "ivf, faiss"}
    found: Numbers = {said: {} for said in names.values()}
    for row in table(text, "items", "by", "1 query, ms"):
        if row["by"] in names:
            found[names[row["by"]]][row["items"]] = numbers(row["1 query, ms"])
    return found


def read_index(text: str) -> Numbers:
    found: Numbers = {"time or memory: less is better": {}, "rate: more is better": {}}
    for row in table(text, "what", "ratio"):
        series = list(found)[": rate" in row["what"]]
        found[series][row["what"].partition(": ")[0]] = numbers(row["ratio"])
    return found


def read_planner(text: str) -> Numbers:
    rows = {row["time"]: row for row in table(text, "time", "8 GPUs", "1,024 GPUs")}
    hours = {"h": 1.0, "d": 24.0, "min": 1 / 60}
    run, cost = rows["run, start to end"], rows["cost"]
    said = {head: cell.split() for head, cell in run.items() if "GPUs" in head}
    return {
        "hours": {head: [round(float(value) * hours[unit], 4)] for head, (value, unit) in said.items()},
        "cost": {head: numbers(cost[head]) for head in said},
    }


def read_scale(text: str) -> Numbers:
    found: Numbers = {"before": {}, "after": {}}
    for row in table(text, "ranks", "of", "looked up"):
        if row["of"] == "all":
            for series, value in zip(found, numbers(row["looked up"])):
                found[series][row["ranks"]] = [value]
    return found


def filled(rows: Rows, head: str) -> Rows:
    """The rows with empty cells of a column filled from above."""
    said = ""
    for row in rows:
        row[head] = said = row[head] or said
    return rows


def read_refusal(text: str) -> Numbers:
    found: Numbers = {"answered": {}, "wrong of these": {}, "accepted risk": {}}
    for row in filled(table(text, "questions", "risk", "answered there"), "questions"):
        label = f"{row['questions'].partition(' (')[0]} {row['risk']}"
        for series, head in zip(found, ("answered there", "wrong of these", "risk")):
            found[series][label] = numbers(row[head])
    return found


def read_classification(text: str) -> Numbers:
    found = columns(
        table(text, "risk", "answered", "wrong of these"),
        "risk",
        {"answered": "answered", "wrong of these": "wrong of these", "accepted risk": "risk"},
    )
    return {series: {f"risk {label}": value for label, value in values.items()} for series, values in found.items()}


def read_few_shot(text: str) -> Numbers:
    head = "names and shots / shots alone / logistic regression"
    found: Numbers = {series: {} for series in head.split(" / ")}
    for row in table(text, head, "accuracy"):
        for series, value in zip(found, numbers(row["accuracy"])):
            found[series][row[head].partition(",")[0]] = [value]
    return found


def read_curation(text: str) -> Numbers:
    heads = ("trained on", "names RSUM: gain over all")
    found = {}
    for place, corpus in enumerate(("emoji", "icons")):
        for row in table(text, *heads, among=place):
            if gain := numbers(row[heads[1]]):
                found[f"{corpus}: {row['trained on']} pairs"] = gain
    return {"gain": found}


def read_prompts(text: str) -> Numbers:
    found: Numbers = {}
    for place, model in enumerate(("PCME++", "ProLIP")):
        rows = table(text, "prompts", "acc1", "difference", among=place)
        found[model] = {row["prompts"]: gain for row in rows if (gain := numbers(row["difference"]))}
    return found


def read_hierarchy(text: str) -> Numbers:
    found: Numbers = {}
    for row in filled(table(text, "model", "score", "mean"), "model"):
        series = found.setdefault(row["model"].partition(" (ours")[0], {})
        series[row["score"].strip("*").partition(" (")[0]] = numbers(row["mean"])[:1]
    return found


def read_defaults(text: str) -> Numbers:
    found: Numbers = {"emoji 300": {}, "icons 300": {}}
    for place, start in enumerate(("random", "trained")):
        for row in table(text, "setting", *found, among=place):
            for series, values in found.items():
                if row["setting"] != "defaults" and (gain := numbers(row[series])):
                    values[f"{start}: {row['setting'].strip('`-')}"] = gain
    return found


def read_openclip(text: str) -> Numbers:
    rows = table(text, "", "gain at step 500")
    return {"gain": {row[""]: gain for row in rows if (gain := numbers(row["gain at step 500"]))}}


# --- drawing ----------------------------------------------------------------------------------------------------------
def draw_dots(axes: Axes, found: Numbers) -> None:
    """A row for each label, a marker for each series, a bar for each interval."""
    labels = list(dict.fromkeys(label for series in found.values() for label in series))
    apart = 0.3 if any(len(value) > 1 for series in found.values() for value in series.values()) else 0.0
    for number, ((said, series), (colour, _, marker)) in enumerate(zip(found.items(), LOOKS)):
        for label, (value, *ends) in series.items():
            place = labels.index(label) + apart * (number - (len(found) - 1) / 2)
            if ends:
                axes.plot(ends, [place, place], color=colour, linestyle="-", linewidth=1.4)
            axes.plot(value, place, marker, color=colour, markersize=6, label=said)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.4, -0.6)


def plain_ticks(*axes: Axis) -> None:
    """Write plain numbers at the powers of ten of logarithmic axes."""
    for axis in axes:
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())


def draw_lines(axes: Axes, found: Numbers) -> None:
    """A line for each series, over the numbers that its labels are, both axes logarithmic."""
    for (said, series), (colour, dashes, marker) in zip(found.items(), LOOKS):
        x = [numbers(label)[0] for label in series]
        y = [value for value, *_ in series.values()]
        axes.plot(x, y, color=colour, linestyle=dashes, marker=marker, markersize=5, label=said)
    axes.set(xscale="log", yscale="log")
    plain_ticks(axes.xaxis, axes.yaxis)


def draw_places(axes: Axes, found: Numbers) -> None:
    """A labelled point for each label, with the first series as x and the second as y."""
    first, second = found.values()
    for label in first:
        x, y = first[label][0], second[label][0]
        axes.plot(x, y, "o", color=LOOKS[0][0], markersize=7)
        axes.annotate(label, (x, y), xytext=(7, 7), textcoords="offset points")
    axes.set(xscale="log", yscale="log", xlim=(0.4, 60), ylim=(500, 5000))
    axes.set_xticks([0.5, 1, 2, 5, 10, 20], ["0.5", "1", "2", "5", "10", "20"])
    axes.set_yticks([500, 1000, 2000, 5000], ["$500", "$1,000", "$2,000", "$5,000"])
    axes.minorticks_off()


class Plot(NamedTuple):
    """page: below docs; read: its numbers; draw: how; x, y: names of axes; line: a vertical line at this value."""

    page: str
    read: Callable[[str], Numbers]
    draw: Callable[[Axes, Numbers], None]
    x: str
    y: str = ""
    height: float = 3.6
    line: float | None = None
    log: bool = False


PLOTS = {
    "study_methods": Plot("studies/methods.md", read_methods, draw_dots, "names RSUM"),
    "study_uncertainty": Plot(
        "studies/uncertainty.md", read_uncertainty, draw_dots, "rank correlation with true drawings", height=4.2, line=0
    ),
    "study_new_designers": Plot(
        "studies/new_designers.md", read_new_designers, draw_dots, "calibration error of first captions", height=4.6
    ),
    "study_paper_traces": Plot(
        "studies/paper_traces.md", read_paper_traces, draw_dots, "correlation at equal length", height=6.6, line=0
    ),
    "study_openclip": Plot(
        "studies/openclip.md", read_openclip, draw_dots, "gain over SigLIP's loss, points", height=2.6, line=0
    ),
    "study_defaults": Plot(
        "studies/defaults.md", read_defaults, draw_dots, "gain over the defaults, points", height=3.6, line=0
    ),
    "study_refusal": Plot("studies/refusal.md", read_refusal, draw_dots, "share", height=4.2),
    "study_classification": Plot("studies/classification.md", read_classification, draw_dots, "percent", height=2.4),
    "study_few_shot": Plot("studies/few_shot.md", read_few_shot, draw_dots, "accuracy, percent", height=2.8),
    "study_curation": Plot("studies/curation.md", read_curation, draw_dots, "gain in names RSUM", height=2.2, line=0),
    "study_prompts": Plot(
        "studies/prompts.md", read_prompts, draw_dots, "gain in accuracy over all prompts, points", height=3.4, line=0
    ),
    "study_hierarchy": Plot("studies/hierarchy.md", read_hierarchy, draw_dots, "mean AUC", height=3, line=0.5),
    "bench_index": Plot("benchmarks/index.md", read_index, draw_dots, "ours / baseline", height=4.2, line=1, log=True),
    "bench_training": Plot("benchmarks/training.md", read_training, draw_dots, "step / CLIP's step", height=3, line=1),
    "bench_data": Plot("benchmarks/data.md", read_data, draw_dots, "images per second and core", height=2.6),
    "bench_search": Plot("benchmarks/search.md", read_search, draw_lines, "rows", "ms per query"),
    "bench_planner": Plot("benchmarks/planner.md", read_planner, draw_places, "hours", "cost", height=3.2),
    "bench_scale": Plot("benchmarks/scale.md", read_scale, draw_lines, "ranks", "look-ups of all ranks", height=3.2),
}


def read(plot: Plot) -> Numbers:
    """The numbers of a plot, from its page."""
    return plot.read((ROOT / "docs" / plot.page).read_text(encoding="utf-8"))


@styled
def draw(plot: Plot, found: Numbers, path: Path) -> None:
    """Write one plot with its numbers."""
    figure = Figure(figsize=(WIDTH, plot.height), layout="constrained")
    axes = figure.subplots()
    if plot.line is not None:
        axes.axvline(plot.line, color=MUTED, linewidth=1, linestyle="-")
    plot.draw(axes, found)
    axes.set(xlabel=plot.x, ylabel=plot.y)
    if plot.log:
        axes.set_xscale("log")
        plain_ticks(axes.xaxis)
    elif plot.draw is draw_dots and plot.line is None:
        axes.set_xlim(left=0)
    handles = dict(zip(*reversed(axes.get_legend_handles_labels())))
    if len(handles) > 1:
        figure.legend(handles.values(), handles, loc="outside upper center", ncols=2 if len(handles) != 3 else 3)
    drawn, kept = io.BytesIO(), PngInfo()
    figure.savefig(drawn, format="png", dpi=DPI)
    kept.add_text("Numbers", json.dumps(found))
    with Image.open(drawn) as image, replacing(path) as temporary:  # 64 colours: a third of the bytes
        image.convert("RGB").quantize(64).save(temporary, "PNG", optimize=True, pnginfo=kept)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plots", nargs="*", metavar="PLOT", help=f"default: all of {', '.join(PLOTS)}")
    parser.add_argument("--write", action="store_true", help="write the plots instead of printing their numbers")
    args = parser.parse_args(arguments)
    if unknown := set(args.plots) - set(PLOTS):
        parser.error(f"no plot is called {', '.join(sorted(unknown))}: choose from {', '.join(PLOTS)}")
    for name in args.plots or PLOTS:
        found = read(PLOTS[name])
        if args.write:
            draw(PLOTS[name], found, IMAGES / f"{name}.png")
        else:
            print(json.dumps({name: found}))


if __name__ == "__main__":
    main()
