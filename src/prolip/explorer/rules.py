"""Trial of curation rules (`prolip.curate`) on a gallery: how many samples each would drop."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from prolip.curate.rules import MEANINGS, parse_rules
from prolip.curate.score import pair_columns, side_columns, table_of
from prolip.curate.select import UNUSABLE, Choice, check_noise, quantile
from prolip.curate.tables import read_table, signals_of, tables_of, whole_column
from prolip.explorer.gallery import Captions, captions_of, shown
from prolip.search.store import Item

#: Samples to compute signals of if they have no scores; rows of a batch, within which scores are normalised.
SAMPLED, BATCH = 2000, 256
#: Bars of a histogram, rules at once, characters of a rule, samples to show.
BARS, RULES, CHARACTERS, SHOWN = 40, 12, 500, 12


class RuleTable(NamedTuple):
    """Samples with the columns that rules read; source: description; command: to select by the rules."""

    source: str
    usable: np.ndarray  # (N,) bool, where rules apply
    names: list[str]
    column: Callable[[str], np.ndarray]  # name -> (N,)
    items: Callable[[Sequence[int]], list[dict[str, Any]]]  # rows for the page; `thumbnail`: end of an address, or None
    item: Callable[[int], Item]  # a row as in the index, or KeyError
    command: str = ""


def gallery_table(captions: Captions) -> RuleTable:
    """Return only the items of a gallery, or a sample of them with their first captions, which it embeds."""
    gallery, total = captions.gallery, len(captions.gallery.index)
    rows, columns = np.zeros(0, dtype=np.int64), dict[str, torch.Tensor]()
    if captions.embedder is not None and gallery.index.side == "image":
        sample = gallery.sample(SAMPLED)
        first = [captions_of(item)[:1] for item in gallery.index.items(sample.tolist())]
        rows = sample[[bool(texts) for texts in first]]
    if captions.embedder is not None and len(rows):
        text = captions.embedder.embed_texts([texts[0] for texts in first if texts])
        image, batches = gallery.index.gaussians(rows.tolist()), torch.arange(len(rows)).split(BATCH)
        parts = [pair_columns(gallery.own, image.select(i), text.select(i), gallery.probabilistic) for i in batches]
        columns = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    else:
        trace = gallery.uncertainty()
        rows = np.flatnonzero(~np.isnan(trace))
        if gallery.probabilistic:
            columns = side_columns(gallery.own, torch.from_numpy(trace[rows]), gallery.index.side)

    def items(some: Sequence[int]) -> list[dict[str, Any]]:
        found = gallery.describe(rows[some].tolist())
        return [item | {"thumbnail": f"item/{item['row']}" if item["picture"] else None} for item in found]

    source = f"all {total:,} items"
    if len(rows) < total:
        source = f"{len(rows):,} random samples of {total:,}, with their first captions"
    usable = np.ones(len(rows), dtype=bool)
    return RuleTable(source, usable, list(columns), lambda name: columns[name].numpy(), items, gallery.item)


def scored_table(folder: Path) -> RuleTable:
    """Return all samples scored by `prolip curate score`; a column is read when it is first used."""
    manifest, paths = tables_of(folder)
    parts = [read_table(path, ["fault"]).columns["fault"] == np.array(None) for path in paths]
    usable, starts = np.concatenate(parts), np.cumsum([0, *map(len, parts)])

    def item(row: int) -> Item:
        if not 0 <= row < len(usable):
            raise KeyError(f"no sample {row!r}: expected a number from 0 to below {len(usable):,}")
        number = int(np.searchsorted(starts, row, side="right")) - 1
        table, place = read_table(paths[number], ["key", "caption"]), row - int(starts[number])
        shard, key = table.note["shard"], table.columns["key"][place]
        place_of = {"table": shard, "row": place} if table_of(shard) else {"shard": shard}
        return {"key": f"{Path(shard).stem}/{key}", **place_of, "captions": [table.columns["caption"][place] or ""]}

    def items(rows: Sequence[int]) -> list[dict[str, Any]]:
        return [{**shown(item(row)), "row": None, "thumbnail": f"sample/{row}"} for row in rows]

    source = f"all {len(usable):,} samples scored in {folder}"
    command = f"prolip curate select {shlex.quote(str(folder))}"
    column = cache(partial(whole_column, paths))
    return RuleTable(source, usable, signals_of(manifest["columns"]), column, items, item, command)


def describe(table: RuleTable) -> dict[str, Any]:
    """Return every column with its meaning, 101 quantiles, and counts between the first and the last hundredth."""
    found = []
    for name in table.names:
        values = table.column(name).astype(np.float64)
        values, summary = values[np.isfinite(values)], {"name": name, "meaning": MEANINGS.get(name, name)}
        if len(values):
            quantiles = np.quantile(values, np.linspace(0, 1, 101))
            low, high = quantiles[[0, -1]].tolist()
            bars, _ = np.histogram(values, BARS, (low, high if high > low else low + 1))
            inner = [float(f"{x:.5g}") for x in quantiles[1:-1].tolist()]
            rounded = [outward(low, -1), *inner, outward(high, 1)]
            found.append(summary | {"quantiles": rounded, "bars": bars.tolist()})
        else:
            found.append(summary | {"quantiles": [], "bars": []})
    return {"source": table.source, "columns": found}


def outward(value: float, way: int) -> float:
    """Round to five digits outwards, so that a rule at an end drops nothing; way: -1 down, 1 up."""
    near = float(f"{value:.5g}")
    return near if way * (near - value) >= 0 else float(f"{value + way * abs(value) * 1e-4:.5g}")


def try_rules(table: RuleTable, texts: Sequence[str]) -> dict[str, Any]:
    """Count the samples that rules `NAME: FORMULA` drop, as `prolip curate select` does; add a command and examples."""
    if len(texts) > RULES or any(not isinstance(text, str) or len(text) > CHARACTERS for text in texts):
        raise ValueError(f"give at most {RULES} rules of at most {CHARACTERS} characters each")
    choice, usable = Choice(rules=parse_rules(list(texts))), table.usable
    reasons, bits = np.where(usable, np.uint64(0), choice.bits[UNUSABLE]), choice.bits
    for rule in choice.rules:
        rule.drop.check_columns(table.names)
        columns = {name: table.column(name) for name in rule.drop.columns}
        quantiles = {(name, share): quantile(table.column(name), share) for name, share in rule.drop.quantiles}
        if not columns:
            raise ValueError(f"{rule.drop.text!r} names no column: use {', '.join(table.names)}")
        dropped = np.asarray(rule.drop(columns, quantiles), dtype=bool)
        reasons |= np.where(dropped & usable, bits[rule.name], np.uint64(0))
    words = [f"--drop {shlex.quote(f'{rule.name}: {rule.drop.text}')}" for rule in choice.rules]
    try:
        check_noise(choice, reasons, "")
    except ValueError:  # rules on scores drop more than half
        words.append("--yes")
    counts = [
        {"name": name, "dropped": int((reasons & bits[name] > 0).sum()), "alone": int((reasons == bits[name]).sum())}
        for name in (rule.name for rule in choice.rules)
    ]
    examples = {}
    for name, chosen in (("dropped", usable & (reasons > 0)), ("kept", reasons == 0)):
        rows = np.flatnonzero(chosen)
        rows = rows[np.linspace(0, len(rows) - 1, min(SHOWN, len(rows))).astype(int)]
        items = zip(table.items(rows.tolist()), reasons[rows])
        examples[name] = [item | {"reasons": [x for x, bit in bits.items() if own & bit]} for item, own in items]
    return {
        "rows": len(usable),
        "unusable": int((~usable).sum()),
        "kept": int((reasons == 0).sum()),
        "rules": counts,
        "command": " ".join([table.command, *words]) if table.command else "",
        "shown": examples,
    }
