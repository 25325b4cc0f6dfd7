"""The report page of a selection: what was dropped, why, with examples, in one self-contained file."""

from __future__ import annotations

import heapq
import io
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from PIL import Image

from prolip.curate.rules import MEANINGS, Expression
from prolip.curate.score import content_of
from prolip.curate.select import KEPT, SELECTION, selection_of
from prolip.curate.tables import manifest_of, read_table, signals_of, whole_column
from prolip.data.captions import stable_hash
from prolip.data.faults import SampleFault
from prolip.data.images import decode_image
from prolip.data.reading.tar import ShardReader
from prolip.data.samples import image_bytes
from prolip.utils import style
from prolip.utils.console import plain
from prolip.utils.outputs import replacing

PAGE = "report.html"
#: Shards with examples, spread evenly; bins of a histogram; pixels of a thumbnail.
SHARDS, BINS, PIXELS = 8, 60, 112
#: Signals on every page, after those that a rule reads.
SHOWN = ["match_probability", "normalised_score", "cosine"]
SHOWN += [f"{side}_{word}" for word in ("bits", "uncertainty") for side in ("text", "image")]


def write_page(folder: Path, examples: int = 12, read: ShardReader = ShardReader()) -> Path:  # noqa: B008  # frozen
    """Write the page of the selection in `folder`, with `examples` of each reason. ValueError without a selection."""
    summary, tables = selection_of(folder)
    choice, there = summary["choice"], signals_of(read_table(tables[0]).kinds)
    formulas = [*choice["drop"].values(), *(choice[name] for name in ("by", "copies") if choice[name])]
    used = sorted(set().union(*(Expression.parse(text).columns for text in formulas)))
    names = [name for name in dict.fromkeys([*used, *SHOWN]) if name in there][:8]
    loader = PackageLoader("prolip.curate", ".")
    pages = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    page = pages.get_template("page.html.j2").render(
        title=f"Curated: {plain(folder.resolve().name)}",
        summary=summary,
        model=manifest_of(folder)["model"],
        picture=style.data_uri(histograms(folder, tables, names), "png"),
        meanings={name: MEANINGS.get(name, "") for name in names},
        examples=chosen_examples(folder, tables, summary["reasons"], names, examples, read),
        kept=KEPT,
    )
    with replacing(folder / PAGE) as temporary:
        temporary.write_text(page, encoding="utf-8", errors="replace")
    return folder / PAGE


@style.styled
def histograms(folder: Path, tables: list[Path], names: list[str]) -> bytes:
    """Plot each signal without its outermost half percents, dropped samples above kept ones; return a PNG."""
    figure, axes = style.panels(-(-len(names) // 2) or 1, 2, height=2.4)
    look: Any = {"color": style.TEXT, "hatch": "//", "edgecolor": "white", "linewidth": 0, "label": "dropped"}
    kept = whole_column([folder / SELECTION / path.name for path in tables], "copies") > 0
    for axis, name in zip(axes, names):
        values = whole_column(tables, name)
        finite = values[np.isfinite(values)]
        low, high = np.quantile(finite, [0.005, 0.995]) if len(finite) else (0.0, 1.0)
        edges = np.linspace(low, high if high > low else low + 1, BINS + 1)
        inside, known = np.clip(values, edges[0], edges[-1]), ~np.isnan(values)  # the outer bins count all beyond
        counts = [np.histogram(inside[which & known], edges)[0] for which in (kept, ~kept)]
        middle, width = (edges[1:] + edges[:-1]) / 2, np.diff(edges)
        axis.bar(middle, counts[0], width, color=style.IMAGE, label="kept")
        axis.bar(middle, counts[1], width, bottom=counts[0], **look)
        axis.set_title(name)
        axis.set_ylabel("samples")
        axis.locator_params(axis="x", nbins=4)  # more labels of a narrow range would overlap
    for axis in axes[len(names) :]:
        axis.set_visible(False)
    if names:
        axes[0].legend()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=style.DPI)
    return buffer.getvalue()


def chosen_examples(
    folder: Path, tables: list[Path], reasons: list[str], names: list[str], count: int, read: ShardReader
) -> dict[str, list[dict[str, Any]]]:
    """Return examples of each reason and of kept samples, chosen by the hash of their keys, not by appearance."""
    wanted: dict[str, list[tuple[int, Path, int]]] = {name: [] for name in (*reasons, KEPT)}
    for path in (tables[place] for place in sorted({round(x) for x in np.linspace(0, len(tables) - 1, SHARDS)})):
        selected = read_table(folder / SELECTION / path.name, ["copies", "reasons"]).columns
        bits, keys = selected["reasons"].astype(np.int64), read_table(path, ["key"]).columns["key"]
        for place, name in enumerate(wanted):
            rows = np.flatnonzero(selected["copies"] if name == KEPT else bits >> place & 1)
            marked = ((stable_hash(path.name, keys[row], "example"), path, int(row)) for row in rows)
            wanted[name] = heapq.nsmallest(count, [*wanted[name], *marked])
    rows_of: dict[Path, set[int]] = {}
    for _, path, row in (one for found in wanted.values() for one in found):
        rows_of.setdefault(path, set()).add(row)
    examples = {path: examples_of(path, rows, names, read) for path, rows in rows_of.items()}
    return {name: [examples[path][row] for _, path, row in found] for name, found in wanted.items() if found}


def examples_of(path: Path, rows: set[int], names: list[str], read: ShardReader) -> dict[int, dict[str, Any]]:
    """Return rows of a table as examples, with images as far as its shard is readable."""
    table = read_table(path, ["key", "caption", "fault", "content", *names[:4]])
    columns, pictures = table.columns, {}
    with suppress(SampleFault):  # a missing or cut shard: its examples have no image
        samples = islice(read(table.note["shard"], lambda fault: None), max(rows) + 1)
        for row, (content, raw) in enumerate(zip(columns["content"], samples)):
            if row in rows and content_of(raw) == content:
                with suppress(SampleFault):  # cannot be decoded
                    image = decode_image(image_bytes(raw))
                    image.thumbnail((PIXELS, PIXELS), Image.Resampling.LANCZOS)
                    pictures[row] = style.picture(image, quality=80)
    found = {}
    for row in rows:
        said = columns["fault"][row] or columns["caption"][row]
        numbers = [(name, f"{columns[name][row]:.3g}") for name in names[:4] if np.isfinite(columns[name][row])]
        found[row] = {"caption": plain(said[:160]), "key": plain(columns["key"][row]), "figures": numbers}
        found[row]["picture"] = pictures.get(row, "")
    return found
