"""Which samples are kept, and why others are not: rules, near-duplicates, a share to keep, copies."""
from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from prolip.curate.duplicates import duplicates_of, radius_of, read_signatures
from prolip.curate.expressions import Expression, Rule
from prolip.curate.score import SCORES
from prolip.curate.tables import (
    PLACE,
    SIGNATURE,
    column_names,
    in_order,
    read_columns,
    read_note,
    whole_column,
    write_table,
)
from prolip.data.samples.captions import stable_hash

SELECTION = "selection"
SUMMARY = "selection.json"
#: Reasons that are no rules: it could not be read; it repeats a better one; it is not in the share that is kept; the
#: draw of its copies gave none.
UNUSABLE, DUPLICATE, RANK, COPIES = "unusable", "duplicate", "rank", "copies"
OWN = (UNUSABLE, DUPLICATE, RANK, COPIES)
MOST_COPIES = 10


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What is kept. rules: what is dropped; keep: the share of all samples that stays at most, the best `by`; copies:
    how often a sample is written on average, 0 to 10; duplicates: the cosine from which images count as one.
    """

    rules: Sequence[Rule] = ()
    keep: float = 1.0
    by: Expression | None = None
    copies: Expression | None = None
    duplicates: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise ValueError(f"--keep {self.keep}: give the share of the samples that is kept, above 0 to 1")
        if self.keep < 1 and self.by is None:
            raise ValueError(f"--keep {self.keep} of the samples by what? Give --by, such as --by normalised_score")
        if clash := [rule.name for rule in self.rules if rule.name in OWN]:
            raise ValueError(f"--drop {clash[0]}: ... is a reason of its own already: give another name")
        if self.duplicates is not None:
            radius_of(self.duplicates)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Names of the bits of the column `reasons`, the lowest first."""
        return (*OWN, *(rule.name for rule in self.rules))

    @property
    def expressions(self) -> list[Expression]:
        """All formulas."""
        return [rule.drop for rule in self.rules] + [x for x in (self.by, self.copies) if x is not None]

    def words(self) -> dict[str, Any]:
        """What it says, JSON-able."""
        return {
            "drop": {rule.name: rule.drop.text for rule in self.rules}, "keep": self.keep,
            "by": self.by and self.by.text, "copies": self.copies and self.copies.text, "duplicates": self.duplicates,
        }  # fmt: skip


def select(folder: Path, choice: Choice) -> dict[str, Any]:
    """Decide on every sample that has scores below `folder`; write the tables and their summary, and return this.

    Figures of all samples are held for one column at a time: some 8 bytes a sample, 32 more for duplicates.
    ValueError for a column that is not there.
    """
    paths = tables_of(folder)
    names = [name for name in column_names(paths[0]) if name not in PLACE and name != SIGNATURE]
    for expression in choice.expressions:
        expression.check_columns(names)
    quantiles = {(name, share): float(np.nanquantile(whole_column(paths, name), share))
                 for name, share in sorted(set().union(*(x.quantiles for x in choice.expressions)))}  # fmt: skip
    reasons = decide(paths, choice, quantiles)
    counts = [len(read_columns(path, ["row"])["row"]) for path in paths]
    copies = np.where(reasons == 0, 1, 0).astype(np.uint8)
    if choice.copies is not None:
        copies = drawn_copies(paths, choice.copies, quantiles) * copies
        reasons[(copies == 0) & (reasons == 0)] |= bit(choice, COPIES)
    start, kept = 0, []
    for path, count in zip(paths, counts):
        rows = slice(start, start + count)
        start += count
        kept.append(int(copies[rows].sum()))
        columns = {"row": pa.array(np.arange(count), pa.int32()), "copies": pa.array(copies[rows]),
                   "reasons": pa.array(reasons[rows])}  # fmt: skip
        write_table(folder / SELECTION / path.name, columns, read_note(path) | {"choice": choice.words()})
    summary = {
        "choice": choice.words(), "reasons": choice.reasons, "samples": int(sum(counts)),
        "kept": int((copies > 0).sum()), "written": int(copies.sum()), "by_shard": kept,
        "quantiles": {f"{name} at {share:g}": value for (name, share), value in quantiles.items()},
        "dropped": {name: int((reasons & bit(choice, name) > 0).sum()) for name in choice.reasons},
        "dropped_alone": {name: int((reasons == bit(choice, name)).sum()) for name in choice.reasons},
    }  # fmt: skip
    (folder / SUMMARY).write_text(json.dumps(summary, indent=1))
    return summary


def tables_of(folder: Path) -> list[Path]:
    """The scores of all shards, in order. ValueError where one is missing: its number says which."""
    paths = sorted((folder / SCORES).glob("[0-9]*.parquet"))
    if not paths:
        raise ValueError(f"no scores in {folder / SCORES}: run `python -m prolip.curate score` first")
    shards = read_note(paths[0])["shards"]
    missing = sorted(set(range(shards)) - {int(path.stem) for path in paths})
    if missing:
        raise ValueError(f"{len(missing)} of {shards} shards have no scores yet, number {missing[0]} for one: go on"
                         " with `python -m prolip.curate score`, in all of its parts")  # fmt: skip
    return paths


def bit(choice: Choice, name: str) -> np.uint32:
    """The bit of a reason."""
    return np.uint32(1 << choice.reasons.index(name))


def decide(paths: Sequence[Path], choice: Choice, quantiles: dict[tuple[str, float], float]) -> np.ndarray:
    """The reasons against every sample, (N,) uint32, 0: none."""
    found = []
    wanted = sorted({"fault", *(name for rule in choice.rules for name in rule.drop.columns)})
    for _, columns in in_order(paths, wanted):
        faulty = np.array([fault is not None for fault in columns["fault"]], dtype=bool)
        own = np.where(faulty, bit(choice, UNUSABLE), np.uint32(0))
        for rule in choice.rules:
            own |= np.where(rule.drop(columns, quantiles) & ~faulty, bit(choice, rule.name), np.uint32(0))
        found.append(own)
    reasons = np.concatenate(found)
    value = values(paths, choice.by, quantiles) if choice.by is not None else None
    if choice.duplicates is not None:
        quality = whole_column(paths, "cosine") if value is None else value
        repeated = duplicates_of(read_signatures(paths), quality, reasons == 0, radius_of(choice.duplicates))
        reasons[repeated >= 0] |= bit(choice, DUPLICATE)
    room = int(choice.keep * len(reasons))
    rows = np.flatnonzero(reasons == 0)
    if value is not None and len(rows) > room:
        order = np.lexsort((rows, -np.nan_to_num(value[rows], nan=-np.inf)))
        reasons[rows[order[room:]]] |= bit(choice, RANK)
    return reasons


def values(paths: Sequence[Path], expression: Expression, quantiles: dict[tuple[str, float], float]) -> np.ndarray:
    """A formula's value of every sample, (N,) float64."""
    names = sorted({"row", *expression.columns})
    return np.concatenate([np.asarray(expression(x, quantiles), np.float64) for _, x in in_order(paths, names)])


def drawn_copies(
    paths: Sequence[Path], expression: Expression, quantiles: dict[tuple[str, float], float]
) -> np.ndarray:
    """How often each sample is written, (N,) uint8: w of the formula as floor(w), and one more with the probability of
    the rest, drawn by the sample's key.
    """
    found = []
    for path, columns in in_order(paths, sorted({"key", *expression.columns})):
        shard = read_note(path)["shard"]
        mean = np.clip(np.nan_to_num(np.asarray(expression(columns, quantiles), np.float64)), 0, MOST_COPIES)
        chance = np.array([stable_hash(shard, key, "copies") / 2**64 for key in columns["key"]])
        found.append((np.floor(mean) + (chance < mean - np.floor(mean))).astype(np.uint8))
    return np.concatenate(found)


def write_subset(folder: Path, place: Path) -> int:
    """The kept samples as a subset file of DataComp's filtering track; returns how many.

    An array of two 64-bit numbers a sample, its uid's 32 hexadecimal digits, sorted, as the track's resharder reads it.
    ValueError where samples have no such uid.
    """
    halves = []
    for path in tables_of(folder):
        copies = read_columns(folder / SELECTION / path.name, ["copies"])["copies"]
        columns = read_columns(path, ["uid", "key"])
        for uid, key in zip(columns["uid"][copies > 0], columns["key"][copies > 0]):
            try:
                halves.append((int(uid[:16], 16), int(uid[16:32], 16)))
            except (TypeError, ValueError):
                raise ValueError(f"sample {key!r} has the uid {uid!r}: a subset file wants 32 hexadecimal digits as "
                                 '"uid" in the JSON of each sample, as DataComp\'s shards have') from None
    uids = np.array(halves, np.dtype("u8,u8"))
    uids.sort()
    np.save(place, uids)
    return len(uids)


def counted(folder: Path) -> Counter[str]:
    """Faults by kind, of all tables."""
    found: Counter[str] = Counter()
    for path in tables_of(folder):
        found.update(read_note(path).get("faults", {}))
    return found
