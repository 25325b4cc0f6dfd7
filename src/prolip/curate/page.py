"""The report page of a selection: what was dropped, why, and what it looks like; one file with everything in it."""
from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from PIL import Image

from prolip.curate.expressions import Expression
from prolip.curate.figures import MEANINGS
from prolip.curate.select import KEPT, SELECTION, counted, selection_of
from prolip.curate.sources import content_of
from prolip.curate.tables import PLACE, SIGNATURE, column_names, manifest_of, read_columns, read_note
from prolip.data.faults import SampleFault
from prolip.data.reading.tar import ShardReader
from prolip.data.samples.captions import stable_hash
from prolip.data.samples.decoding import decode_image
from prolip.data.samples.sample import image_bytes
from prolip.report.examples import data_uri
from prolip.utils import style
from prolip.utils.console import plain
from prolip.utils.outputs import replacing

PAGE = "report.html"
#: Shards that examples are taken from, spread evenly; bins of a histogram; pixels of a picture.
SHARDS, BINS, PIXELS = 8, 60, 112
#: Figures that a page shows whether or not a rule reads them.
SHOWN = ("match_probability", "normalised_score", "cosine", "text_bits", "image_bits", "text_uncertainty",
         "image_uncertainty")  # fmt: skip


class Example(NamedTuple):
    """A sample as the page shows it. figures: name and number in print."""

    caption: str
    key: str
    picture: str
    figures: list[tuple[str, str]]


class Histogram:
    """How many samples are kept and dropped in each bin of a figure, filled table by table."""

    def __init__(self, low: float, high: float):
        self.edges = np.linspace(low, high if high > low else low + 1, BINS + 1)
        self.counts = {True: np.zeros(BINS), False: np.zeros(BINS)}

    def add(self, values: np.ndarray, kept: np.ndarray) -> None:
        """Count a table's values; what lies outside goes into the outer bins."""
        inside = np.clip(values, self.edges[0], self.edges[-1])
        for which, counts in self.counts.items():
            counts += np.histogram(inside[(kept == which) & ~np.isnan(values)], self.edges)[0]


def write_page(folder: Path, examples: int = 12, read: ShardReader = ShardReader()) -> Path:  # noqa: B008  # frozen
    """Write the page of the selection in `folder`; `examples` of each reason. ValueError without a selection."""
    summary, tables = selection_of(folder)
    figures = shown_figures(tables[0], summary)
    environment = Environment(loader=PackageLoader("prolip.curate", "."), autoescape=True, undefined=StrictUndefined,
                              trim_blocks=True, lstrip_blocks=True)  # fmt: skip
    page = environment.get_template("page.html.j2").render(
        title=f"Curated: {plain(folder.resolve().name)}", summary=summary, faults=counted(folder),
        model=manifest_of(folder)["model"],
        picture=data_uri(picture_of(histograms(folder, tables, figures)), "png"),
        meanings={name: MEANINGS.get(name, "novelty in nats, of models that know it") for name in figures},
        examples=chosen(folder, tables, summary, figures, examples, read), kept=KEPT,
    )  # fmt: skip
    path = folder / PAGE
    with replacing(path) as temporary:
        temporary.write_text(page, encoding="utf-8", errors="replace")
    return path


def shown_figures(table: Path, summary: dict[str, Any]) -> list[str]:
    """The columns that a rule reads, then those that are always shown, as far as there are any."""
    choice = summary["choice"]
    formulas = [*choice["drop"].values(), *(choice[name] for name in ("by", "copies") if choice[name])]
    read = sorted(set().union(*(Expression.parse(text).columns for text in formulas)))
    there = [name for name in column_names(table) if name not in PLACE and name != SIGNATURE]
    return [name for name in dict.fromkeys([*read, *SHOWN]) if name in there][:8]


def kept_of(folder: Path, table: Path) -> tuple[np.ndarray, np.ndarray]:
    """Whether each sample is kept, and the reasons against it."""
    columns = read_columns(folder / SELECTION / table.name, ["copies", "reasons"])
    return columns["copies"] > 0, columns["reasons"].astype(np.int64)


def histograms(folder: Path, tables: list[Path], figures: list[str]) -> dict[str, Histogram]:
    """Of every figure; the range is that of all but the outermost half percent of some shards."""
    found = {}
    for name in figures:
        some = np.concatenate([read_columns(path, [name])[name] for path in spread(tables)])
        some = some[np.isfinite(some)]
        found[name] = Histogram(*(np.quantile(some, [0.005, 0.995]) if len(some) else (0.0, 1.0)))
    for path in tables:
        kept, _ = kept_of(folder, path)
        for name, values in read_columns(path, figures).items():
            found[name].add(values, kept)
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
        kept, dropped = one.counts[True], one.counts[False]
        axis.bar(middle, kept, width, color=style.IMAGE, label="kept")
        axis.bar(middle, dropped, width, bottom=kept, color=style.TEXT, hatch="//", edgecolor="white", linewidth=0,
                 label="dropped")  # fmt: skip
        axis.set_title(name)
        axis.set_ylabel("samples")
    for axis in axes[len(found):]:
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
    wanted: dict[str, list[tuple[int, Path, int]]] = {name: [] for name in (*summary["reasons"], KEPT)}
    for path in spread(tables):
        kept, reasons = kept_of(folder, path)
        keys = read_columns(path, ["key"])["key"]
        for place, name in enumerate((*summary["reasons"], KEPT)):
            rows = np.flatnonzero(kept if name == KEPT else reasons >> place & 1)
            ranked = sorted((stable_hash(path.name, keys[row], "example"), row) for row in rows)
            wanted[name] += [(mark, path, int(row)) for mark, row in ranked[:count]]
    picked = {name: sorted(found)[:count] for name, found in wanted.items()}
    pictures = dict(read_pictures({(path, row) for found in picked.values() for _, path, row in found}, read))
    return {name: [example_of(path, row, pictures, figures) for _, path, row in found]
            for name, found in picked.items() if found}  # fmt: skip


def read_pictures(places: set[tuple[Path, int]], read: ShardReader) -> Iterator[tuple[tuple[Path, int], str]]:
    """Thumbnails of samples, by table and row, from the shards as far as these can be read."""
    for path in sorted({path for path, _ in places}):
        rows = {row for table, row in places if table == path}
        try:
            contents = read_columns(path, ["content"])["content"]
            for row, (content, raw) in enumerate(zip(contents, read(read_note(path)["shard"], lambda fault: None))):
                if row in rows and content_of(raw) == content:
                    yield (path, row), thumbnail(raw)
                if row >= max(rows):
                    break
        except SampleFault:  # a shard that is gone, or breaks off: its examples have no picture
            continue


def thumbnail(raw: dict[str, Any]) -> str:
    """A small picture, or nothing for what cannot be decoded."""
    try:
        image = decode_image(image_bytes(raw))
    except SampleFault:
        return ""
    image.thumbnail((PIXELS, PIXELS), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, format="webp", quality=80)
    return data_uri(buffer.getvalue(), "webp")


def example_of(path: Path, row: int, pictures: dict[tuple[Path, int], str], figures: list[str]) -> Example:
    """One sample for the page."""
    columns = read_columns(path, ["key", "caption", "fault", *figures])
    said = columns["fault"][row] or columns["caption"][row]
    numbers = [(name, f"{columns[name][row]:.3g}") for name in figures[:4] if np.isfinite(columns[name][row])]
    return Example(plain(said[:160]), plain(columns["key"][row]), pictures.get((path, row), ""), numbers)
