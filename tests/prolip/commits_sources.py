"""A rebuild that tests/faults.py breaks off: wherever that is, the next one leaves what one in one piece leaves."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from commits_store import known

from prolip.gaussian import Gaussian
from prolip.scores import CSDScore
from prolip.search.index import SearchIndex
from prolip.search.sources import Rebuild, parts_of


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


def prepare(folder: Path) -> None:
    SearchIndex.create(folder / "index", CSDScore(8.0, -3.0), 2)
    rebuild(folder, features("abcdefghijklmnop"))


def commit(folder: Path) -> None:
    """Three are gone, three others, six new."""
    rebuild(folder, features("defghijklmnopqrstuv", changed="dlo"))


def state(folder: Path) -> tuple[Any, bool]:
    """What the next rebuild leaves, and whether it is there already."""
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copytree(folder / "index", Path(scratch) / "index")
        commit(Path(scratch))
        after = content(Path(scratch))
    assert set(after) == set("defghijklmnopqrstuv")
    return after, after == content(folder)


broken = SimpleNamespace(prepare=prepare, commit=commit, state=state)
