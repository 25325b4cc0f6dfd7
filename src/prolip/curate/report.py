"""The report page of a selection: what was dropped, why, with examples, in one self-contained file."""

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

from prolip.curate.rules import MEANINGS, Expression
from prolip.curate.select import KEPT, SELECTION, selection_of
from prolip.curate.sources import content_of
from prolip.curate.tables import manifest_of, read_table, signals_of
from prolip.data.captions import stable_hash
from prolip.data.faults import SampleFault
from prolip.data.images import decode_image
from prolip.data.reading.tar import ShardReader
from prolip.data.samples import Raw, image_bytes
from prolip.utils import style
from prolip.utils.console import plain
from prolip.utils.outputs import replacing

PAGE = "report.html"
#: Shards that examples are taken from, spread evenly; bins of a histogram; pixels of a thumbnail.
SHARDS, BINS, PIXELS = 8, 60, 112
#: Signals that every page shows, after those that a rule reads.
SHOWN = ["match_probability", "normalised_score", "cosine"]
SHOWN += [f"{side}_{word}" for word in ("bits", "uncertainty") for side in ("text", "image")]


class Example(NamedTuple):
    """A sample on the page. figures: names of signals and their printed numbers."""

    caption: str
    key: str
    picture: str
    figures: list[tuple[str, str]]


class Histogram(NamedTuple):
    """Samples kept and dropped in each bin of a signal; the outer bins count all beyond."""

    edges: np.ndarray
    kept: np.ndarray
    dropped: np.ndarray


def write_page(folder: Path, examples: int = 12, read: ShardReader = ShardReader()) -> Path:  # noqa: B008  # frozen
    """Write the page of the selection in `folder`; `examples` of each reason. ValueError without a selection."""
    summary, tables = selection_of(folder)
    names = shown_signals(tables[0], summary)
    loader = PackageLoader("prolip.curate", ".")
    pages = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    page = pages.get_template("page.html.j2").render(
        title=f"Curated: {plain(folder.resolve().name)}",
        summary=summary,
        model=manifest_of(folder)["model"],
        picture=style.data_uri(drawn(histograms(folder, tables, names)), "png"),
        meanings={name: MEANINGS.get(name, "novelty in nats, of models that know it") for name in names},
        examples=chosen_examples(folder, tables, summary, names, examples, read),
        kept=KEPT,
    )
    with replacing(folder / PAGE) as temporary:
        temporary.write_text(page, encoding="utf-8", errors="replace")
    return folder / PAGE


def shown_signals(table: Path, summary: dict[str, Any]) -> list[str]:
    """The columns that a rule reads, then those that are always shown, if they exist."""
    choice = summary["choice"]
    formulas = [*choice["drop"].values(), *(choice[name] for name in ("by", "copies") if choice[name])]
    read = sorted(set().union(*(Expression.parse(text).columns for text in formulas)))
    there = signals_of(read_table(table).kinds)
    return [name for name in dict.fromkeys([*read, *SHOWN]) if name in there][:8]


def kept_of(folder: Path, table: Path) -> tuple[np.ndarray, np.ndarray]:
    """Whether each sample is kept, and the reasons against it."""
    columns = read_table(folder / SELECTION / table.name, ["copies", "reasons"]).columns
    return columns["copies"] > 0, columns["reasons"].astype(np.int64)


def histograms(folder: Path, tables: list[Path], names: list[str]) -> dict[str, Histogram]:
    """A histogram per signal; its range is that of some shards without the outermost half percents."""
    found = {}
    for name in names:
        some = np.concatenate([read_table(path, [name]).columns[name] for path in spread(tables)])
        some = some[np.isfinite(some)]
        low, high = np.quantile(some, [0.005, 0.995]) if len(some) else (0.0, 1.0)
        edges = np.linspace(low, high if high > low else low + 1, BINS + 1)
        found[name] = Histogram(edges, np.zeros(BINS), np.zeros(BINS))
    for path in tables:
        kept, _ = kept_of(folder, path)
        for name, values in read_table(path, names).columns.items():
            edges, *both = found[name]
            inside = np.clip(values, edges[0], edges[-1])
            for counts, which in zip(both, (kept, ~kept)):
                counts += np.histogram(inside[which & ~np.isnan(values)], edges)[0]
    return found


def spread(tables: list[Path]) -> list[Path]:
    """At most SHARDS of them, evenly."""
    return [tables[place] for place in sorted({round(x) for x in np.linspace(0, len(tables) - 1, SHARDS)})]


@style.styled
def drawn(found: dict[str, Histogram]) -> bytes:
    """A panel for each histogram, dropped above kept, as PNG."""
    figure, axes = style.panels(-(-len(found) // 2) or 1, 2, height=2.4)
    look: Any = {"color": style.TEXT, "hatch": "//", "edgecolor": "white", "linewidth": 0, "label": "dropped"}
    for axis, (name, (edges, kept, dropped)) in zip(axes, found.items()):
        middle, width = (edges[1:] + edges[:-1]) / 2, np.diff(edges)
        axis.bar(middle, kept, width, color=style.IMAGE, label="kept")
        axis.bar(middle, dropped, width, bottom=kept, **look)
        axis.set_title(name)
        axis.set_ylabel("samples")
    for axis in axes[len(found) :]:
        axis.set_visible(False)
    if found:
        axes[0].legend()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=style.DPI)
    return buffer.getvalue()


def chosen_examples(
    folder: Path, tables: list[Path], summary: dict[str, Any], names: list[str], count: int, read: ShardReader
) -> dict[str, list[Example]]:
    """Examples of each reason and of kept samples, chosen by the hash of their keys, never by how they look."""
    reasons_and_kept = (*summary["reasons"], KEPT)
    wanted: dict[str, list[tuple[int, Path, int]]] = {name: [] for name in reasons_and_kept}
    for path in spread(tables):
        kept, reasons = kept_of(folder, path)
        keys = read_table(path, ["key"]).columns["key"]
        for place, name in enumerate(reasons_and_kept):
            rows = np.flatnonzero(kept if name == KEPT else reasons >> place & 1)
            marked = ((stable_hash(path.name, keys[row], "example"), path, int(row)) for row in rows)
            wanted[name] = heapq.nsmallest(count, [*wanted[name], *marked])
    rows_of: dict[Path, set[int]] = {}
    for _, path, row in (one for found in wanted.values() for one in found):
        rows_of.setdefault(path, set()).add(row)
    examples = {path: examples_of(path, rows, names, read) for path, rows in rows_of.items()}
    return {name: [examples[path][row] for _, path, row in found] for name, found in wanted.items() if found}


def examples_of(path: Path, rows: set[int], names: list[str], read: ShardReader) -> dict[int, Example]:
    """Some rows of a table as examples, with images from its shard as far as it can be read."""
    table = read_table(path, ["key", "caption", "fault", "content", *names[:4]])
    columns, pictures = table.columns, {}
    with suppress(SampleFault):  # a shard that is gone or breaks off: its examples have no image
        samples = islice(read(table.note["shard"], lambda fault: None), max(rows) + 1)
        for row, (content, raw) in enumerate(zip(columns["content"], samples)):
            if row in rows and content_of(raw) == content:
                pictures[row] = thumbnail(raw)
    found = {}
    for row in rows:
        said = columns["fault"][row] or columns["caption"][row]
        numbers = [(name, f"{columns[name][row]:.3g}") for name in names[:4] if np.isfinite(columns[name][row])]
        found[row] = Example(plain(said[:160]), plain(columns["key"][row]), pictures.get(row, ""), numbers)
    return found


def thumbnail(raw: Raw) -> str:
    """A small image for the page, or "" if it cannot be decoded."""
    try:
        image = decode_image(image_bytes(raw))
    except SampleFault:
        return ""
    image.thumbnail((PIXELS, PIXELS), Image.Resampling.LANCZOS)
    return style.picture(image, quality=80)
