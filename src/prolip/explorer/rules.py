"""Curation rules tried on a gallery: how many samples each drops, before any is dropped (`prolip.curate`)."""
from __future__ import annotations

import shlex
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from prolip.curate.columns import MEANINGS
from prolip.curate.expressions import Rule, parse_rules
from prolip.curate.figures import pair_figures, side_figures
from prolip.curate.sources import table_of
from prolip.curate.tables import figures_of, read_table, tables_of, whole_column
from prolip.explorer.captions import Captions, captions_of
from prolip.explorer.gallery import shown
from prolip.search.store import Item

#: Samples whose pairs are computed where nobody has scored them; rows that a normalised score compares within.
SAMPLED, BATCH = 2000, 256
#: Bars of a histogram, rules at once, characters of a rule, samples that are shown of each answer.
BARS, RULES, CHARACTERS, SHOWN = 40, 12, 500, 12


class GalleryTable:
    """What a gallery's embeddings say of its pairs, by the formulas of `prolip.curate.figures`; of a sample where the
    captions are to be embedded for it.

    rows: how many samples have numbers, total: of how many; source: which they are, in words; usable: (rows,) bool,
    what rules apply to; items: samples as the page shows them, with `thumbnail`: the end of its address, or None.
    """

    def __init__(self, captions: Captions):
        self.gallery, self.total = captions.gallery, len(captions.gallery.index)
        self._places, self._columns = gallery_columns(captions)
        self.rows, self.names = len(self._places), list(self._columns)
        self.usable = np.ones(self.rows, dtype=bool)
        self.source = f"all {self.total:,} items"
        if self.rows < self.total:
            self.source = f"{self.rows:,} samples at random of {self.total:,}, by their first captions"

    def column(self, name: str) -> np.ndarray:
        return self._columns[name]

    def items(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        found = self.gallery.describe(self._places[rows].tolist())
        return [item | {"thumbnail": f"item/{item['row']}" if item["picture"] else None} for item in found]


def gallery_columns(captions: Captions) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Rows of a gallery and their columns: of pairs with their first captions, or of the items alone."""
    gallery = captions.gallery
    if captions.embedder is not None and gallery.index.side == "image":
        rows = gallery.sample(SAMPLED)
        first = [captions_of(item)[:1] for item in gallery.index.items(rows.tolist())]
        rows = rows[[bool(texts) for texts in first]]
        if len(rows):
            text = captions.embedder.embed_texts([texts[0] for texts in first if texts])
            image, batches = gallery.index.gaussians(rows.tolist()), torch.arange(len(rows)).split(BATCH)
            parts = [pair_figures(gallery.own, image.select(i), text.select(i), gallery.probabilistic) for i in batches]
            return rows, {name: torch.cat([part[name] for part in parts]).numpy() for name in parts[0]}
    trace = gallery.uncertainty()
    rows = np.flatnonzero(~np.isnan(trace))
    if not gallery.probabilistic:
        return rows, {}
    found = side_figures(gallery.own, torch.from_numpy(trace[rows]), gallery.index.side)
    return rows, {name: x.numpy() for name, x in found.items()}


class ScoredTable:
    """What `prolip curate score` has written of shards, all of it, with the names of `GalleryTable`; a column is read
    when it is asked for.
    """

    def __init__(self, folder: Path):
        manifest, self.paths = tables_of(folder)
        self.folder = shlex.quote(str(folder))
        usable = [read_table(path, ["fault"]).columns["fault"] == np.array(None) for path in self.paths]
        self.usable, self._starts = np.concatenate(usable), np.cumsum([0, *map(len, usable)])
        self.rows = self.total = len(self.usable)
        self.source = f"all {self.rows:,} samples that are scored in {folder}"
        self.names = figures_of(manifest["columns"])
        self.column = cache(partial(whole_column, self.paths))

    def item(self, row: int) -> Item:
        """A sample as an index would know it. KeyError for none."""
        if not 0 <= row < self.rows:
            raise KeyError(f"no sample {row!r}: there are {self.rows:,}, counted from 0")
        number = int(np.searchsorted(self._starts, row, side="right")) - 1
        table, place = read_table(self.paths[number], ["key", "caption"]), row - int(self._starts[number])
        shard, key = table.note["shard"], table.columns["key"][place]
        place_of = {"table": shard, "row": place} if table_of(shard) else {"shard": shard}
        return {"key": f"{Path(shard).stem}/{key}", **place_of, "captions": [table.columns["caption"][place] or ""]}

    def items(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        return [{**shown(self.item(int(row))), "row": None, "thumbnail": f"sample/{int(row)}"} for row in rows]


Table = GalleryTable | ScoredTable


def describe(table: Table) -> dict[str, Any]:
    """Every column with its meaning, its quantiles in hundredths and its histogram."""
    return {"rows": table.rows, "total": table.total, "source": table.source,
            "columns": [summary(table, name) for name in table.names]}  # fmt: skip


def summary(table: Table, name: str) -> dict[str, Any]:
    """quantiles: 101 values; bars: counts between the first and the last hundredth."""
    values = table.column(name).astype(np.float64)
    values = values[np.isfinite(values)]
    if not len(values):
        return {"name": name, "meaning": MEANINGS.get(name, name), "quantiles": [], "bars": []}
    quantiles = np.quantile(values, np.linspace(0, 1, 101))
    bars, _ = np.histogram(values, BARS, (quantiles[0], max(quantiles[-1], np.nextafter(quantiles[0], np.inf))))
    inner = [float(f"{x:.5g}") for x in quantiles[1:-1].tolist()]
    rounded = [outward(float(quantiles[0]), -1), *inner, outward(float(quantiles[-1]), 1)]
    return {"name": name, "meaning": MEANINGS.get(name, name), "quantiles": rounded, "bars": bars.tolist()}


def outward(value: float, way: int) -> float:
    """To five digits and never inwards, so that a rule at an end drops nothing; way: -1 down, 1 up."""
    near = float(f"{value:.5g}")
    return near if way * (near - value) >= 0 else float(f"{value + way * abs(value) * 1e-4:.5g}")


def try_rules(table: Table, texts: Sequence[str]) -> dict[str, Any]:
    """What rules `NAME: FORMULA` would drop, counted as `prolip curate select` does: by each, by it alone, by any.

    command: where the samples were scored, or nothing; shown: some that are dropped, with why, and some that are kept,
    spread over all. ValueError for what is no rule.
    """
    if len(texts) > RULES or any(not isinstance(text, str) or len(text) > CHARACTERS for text in texts):
        raise ValueError(f"give at most {RULES} rules of at most {CHARACTERS} characters each")
    rules = parse_rules(list(texts))
    usable = table.usable
    hits = np.stack([np.zeros_like(usable), *(dropped(table, rule) & usable for rule in rules)])
    any_of, how_many = np.asarray(hits.any(0)), hits.sum(0)
    kept = usable & ~any_of
    given = " ".join(f"--drop {shlex.quote(f'{rule.name}: {rule.drop.text}')}" for rule in rules)
    return {
        "rows": table.rows, "total": table.total, "unusable": int((~usable).sum()), "kept": int(kept.sum()),
        "rules": [{"name": rule.name, "dropped": int(hit.sum()), "alone": int((hit & (how_many == 1)).sum())}
                  for rule, hit in zip(rules, hits[1:])],
        "command": f"prolip curate select {table.folder} {given}".strip() if isinstance(table, ScoredTable) else "",
        "shown": {"dropped": examples(table, any_of, rules, hits[1:]), "kept": examples(table, kept, [], hits[:0])},
    }  # fmt: skip


def dropped(table: Table, rule: Rule) -> np.ndarray:
    """Of which samples a rule is true, (rows,) bool."""
    rule.drop.check_columns(table.names)
    columns = {name: table.column(name) for name in rule.drop.columns}
    quantiles = {(name, share): float(np.nanquantile(table.column(name), share)) for name, share in rule.drop.quantiles}
    if not columns:
        raise ValueError(f"{rule.drop.text!r} names no column: there are {', '.join(table.names)}")
    return np.asarray(rule.drop(columns, quantiles), dtype=bool)


def examples(table: Table, chosen: np.ndarray, rules: Sequence[Rule], hits: np.ndarray) -> list[dict[str, Any]]:
    """Some of the chosen samples, evenly spread, and the names of the rules that drop them."""
    rows = np.flatnonzero(chosen)
    rows = rows[np.linspace(0, len(rows) - 1, min(SHOWN, len(rows))).astype(int)] if len(rows) else rows
    return [item | {"reasons": [rule.name for rule, hit in zip(rules, hits) if hit[row]]}
            for item, row in zip(table.items(rows.tolist()), rows.tolist())]  # fmt: skip
