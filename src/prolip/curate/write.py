"""Writing of the kept samples as new shards: the same bytes for any number of writers and interruptions."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from prolip.curate.score import content_of
from prolip.curate.select import chosen, selection_of
from prolip.curate.tables import SCORES, agree, made
from prolip.data.faults import ShardFault
from prolip.data.reading.shard_index import INDEX_NAME, ShardIndex, canonical, index_shards, write_index
from prolip.data.reading.tar import ShardReader
from prolip.data.samples import Raw, suffixes_of
from prolip.utils.console import plain
from prolip.utils.outputs import replacing

PLAN = "plan.json"


class ShardPlan:
    """Assignment of kept samples to new shards: `samples` each, in the order of the old shards."""

    def __init__(self, folder: Path, samples: int, read: ShardReader):
        self.folder, self.samples, self.read = folder, samples, read
        self.summary, self.tables = selection_of(folder)
        self.ends = np.cumsum(self.summary["by_shard"])
        self.count = -(-self.summary["written"] // samples)

    def samples_of(self, number: int) -> Iterator[Raw]:
        """Yield the samples of new shard `number`. ShardFault if an old shard has changed."""
        first, last = number * self.samples, min((number + 1) * self.samples, self.summary["written"])
        for place in range(int(np.searchsorted(self.ends, first, side="right")), len(self.tables)):
            start = int(self.ends[place]) - self.summary["by_shard"][place]
            if start >= last:
                return
            kept = self._copies(self.tables[place], self.summary["by_shard"][place])
            yield from islice(kept, max(first - start, 0), last - start)

    def _copies(self, path: Path, left: int) -> Iterator[Raw]:
        """Yield the `left` kept samples of an old shard, each compared with the scored one."""
        scores, selected = chosen(self.folder, path, self.summary, ["key", "content"])
        url, copies = scores.note["shard"], selected.columns["copies"].astype(int)
        changed, samples = "", self.read(url, lambda fault: None) if left else iter(())
        for key, content, times, raw in zip(*scores.columns.values(), copies, samples):
            if raw["__key__"] != key or content_of(raw) != content:
                changed = f"has another sample {key!r}"
                break
            for copy in range(times):
                yield raw | ({"__key__": f"{key}_copy{copy}"} if copy else {})
            left -= times
            if not left:
                break
        if left:
            what = f"it is not the scored shard. Delete {path}, then score and select again"
            raise ShardFault("changed shard", f"{plain(url)} {changed or 'ends early'}: {what}")


def shard_path(out: Path, number: int) -> Path:
    return out / f"{number:06d}.tar"


def write_shard(plan: ShardPlan, out: Path, number: int) -> int:
    """Write a new shard and return its number of samples. Repeated keys get a number."""
    seen: set[str] = set()
    form = tarfile.PAX_FORMAT  # stores names of any length, and is plain tar otherwise
    with replacing(shard_path(out, number)) as temporary, tarfile.open(temporary, "w", format=form) as tar:
        for raw in plan.samples_of(number):
            key, place = raw["__key__"], len(seen)
            while key in seen:
                key, place = f"{raw['__key__']}_{place}", place + 1
            seen.add(key)
            for suffix in sorted(suffixes_of(raw)):
                member = tarfile.TarInfo(f"{key}.{suffix}")
                member.size, member.mode = len(raw[suffix]), 0o444
                tar.addfile(member, io.BytesIO(raw[suffix]))
    return len(seen)


def write_shards(
    plan: ShardPlan, out: Path, part: tuple[int, int] = (0, 1), processes: int = 0
) -> tuple[list[int], int]:
    """Write the new shards of part (I, N) that no other process writes; return their samples, and missing shards."""
    if (out / SCORES).is_dir():
        raise ValueError(f"{out} contains tables of scores. Give a folder only for shards, such as --output {out}/kept")
    others = [*out.glob("[!.]*.tar"), *out.glob(INDEX_NAME)]
    if others and not (out / PLAN).exists():  # checked after the shards, which are written later
        raise ValueError(f"{out} contains other shards, such as {others[0].name}. Give an empty --output")
    words = {name: plan.summary[name] for name in ("choice", "written", "by_shard", "content")}
    remedy = f"{out} contains shards of another selection. Give another --output, or delete it"
    agree(out / PLAN, words | {"samples": plan.samples}, remedy)
    paths = [shard_path(out, number) for number in range(plan.count)]
    missing = {number: None for number in range(part[0], plan.count, part[1]) if not paths[number].exists()}
    counts = [*made(missing, paths.__getitem__, lambda number: write_shard(plan, out, number))]
    left = sum(not path.exists() for path in paths)
    if not left and not (out / INDEX_NAME).exists():
        found = index_shards([str(path) for path in paths], plan.read.policy, processes)
        entries = {canonical(one.url): one.entry for one in found if one.entry is not None}
        write_index(ShardIndex.of(str(out / INDEX_NAME), entries))
    return counts, left
