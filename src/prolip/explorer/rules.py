"""Try curation rules (`prolip.curate`) on a gallery: how many samples each drops, before any is dropped."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from prolip.curate.rules import MEANINGS, Rule, parse_rules
from prolip.curate.select import UNUSABLE, Choice, check_noise, quantile
from prolip.curate.signals import pair_columns, side_columns
from prolip.curate.sources import table_of
from prolip.curate.tables import read_table, signals_of, tables_of, whole_column
from prolip.explorer.gallery import Captions, captions_of, shown
from prolip.search.store import Item

#: Samples whose signals are computed if they are not scored; rows of a batch, within which a normalised score compares.
SAMPLED, BATCH = 2000, 256
#: Bars of a histogram, rules at once, characters of a rule, samples that are shown.
BARS, RULES, CHARACTERS, SHOWN = 40, 12, 500, 12


class Samples(NamedTuple):
    """Samples with the columns that rules read. source: in words; usable: (N,) bool, what rules apply to; column: name
    -> (N,); items: rows for the page, each with `thumbnail`, the end of its address, or None; item: a row as the index
    has it, or KeyError; command: that selects.
    """

    source: str
    usable: np.ndarray
    names: list[str]
    column: Callable[[str], np.ndarray]
    items: Callable[[Sequence[int]], list[dict[str, Any]]]
    item: Callable[[int], Item]
    command: str = ""


def gallery_table(captions: Captions) -> Samples:
    """The items of a gallery; a sample of them if their captions are to be embedded for it."""
    gallery, total = captions.gallery, len(captions.gallery.index)
    places, columns = gallery_columns(captions)
    source = f"all {total:,} items"
    if len(places) < total:
        source = f"{len(places):,} samples at random of {total:,}, by their first captions"

    def items(rows: Sequence[int]) -> list[dict[str, Any]]:
        found = gallery.describe(places[rows].tolist())
        return [item | {"thumbnail": f"item/{item['row']}" if item["picture"] else None} for item in found]

    usable = np.ones(len(places), dtype=bool)
    return Samples(source, usable, list(columns), columns.__getitem__, items, gallery.item)


def gallery_columns(captions: Captions) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Rows of a gallery, and the columns of pairs with their first captions, or of the items alone."""
    gallery = captions.gallery
    if captions.embedder is not None and gallery.index.side == "image":
        rows = gallery.sample(SAMPLED)
        first = [captions_of(item)[:1] for item in gallery.index.items(rows.tolist())]
        rows = rows[[bool(texts) for texts in first]]
        if len(rows):
            text = captions.embedder.embed_texts([texts[0] for texts in first if texts])
            image, batches = gallery.index.gaussians(rows.tolist()), torch.arange(len(rows)).split(BATCH)
            parts = [pair_columns(gallery.own, image.select(i), text.select(i), gallery.probabilistic) for i in batches]
            return rows, {name: torch.cat([part[name] for part in parts]).numpy() for name in parts[0]}
    trace = gallery.uncertainty()
    rows = np.flatnonzero(~np.isnan(trace))
    if not gallery.probabilistic:
        return rows, {}
    found = side_columns(gallery.own, torch.from_numpy(trace[rows]), gallery.index.side)
    return rows, {name: x.numpy() for name, x in found.items()}


def scored_table(folder: Path) -> Samples:
    """All samples that `prolip curate score` has scored; a column is read when it is first used."""
    manifest, paths = tables_of(folder)
    parts = [read_table(path, ["fault"]).columns["fault"] == np.array(None) for path in paths]
    usable, starts = np.concatenate(parts), np.cumsum([0, *map(len, parts)])

    def item(row: int) -> Item:
        if not 0 <= row < len(usable):
            raise KeyError(f"no sample {row!r}: there are {len(usable):,}, counted from 0")
        number = int(np.searchsorted(starts, row, side="right")) - 1
        table, place = read_table(paths[number], ["key", "caption"]), row - int(starts[number])
        shard, key = table.note["shard"], table.columns["key"][place]
        place_of = {"table": shard, "row": place} if table_of(shard) else {"shard": shard}
        return {"key": f"{Path(shard).stem}/{key}", **place_of, "captions": [table.columns["caption"][place] or ""]}

    def items(rows: Sequence[int]) -> list[dict[str, Any]]:
        return [{**shown(item(row)), "row": None, "thumbnail": f"sample/{row}"} for row in rows]

    source, command = (
        f"all {len(usable):,} samples that are scored in {folder}",
        f"prolip curate select {shlex.quote(str(folder))}",
    )
    column = cache(partial(whole_column, paths))
    return Samples(source, usable, signals_of(manifest["columns"]), column, items, item, command)


def describe(table: Samples) -> dict[str, Any]:
    """Every column with its meaning, quantiles and histogram."""
    return {"source": table.source, "columns": [summary(table, name) for name in table.names]}


def summary(table: Samples, name: str) -> dict[str, Any]:
    """quantiles: 101 values; bars: counts between the first and the last hundredth."""
    values = table.column(name).astype(np.float64)
    values, found = values[np.isfinite(values)], {"name": name, "meaning": MEANINGS.get(name, name)}
    if not len(values):
        return found | {"quantiles": [], "bars": []}
    quantiles = np.quantile(values, np.linspace(0, 1, 101))
    bars, _ = np.histogram(values, BARS, (quantiles[0], max(quantiles[-1], np.nextafter(quantiles[0], np.inf))))
    inner = [float(f"{x:.5g}") for x in quantiles[1:-1].tolist()]
    rounded = [outward(float(quantiles[0]), -1), *inner, outward(float(quantiles[-1]), 1)]
    return found | {"quantiles": rounded, "bars": bars.tolist()}


def outward(value: float, way: int) -> float:
    """Round to five digits, outwards, so that a rule at an end drops nothing; way: -1 down, 1 up."""
    near = float(f"{value:.5g}")
    return near if way * (near - value) >= 0 else float(f"{value + way * abs(value) * 1e-4:.5g}")


def try_rules(table: Samples, texts: Sequence[str]) -> dict[str, Any]:
    """Count what rules `NAME: FORMULA` would drop, as `prolip curate select` does: by each, by it alone, by any.
    command: selects scored samples; shown: some dropped samples with the reasons, and some kept ones, evenly spread.
    ValueError for what is no rule.
    """
    if len(texts) > RULES or any(not isinstance(text, str) or len(text) > CHARACTERS for text in texts):
        raise ValueError(f"give at most {RULES} rules of at most {CHARACTERS} characters each")
    choice, usable = Choice(rules=parse_rules(list(texts))), table.usable
    reasons, bits = np.where(usable, np.uint64(0), choice.bits[UNUSABLE]), choice.bits
    for rule in choice.rules:
        reasons |= np.where(dropped(table, rule) & usable, bits[rule.name], np.uint64(0))
    words = [f"--drop {shlex.quote(f'{rule.name}: {rule.drop.text}')}" for rule in choice.rules]
    try:
        check_noise(choice, reasons, "")
    except ValueError:  # rules on scores drop more than half
        words.append("--yes")
    counts = [
        {"name": name, "dropped": int((reasons & bits[name] > 0).sum()), "alone": int((reasons == bits[name]).sum())}
        for name in (rule.name for rule in choice.rules)
    ]
    some = {"dropped": usable & (reasons > 0), "kept": reasons == 0}
    return {
        "rows": len(usable),
        "unusable": int((~usable).sum()),
        "kept": int((reasons == 0).sum()),
        "rules": counts,
        "command": " ".join([table.command, *words]) if table.command else "",
        "shown": {name: examples(table, which, choice, reasons) for name, which in some.items()},
    }


def dropped(table: Samples, rule: Rule) -> np.ndarray:
    """Of which samples a rule is true, (N,) bool."""
    rule.drop.check_columns(table.names)
    columns = {name: table.column(name) for name in rule.drop.columns}
    quantiles = {(name, share): quantile(table.column(name), share) for name, share in rule.drop.quantiles}
    if not columns:
        raise ValueError(f"{rule.drop.text!r} names no column: there are {', '.join(table.names)}")
    return np.asarray(rule.drop(columns, quantiles), dtype=bool)


def examples(table: Samples, chosen: np.ndarray, choice: Choice, reasons: np.ndarray) -> list[dict[str, Any]]:
    """Some of the chosen samples, evenly spread, and the names of the rules that drop them."""
    rows = np.flatnonzero(chosen)
    rows = rows[np.linspace(0, len(rows) - 1, min(SHOWN, len(rows))).astype(int)]
    return [
        item | {"reasons": [name for name, bit in choice.bits.items() if reasons[row] & bit]}
        for item, row in zip(table.items(rows.tolist()), rows.tolist())
    ]
