"""Selection of the samples to keep: rules, a share, copies, and near-duplicates by signatures."""

from __future__ import annotations

import json
import math
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pyarrow as pa

from prolip.curate import tables
from prolip.curate.rules import PLAIN, Expression, Quantiles, Rule
from prolip.curate.score import GONE, change_of
from prolip.curate.tables import BITS, SIGNATURE, SampleTable, read_table, whole_column
from prolip.data.captions import stable_hash
from prolip.data.reading.remote import ReadPolicy
from prolip.data.reading.stream import is_local
from prolip.measures.chance import PAIRS, OwnFirst
from prolip.utils.console import plain
from prolip.utils.outputs import replacing, replacing_folder

SELECTION, SUMMARY = "selection", "selection.json"
OURS = r"\d+\.parquet|selection\.json"  # names in the folder of a selection
AGAIN = "run `prolip curate select` again"
#: Reasons other than rules: unreadable, repeats a better sample, not in the kept share, no copy drawn.
OWN = (UNUSABLE, DUPLICATE, RANK, COPIES) = ("unusable", "duplicate", "rank", "copies")
FLAGS = {DUPLICATE: "--duplicates", RANK: "--rank-by", COPIES: "--copies"}
KEPT = "kept"  # the page's name for the other samples, so no rule may use it
MOST_COPIES, MOST_RULES = 10, 64 - len(OWN)  # reasons are bits of one number
#: Up to this many signatures are compared with all others; more, within cells of CELL up to four million.
FLAT, CELL, PROBES, BLOCK = 100_000, 500, 16, 4096


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The criteria of a selection."""

    rules: Sequence[Rule] = ()  # drop samples
    keep: float = 1.0  # largest share of all samples to keep, the best `by`
    by: Expression | None = None
    copies: Expression | None = None  # average copies of a sample, 0 to 10
    duplicates: float | None = None  # cosine from which images count as duplicates

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise ValueError(f"--keep {self.keep}: give the share of samples to keep, above 0 and at most 1")
        if self.keep < 1 and self.by is None:
            raise ValueError(f"--keep {self.keep} needs a ranking. Give --rank-by, such as normalised_score")
        if clash := [rule.name for rule in self.rules if rule.name in (*OWN, KEPT)]:
            raise ValueError(f"--drop {clash[0]}: ... is a reserved name. Give another name")
        if len(self.rules) > MOST_RULES:
            raise ValueError(f"--drop {len(self.rules)} times: give at most {MOST_RULES} rules, joined by `or`")
        if self.duplicates is not None:
            radius_of(self.duplicates)

    @property
    def bits(self) -> dict[str, np.uint64]:
        """Reason -> its bit in the column `reasons`, lowest first."""
        names = (*OWN, *(rule.name for rule in self.rules))
        return {name: np.uint64(1 << place) for place, name in enumerate(names)}

    @property
    def scored(self) -> list[str]:
        """The reasons whose formulas read a score of the model."""
        ways = {RANK: self.by, COPIES: self.copies, **{rule.name: rule.drop for rule in self.rules}}
        return [name for name, formula in ways.items() if formula is not None and formula.columns - PLAIN]

    def words(self) -> dict[str, Any]:
        drop = {rule.name: rule.drop.text for rule in self.rules}
        by, copies = self.by and self.by.text, self.copies and self.copies.text
        return {"drop": drop, "keep": self.keep, "by": by, "copies": copies, "duplicates": self.duplicates}


def select(folder: Path, choice: Choice, yes: bool = False) -> dict[str, Any]:
    """Decide on all samples scored in `folder`, write the tables of the selection, and return its summary. Reads one
    column of all samples at a time. ValueError for a missing column, changed shards and, unless `yes`, `check_noise`.
    """
    target = folder / SELECTION
    if target.exists() and (others := [x.name for x in target.iterdir() if not re.fullmatch(OURS, x.name)]):
        raise ValueError(f"{target} contains {plain(others[0])}, which is not from a selection. Move it away")
    manifest, paths = tables.tables_of(folder)
    mark, bits = tables.digest(manifest), choice.bits
    notes = [check_scores(path, mark, manifest["columns"]) for path in paths]
    formulas = [rule.drop for rule in choice.rules] + [x for x in (choice.by, choice.copies) if x is not None]
    for formula in formulas:
        formula.check_columns(tables.signals_of(manifest["columns"]))
    quantiles = {
        (name, share): quantile(whole_column(paths, name), share)
        for name, share in sorted(set().union(*(x.quantiles for x in formulas)))
    }
    reasons = decide(paths, choice, quantiles)
    copies = np.where(reasons == 0, 1, 0).astype(np.uint8)
    if choice.copies is not None:
        mean = np.clip(np.nan_to_num(values(paths, choice.copies, quantiles)), 0, MOST_COPIES)
        keys = ((path.stem, key) for path in paths for key in read_table(path, ["key"]).columns["key"])
        chance = np.fromiter((stable_hash(*place, "copies") / 2**64 for place in keys), np.float64, len(mean))
        copies *= (np.floor(mean) + (chance < mean - np.floor(mean))).astype(np.uint8)  # one more or not, by its key
        reasons[(copies == 0) & (reasons == 0)] |= bits[COPIES]
    first = own_first(paths)
    noise = choice.scored and first is not None and first.at_chance
    warning = f"{first}. Rules on scores are noise" if noise else ""
    dropped = {name: int((reasons & bit > 0).sum()) for name, bit in bits.items()}
    if not yes:
        check_noise(choice, reasons, warning)
        if not copies.any() and any(note["usable"] for note in notes):
            counts = ", ".join(f"{name} {count:,}" for name, count in dropped.items() if count)
            raise ValueError(f"the rules keep none of {len(copies):,} samples ({counts}): loosen them, or give --yes")
    starts = np.cumsum([0, *(note["samples"] for note in notes)])
    summary = {
        "choice": choice.words(),
        "reasons": list(bits),
        "samples": len(copies),
        "kept": int((copies > 0).sum()),
        "written": int(copies.sum()),
        "by_shard": [int(copies[start:end].sum()) for start, end in zip(starts, starts[1:])],
        "content": tables.digest({"content": [note["content"] for note in notes]}),
        "quantiles": {f"{name} at {share:g}": value for (name, share), value in quantiles.items()},
        "listed": [
            name for name in bits if name not in OWN or dropped[name] or (name == DUPLICATE and choice.duplicates)
        ],
        "dropped": dropped,
        "dropped_alone": {name: int((reasons == bit).sum()) for name, bit in bits.items()},
        "own_first": first,
        "warning": warning,
        "faults": dict(sum((Counter(note["faults"]) for note in notes), Counter()).most_common()),
    }
    with replacing_folder(target) as new:
        for path, note, start, end in zip(paths, notes, starts, starts[1:]):
            columns = {"row": np.arange(end - start, dtype=np.int32)}
            columns |= {"copies": copies[start:end], "reasons": reasons[start:end]}
            tables.write_table(new / path.name, pa.table(columns), note | {"choice": choice.words()})
        tables.write_words(new / SUMMARY, summary)
    return summary


def own_first(paths: Sequence[Path]) -> OwnFirst | None:
    """Return how often a model ranks the own caption first, in PAIRS samples of the largest shard; None without one."""
    path = max(paths, key=lambda path: read_table(path).note["usable"])
    if "own_first" not in read_table(path).kinds:  # scores without a model
        return None
    hits, captions = (x[:PAIRS] for x in read_table(path, ["own_first", "caption"]).columns.values())
    there = ~np.isnan(hits)
    return OwnFirst(int(hits[there].sum()), int(there.sum()), len(set(captions[there]))) if there.any() else None


def check_noise(choice: Choice, reasons: np.ndarray, warning: str) -> None:
    """Raise ValueError if scores drop anything despite a warning, or if rules and duplicates drop more than half."""
    noisy = [name for name in choice.scored if (reasons & choice.bits[name]).any()]
    if noisy and warning:
        raise ValueError(f"{warning}. Remove {', '.join(FLAGS.get(name, name) for name in noisy)}, or give --yes")
    noisy += [DUPLICATE] * bool((reasons & choice.bits[DUPLICATE]).any())  # a model may take all images for duplicates
    bits = np.uint64(sum(int(choice.bits[name]) for name in noisy if name not in (RANK, COPIES)))
    if 2 * (dropped := np.count_nonzero(reasons & bits)) > len(reasons):
        share = f"{dropped:,} of {len(reasons):,} samples, more than half"
        raise ValueError(
            f"rules on scores drop {share}: change {', '.join(FLAGS.get(name, name) for name in noisy)}, or give --yes"
        )


def check_scores(path: Path, mark: str, columns: dict[str, str]) -> dict[str, Any]:
    """Return the note of a table of scores. ValueError if its manifest differs, or its shard changed or is missing."""
    table, again = read_table(path), "run `prolip curate score` again"
    if table.note.get("scores") != mark or table.kinds != columns:
        raise ValueError(f"{path} has an earlier version or other scores. Delete it, and {again}")
    url = table.note["shard"]
    if is_local(url) and (change := change_of(url, table.note["source"], ReadPolicy())):
        remedy = "restore it, or score the rest with another --output" if change == GONE else again
        raise ValueError(f"{plain(url)} {change} since it was scored: {remedy}")
    return table.note


def selection_of(folder: Path) -> tuple[dict[str, Any], list[Path]]:
    """Return the summary of the selection in `folder`, and its tables of scores. ValueError if they do not match."""
    place = folder / SELECTION / SUMMARY
    if not place.exists():
        raise ValueError(f"{folder} has no {SELECTION}/{SUMMARY}: run `prolip curate select` first")
    summary, (_, paths) = tables.read_words(place, AGAIN), tables.tables_of(folder)
    for path in paths:
        chosen(folder, path, summary)
    return summary, paths


def described(folder: Path, choice: dict[str, Any]) -> str:
    """Return the time of the selection in `folder` and its criteria, `Choice.words`, as one line."""
    made = time.localtime((folder / SELECTION / SUMMARY).stat().st_mtime)
    share = {"--keep": choice["keep"]} if choice["keep"] < 1 else {}
    flags = share | {"--rank-by": choice["by"], "--copies": choice["copies"], "--duplicates": choice["duplicates"]}
    parts = [f"{name}: {formula}" for name, formula in choice["drop"].items()]
    parts += [f"{flag} {value}" for flag, value in flags.items() if value is not None]
    return plain(f"selection of {time.strftime('%Y-%m-%d %H:%M', made)}: {'; '.join(parts) or 'all usable samples'}")


def chosen(folder: Path, path: Path, summary: dict[str, Any], names: Sequence[str] = ()) -> tuple[SampleTable, ...]:
    """Return some columns of a table of scores, and its selection. ValueError if they do not match."""
    scores, place = read_table(path, names), folder / SELECTION / path.name
    table = read_table(place, ["copies", "reasons"] if names else ())
    if table.note.get("choice") != summary["choice"]:
        raise ValueError(f"{place} and {SUMMARY} are of different selections: {AGAIN}")
    if any(table.note.get(name) != scores.note.get(name) for name in ("scores", "content")):
        raise ValueError(f"{place} was made from other scores than those in {path}: {AGAIN}")
    return scores, table


def quantile(values: np.ndarray, share: float) -> float:
    """Return a quantile, ignoring NaN; NaN without values, so that every comparison with it is false."""
    values = values[~np.isnan(values)]
    return float(np.quantile(values, share)) if len(values) else float("nan")


def decide(paths: Sequence[Path], choice: Choice, quantiles: Quantiles) -> np.ndarray:
    """Return the reasons against every sample, (N,) uint64; 0: none."""
    found, bits = [], choice.bits
    wanted = sorted({"fault"}.union(*(rule.drop.columns for rule in choice.rules)))
    for columns in (read_table(path, wanted).columns for path in paths):
        faulty = columns["fault"] != np.array(None)
        own = np.where(faulty, bits[UNUSABLE], np.uint64(0))
        for rule in choice.rules:
            own |= np.where(rule.drop(columns, quantiles) & ~faulty, bits[rule.name], np.uint64(0))
        found.append(own)
    reasons = np.concatenate(found)
    value = values(paths, choice.by, quantiles) if choice.by is not None else None
    if choice.duplicates is not None:
        quality = whole_column(paths, "cosine") if value is None else value
        none = bytes(BITS // 8)  # samples without a signature
        parts = [b"".join(x or none for x in read_table(path, [SIGNATURE]).columns[SIGNATURE]) for path in paths]
        signatures = np.frombuffer(b"".join(parts), np.uint8).reshape(-1, BITS // 8)
        repeated = duplicates_of(signatures, quality, reasons == 0, radius_of(choice.duplicates))
        reasons[repeated >= 0] |= bits[DUPLICATE]
    room, rows = int(choice.keep * len(reasons)), np.flatnonzero(reasons == 0)
    if value is not None and len(rows) > room:
        reasons[best_first(value, rows)[room:]] |= bits[RANK]
    return reasons


def best_first(value: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return rows by falling value, NaN last, ties by row."""
    return rows[np.lexsort((rows, -np.nan_to_num(value[rows], nan=-np.inf)))]


def values(paths: Sequence[Path], expression: Expression, quantiles: Quantiles) -> np.ndarray:
    """Return the value of a formula for every sample, (N,) float64."""
    names = sorted({"row", *expression.columns})
    columns = (read_table(path, names).columns for path in paths)
    return np.concatenate([np.asarray(expression(own, quantiles), np.float64) for own in columns])


def write_subset(folder: Path, place: Path) -> int:
    """Write the kept uids as a subset file of DataComp's filtering track, two 64-bit numbers each; return the count."""
    halves = []
    summary, paths = selection_of(folder)
    for path in paths:
        scores, table = chosen(folder, path, summary, ["uid", "key"])
        kept = table.columns["copies"] > 0
        for uid, key in zip(scores.columns["uid"][kept], scores.columns["key"][kept]):
            if not re.fullmatch("[0-9a-fA-F]{32}", uid or ""):
                expected = 'a subset file needs 32 hexadecimal digits as "uid" in the JSON of each sample'
                raise ValueError(f"sample {key!r} has the uid {uid!r}: {expected}, as in DataComp's shards")
            halves.append((int(uid[:16], 16), int(uid[16:], 16)))
    uids = np.array(halves, np.dtype("u8,u8"))
    uids.sort()
    with replacing(place) as temporary, temporary.open("wb") as file:  # np.save would add .npy to a path
        np.save(file, uids)
    return len(uids)


def write_dropped(folder: Path, place: Path) -> int:
    """Write shard, key and reasons of each dropped sample as a line of JSON, in order, and return their count."""
    summary, paths = selection_of(folder)
    count = 0
    with replacing(place) as temporary, temporary.open("w", encoding="utf-8") as file:
        for path in paths:
            scores, table = chosen(folder, path, summary, ["key"])
            bits = table.columns["reasons"].astype(np.int64)
            for row in np.flatnonzero(bits):
                why = [name for number, name in enumerate(summary["reasons"]) if bits[row] >> number & 1]
                line = {"shard": scores.note["shard"], "key": scores.columns["key"][row], "reasons": why}
                file.write(json.dumps(line) + "\n")
                count += 1
    return count


def radius_of(cosine: float) -> int:
    """Return the average number of differing bits of signatures at this cosine, arccos(c) / pi of BITS."""
    if not 0 < cosine <= 1:
        raise ValueError(f"--duplicates {cosine}: give the cosine from which images are duplicates, such as 0.97")
    return math.floor(BITS * math.acos(cosine) / math.pi)


def duplicates_of(signatures: np.ndarray, quality: np.ndarray, usable: np.ndarray, radius: int) -> np.ndarray:
    """Return the sample that each one repeats, -1 for kept ones, (N,) int64. A usable sample near a kept one is its
    duplicate; the best by quality (N,) come first. Exact for up to FLAT different signatures; with more, PROBES cells
    are searched.
    """
    repeats = np.full(len(signatures), -1)
    rows = np.flatnonzero(usable)
    if not len(rows):
        return repeats
    rows = best_first(quality, rows)
    different, first, group = np.unique(signatures[rows], axis=0, return_index=True, return_inverse=True)
    flat = faiss.IndexBinaryFlat(BITS)
    index: Any = flat
    if len(different) > FLAT:
        cells = min(len(different) // CELL, round(4 * math.sqrt(len(different))))  # so that all take O(N^1.5)
        index = faiss.IndexBinaryIVF(flat, BITS, cells)
        index.nprobe = PROBES
        sample = np.random.default_rng(0).choice(len(different), min(len(different), 50 * index.nlist), replace=False)
        index.train(np.ascontiguousarray(different[np.sort(sample)]))
    index.add(different)
    near = {}
    for start in range(0, len(different), BLOCK):
        limits, _, places = index.range_search(np.ascontiguousarray(different[start : start + BLOCK]), radius + 1)
        for row in np.flatnonzero(np.diff(limits) > 1):
            others = places[limits[row] : limits[row + 1]]
            near[start + row] = np.sort(others[others != start + row])
    stands_for = np.arange(len(different))
    for one in np.argsort(first):
        if stands_for[one] == one and one in near:
            others = near[one][stands_for[near[one]] == near[one]]
            stands_for[others[first[others] > first[one]]] = one
    best = rows[first[stands_for[group.reshape(-1)]]]
    repeats[rows] = np.where(best == rows, -1, best)
    return repeats
