"""Commits of a search index that tests/faults.py interrupts: rows, deletions, replacements, an approximate index."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from prolip.gaussian import Gaussian
from prolip.scores import CSDScore
from prolip.search.ann import IndexSpec
from prolip.search.index import Part, SearchIndex
from prolip.search.sources import Rebuild, parts_of


def part(first: int, count: int) -> Part:
    mean = torch.randn(count, 4, generator=torch.Generator().manual_seed(first))
    items = [{"key": f"k{row}", "print": str(first)} for row in range(first, first + count)]
    return Part(items, Gaussian(mean, mean - 3), count)


def made(folder: Path, kind: str = "flat") -> SearchIndex:
    """60 rows in appends of 20."""
    index = SearchIndex.create(folder / "index", CSDScore(8.0, -3.0), 4, IndexSpec(kind))
    index.append("first", [part(0, 20), part(20, 20), part(40, 20)], 20)
    return index


def known(index: SearchIndex) -> list[tuple[str, str, int]]:
    """The key, the fingerprint and the row of all that can be found, by rising row."""
    rows = [row for block in index.store.gallery.blocks() for row in block.tolist()]
    return [(item["key"], item.get("print"), row) for row, item in zip(rows, index.items(rows))]


def state(folder: Path) -> Any:
    """Return all that a reader finds, and check that the next writer resumes from there."""
    index = SearchIndex(folder / "index", verify=True)
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copytree(folder / "index", Path(scratch) / "index")
        again = SearchIndex(Path(scratch) / "index")
        again.append("next", [part(1000, 3)])
        assert len(again) == len(index) + 3 and len(SearchIndex(Path(scratch) / "index", verify=True)) == len(again)
    every = known(index)
    assert index.find([key for key, _, _ in every]).tolist() == [row for _, _, row in every]
    near = None if index.store.values["near"] is None else index._read().ntotal
    held = [index.store.shards("first"), index.store.are_unwanted([f"k{row}" for row in range(60)]).tolist()]
    return every, index.gaussians(range(len(index.store))).mean.tolist(), index.store.values["sources"], near, held


def case(commit: Callable[[SearchIndex], Any], kind: str = "flat") -> SimpleNamespace:
    return SimpleNamespace(
        prepare=lambda folder: made(folder, kind),
        state=state,
        commit=lambda folder: commit(SearchIndex(folder / "index")),
    )


append = case(lambda index: index.append("second", [part(60, 30)]))
replace = case(lambda index: index.append("second", [part(50, 30)], replace=True))
delete = case(lambda index: index.delete(["k3", "k41"], sources=[]))
shards = case(lambda index: index.store.note_shards("first", {"/data/0.tar": "1 2 ", "/data/1.tar": None}))
finish = case(SearchIndex.finish, "hnsw")


def features(keys: str, changed: str = "") -> SimpleNamespace:
    """A row per key, the same by every call but of those that have changed."""
    mean = torch.tensor([[ord(key) + (key in changed) / 2, 1.0] for key in keys]).log()
    return SimpleNamespace(keys=tuple(keys), owners=None, captions=(), image=Gaussian(mean, mean - 3))


def rebuild(folder: Path, found: Any) -> Rebuild:
    index = SearchIndex(folder / "index", verify=True)
    with index.writing():
        work = Rebuild(index, "features:kept")
        work.run(parts_of(found, work, 8), 8)
    return work


def content(folder: Path) -> dict[str, list[float]]:
    index = SearchIndex(folder / "index", verify=True)
    return {key: index.gaussians([row]).mean[0].tolist() for key, _, row in known(index)}


def prepare_rebuild(folder: Path) -> None:
    SearchIndex.create(folder / "index", CSDScore(8.0, -3.0), 2)
    rebuild(folder, features("abcdefghijklmnop"))


def commit_rebuild(folder: Path) -> None:
    """Three are gone, three others, six new."""
    rebuild(folder, features("defghijklmnopqrstuv", changed="dlo"))


def state_after_rebuild(folder: Path) -> tuple[Any, bool]:
    """Return the result of the next rebuild, and whether it exists already."""
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copytree(folder / "index", Path(scratch) / "index")
        commit_rebuild(Path(scratch))
        after = content(Path(scratch))
    assert set(after) == set("defghijklmnopqrstuv")
    return after, after == content(folder)


broken = SimpleNamespace(prepare=prepare_rebuild, commit=commit_rebuild, state=state_after_rebuild)
