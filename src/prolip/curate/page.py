"""The report page of a selection: what was dropped, why, and what it looks like; one file with everything in it."""

from __future__ import annotations

import heapq
import io
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from PIL import Image

from prolip.curate.columns import MEANINGS
from prolip.curate.expressions import Expression
from prolip.curate.select import KEPT, SELECTION, selection_of
from prolip.curate.sources import content_of
from prolip.curate.tables import figures_of, manifest_of, read_table
from prolip.data.captions import stable_hash
from prolip.data.faults import SampleFault
from prolip.data.images import decode_image
from prolip.data.reading.tar import ShardReader
from prolip.data.samples import Raw, image_bytes
from prolip.utils import style
from prolip.utils.console import plain
from prolip.utils.outputs import replacing

PAGE = "report.html"
#: Shards that examples are taken from, spread evenly; bins of a histogram; pixels of a picture.
SHARDS, BINS, PIXELS = 8, 60, 112
#: Figures that a page shows whether or not a rule reads them.
SHOWN = (
    "match_probability",
    "normalised_score",
    "cosine",
    "text_bits",
    "image_bits",
    "text_uncertainty",
    "image_uncertainty",
)


class Example(NamedTuple):
    """A sample as the page shows it. figures: name and number in print."""

    caption: str
    key: str
    picture: str
    figures: list[tuple[str, str]]


class Histogram(NamedTuple):
    """How many samples are kept and dropped in each bin of a figure; what lies outside is in the outer bins."""

    edges: np.ndarray
    kept: np.ndarray
    dropped: np.ndarray


def write_page(folder: Path, examples: int = 12, read: ShardReader = ShardReader()) -> Path:  # noqa: B008  # frozen
    """Write the page of the selection in `folder`; `examples` of each reason. ValueError without a selection."""
    summary, tables = selection_of(folder)
    figures = shown_figures(tables[0], summary)
    environment = Environment(
        loader=PackageLoader("prolip.curate", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("page.html.j2").render(
        title=f"Curated: {plain(folder.resolve().name)}",
        summary=summary,
        model=manifest_of(folder)["model"],
        picture=style.data_uri(picture_of(histograms(folder, tables, figures)), "png"),
        meanings={name: MEANINGS.get(name, "novelty in nats, of models that know it") for name in figures},
        examples=chosen(folder, tables, summary, figures, examples, read),
        kept=KEPT,
    )
    path = folder / PAGE
    with replacing(path) as temporary:
        temporary.write_text(page, encoding="utf-8", errors="replace")
    return path


def shown_figures(table: Path, summary: dict[str, Any]) -> list[str]:
    """The columns that a rule reads, then those that are always shown, as far as there are any."""
    choice = summary["choice"]
    formulas = [*choice["drop"].values(), *(choice[name] for name in ("by", "copies") if choice[name])]
    read = sorted(set().union(*(Expression.parse(text).columns for text in formulas)))
    there = figures_of(read_table(table).kinds)
    return [name for name in dict.fromkeys([*read, *SHOWN]) if name in there][:8]


def kept_of(folder: Path, table: Path) -> tuple[np.ndarray, np.ndarray]:
    """Whether each sample is kept, and the reasons against it."""
    columns = read_table(folder / SELECTION / table.name, ["copies", "reasons"]).columns
    return columns["copies"] > 0, columns["reasons"].astype(np.int64)


def histograms(folder: Path, tables: list[Path], figures: list[str]) -> dict[str, Histogram]:
    """Of every figure; the range is that of all but the outermost half percent of some shards."""
    found = {}
    for name in figures:
        some = np.concatenate([read_table(path, [name]).columns[name] for path in spread(tables)])
        some = some[np.isfinite(some)]
        low, high = np.quantile(some, [0.005, 0.995]) if len(some) else (0.0, 1.0)
        edges = np.linspace(low, high if high > low else low + 1, BINS + 1)
        found[name] = Histogram(edges, np.zeros(BINS), np.zeros(BINS))
    for path in tables:
        kept, _ = kept_of(folder, path)
        for name, values in read_table(path, figures).columns.items():
            edges, *both = found[name]
            inside = np.clip(values, edges[0], edges[-1])
            for counts, which in zip(both, (kept, ~kept)):
                counts += np.histogram(inside[which & ~np.isnan(values)], edges)[0]
    return found


def spread(tables: list[Path]) -> list[Path]:
    """At most SHARDS of them, evenly."""
    return [tables[place] for place in sorted({round(x) for x in np.linspace(0, len(tables) - 1, SHARDS)})]


@style.styled
def picture_of(found: dict[str, Histogram]) -> bytes:
    """A panel for each figure, kept above dropped, as PNG."""
    rows = -(-len(found) // 2) or 1
    figure, axes = style.panels(rows, 2, height=2.4)
    for axis, (name, one) in zip(axes, found.items()):
        middle, width = (one.edges[1:] + one.edges[:-1]) / 2, np.diff(one.edges)
        axis.bar(middle, one.kept, width, color=style.IMAGE, label="kept")
        axis.bar(
            middle,
            one.dropped,
            width,
            bottom=one.kept,
            color=style.TEXT,
            hatch="//",
            edgecolor="white",
            linewidth=0,
            label="dropped",
        )
        axis.set_title(name)
        axis.set_ylabel("samples")
    for axis in axes[len(found) :]:
        axis.set_visible(False)
    if found:
        axes[0].legend()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=style.STYLE["savefig.dpi"])
    return buffer.getvalue()


def chosen(
    folder: Path, tables: list[Path], summary: dict[str, Any], figures: list[str], count: int, read: ShardReader
) -> dict[str, list[Example]]:
    """Examples by reason, and of what is kept, chosen by the hash of their keys and never by how they look."""
    names = (*summary["reasons"], KEPT)
    wanted: dict[str, list[tuple[int, Path, int]]] = {name: [] for name in names}
    for path in spread(tables):
        kept, reasons = kept_of(folder, path)
        keys = read_table(path, ["key"]).columns["key"]
        for place, name in enumerate(names):
            rows = np.flatnonzero(kept if name == KEPT else reasons >> place & 1)
            marked = ((stable_hash(path.name, keys[row], "example"), path, int(row)) for row in rows)
            wanted[name] = heapq.nsmallest(count, [*wanted[name], *marked])
    rows_of: dict[Path, set[int]] = {path: set() for path in tables}
    for _, path, row in (one for found in wanted.values() for one in found):
        rows_of[path].add(row)
    examples = {path: examples_of(path, rows, figures, read) for path, rows in rows_of.items() if rows}
    return {name: [examples[path][row] for _, path, row in found] for name, found in wanted.items() if found}


def examples_of(path: Path, rows: set[int], figures: list[str], read: ShardReader) -> dict[int, Example]:
    """Some rows of a table for the page, with pictures from its shard as far as this can be read."""
    table = read_table(path, ["key", "caption", "fault", "content", *figures[:4]])
    columns, pictures = table.columns, {}
    with suppress(SampleFault):  # a shard that is gone, or breaks off: its examples have no picture
        samples = islice(read(table.note["shard"], lambda fault: None), max(rows) + 1)
        for row, (content, raw) in enumerate(zip(columns["content"], samples)):
            if row in rows and content_of(raw) == content:
                pictures[row] = thumbnail(raw)
    found = {}
    for row in rows:
        said = columns["fault"][row] or columns["caption"][row]
        numbers = [(name, f"{columns[name][row]:.3g}") for name in figures[:4] if np.isfinite(columns[name][row])]
        found[row] = Example(plain(said[:160]), plain(columns["key"][row]), pictures.get(row, ""), numbers)
    return found


def thumbnail(raw: Raw) -> str:
    """A small picture, or nothing for what cannot be decoded."""
    try:
        image = decode_image(image_bytes(raw))
    except SampleFault:
        return ""
    image.thumbnail((PIXELS, PIXELS), Image.Resampling.LANCZOS)
    return style.picture(image, quality=80)
