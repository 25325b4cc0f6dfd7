"""The kept samples as new shards, byte for byte the same whoever writes them and however often that was broken off."""
from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from webdataset import TarWriter

from prolip.curate.select import SELECTION, SUMMARY, tables_of
from prolip.curate.tables import read_columns, read_note
from prolip.data.faults import ShardFault
from prolip.data.index import index_shards, write_index
from prolip.data.reading.entries import INDEX_NAME, ShardIndex, canonical
from prolip.data.reading.tar import ShardReader
from prolip.data.samples.sample import Raw, suffixes_of
from prolip.utils.outputs import replacing

PLAN = "plan.json"


class Plan:
    """Which kept samples go into which new shard: `samples` each, in the order of the shards that they come from."""

    def __init__(self, folder: Path, samples: int, read: ShardReader):
        if samples < 1:
            raise ValueError(f"--shard-samples {samples}: give 1 or more")
        try:
            self.summary: dict[str, Any] = json.loads((folder / SUMMARY).read_text())
        except OSError:
            raise ValueError(f"{folder} has no {SUMMARY}: run `python -m prolip.curate select` first") from None
        self.folder, self.samples, self.read = folder, samples, read
        self.tables = tables_of(folder)
        self.ends = np.cumsum(self.summary["by_shard"])

    @property
    def count(self) -> int:
        """New shards."""
        return -(-self.summary["written"] // self.samples)

    def words(self) -> dict[str, Any]:
        """What new shards depend on."""
        return {"choice": self.summary["choice"], "written": self.summary["written"], "samples": self.samples,
                "by_shard": self.summary["by_shard"]}  # fmt: skip

    def path(self, out: Path, number: int) -> Path:
        """Where new shard `number` is."""
        return out / f"{number:06d}.tar"

    def samples_of(self, number: int) -> Iterator[Raw]:
        """The samples of new shard `number`. Raises ShardFault where an old one no longer has what it had."""
        first, last = number * self.samples, min((number + 1) * self.samples, self.summary["written"])
        for place in range(int(np.searchsorted(self.ends, first, side="right")), len(self.tables)):
            start = int(self.ends[place]) - self.summary["by_shard"][place]
            if start >= last:
                return
            table = self.tables[place]
            copies = read_columns(self.folder / SELECTION / table.name, ["copies"])["copies"].astype(int)
            url, keys = read_note(table)["shard"], read_columns(table, ["key"])["key"]
            for position, raw in self._copies(url, keys, copies, start):
                if position >= last:
                    break
                if position >= first:
                    yield raw

    def _copies(self, url: str, keys: np.ndarray, copies: np.ndarray, start: int) -> Iterator[tuple[int, Raw]]:
        """What is kept of one old shard with its place among all that is kept."""
        position, rows, end = start, 0, start + int(copies.sum())
        if position == end:
            return
        for raw in self.read(url, lambda fault: None):
            if rows >= len(keys) or raw["__key__"] != keys[rows]:
                was = repr(keys[rows]) if rows < len(keys) else "its end"
                raise ShardFault("changed shard", f"{url} has {raw['__key__']!r} where {was} was: it is another than"
                                 " the one that was scored, score it again")  # fmt: skip
            for copy in range(copies[rows]):
                yield position, raw | ({"__key__": f"{raw['__key__']}_copy{copy}"} if copy else {})
                position += 1
            rows += 1
            if position == end:
                return
        raise ShardFault("changed shard", f"{url} ends after {rows} samples, it had {len(keys)}: score it again")


def write_shard(plan: Plan, out: Path, number: int) -> int:
    """Write a new shard, whole or not at all; how many samples it has.

    A key that is in it already, as keys of two old shards may be the same, gets the place behind it.
    """
    path = plan.path(out, number)
    seen: set[str] = set()
    with replacing(path) as temporary, temporary.open("wb") as file, TarWriter(file, encoder=False, mtime=0) as writer:
        for raw in plan.samples_of(number):
            key = raw["__key__"]
            key = f"{key}_{len(seen)}" if key in seen else key
            seen.add(key)
            writer.write({"__key__": key} | {suffix: raw[suffix] for suffix in suffixes_of(raw)})
    return len(seen)


def begin(plan: Plan, out: Path) -> None:
    """Make the folder, or take it up where an earlier run left it. ValueError where that wrote another selection."""
    out.mkdir(parents=True, exist_ok=True)
    note = out / PLAN
    if note.exists() and json.loads(note.read_text()) != plan.words():
        raise ValueError(f"{out} holds shards of another selection: give another --shards-out, or delete it")
    if not note.exists():
        if others := sorted(out.glob("*.tar")):
            raise ValueError(f"{out} holds shards of others, {others[0].name} for one: give an empty --shards-out")
        note.write_text(json.dumps(plan.words()))


def finish(plan: Plan, out: Path, workers: int) -> int:
    """Write the index once all new shards are there; how many are still missing."""
    paths = [plan.path(out, number) for number in range(plan.count)]
    missing = sum(not path.exists() for path in paths)
    if not missing:
        urls = [str(path) for path in paths]
        entries = {canonical(found.url): found.entry for found in index_shards(urls, plan.read.policy, workers)
                   if found.entry is not None}  # fmt: skip
        write_index(ShardIndex(str(out / INDEX_NAME), entries))
    return missing
