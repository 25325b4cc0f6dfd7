"""Indexes of the first version, which had a folder per chunk of rows, as those of today."""
from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from prolip.gaussian import Gaussian
from prolip.search.index import SearchIndex
from prolip.search.store import FORMER, LOCK, NAME, Item, Store, is_near, locked
from prolip.utils.documents import loads
from prolip.utils.outputs import replacing_folder


def convert(folder: str | os.PathLike) -> None:
    """Have an index of the first version be one of today, which takes its place when it is whole; deleted rows go.

    ValueError for what is no such index, for a damaged one, and for a folder with other files; BlockingIOError.
    """
    folder = Path(folder)
    try:
        values: dict[str, Any] = loads((folder / NAME).read_bytes())
        if values.pop("format") != FORMER:
            raise ValueError(f"its format is not {FORMER}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder} holds no index of an earlier version ({error})") from error
    others = [x for x in os.listdir(folder) if x not in (NAME, LOCK, "chunks", "deleted.npy") and not is_near(x)]
    if others:
        raise ValueError(f"{folder} holds {others[0]} beside the index: move it elsewhere")
    with locked(folder), replacing_folder(folder) as beside:
        try:
            chunks = values.pop("chunks")
            Store.create(beside, values | {"near": None})
            index, start = SearchIndex(beside), 0
            dead = np.load(folder / "deleted.npy") if (folder / "deleted.npy").exists() else np.zeros(0, dtype=int)
            for number, entry in enumerate(chunks):
                z, items = _read(folder / "chunks" / f"{number:06}", entry["rows"], values["dim"])
                kept = np.flatnonzero(~np.isin(np.arange(start, start + len(items)), dead))
                own, start = [items[row] for row in kept], start + len(items)
                index.store.append(z.select(torch.from_numpy(kept)), own, index.coarse, index.side, values["sources"])
        except (OSError, EOFError, ValueError, KeyError, TypeError, IndexError) as error:
            raise ValueError(f"{folder} is damaged ({error}): build the index anew in another folder") from error
        index.finish()


def _read(place: Path, rows: int, dim: int) -> tuple[Gaussian, list[Item]]:
    """A chunk of the first version."""
    vector, mean, log_var = (np.load(path) if (path := place / f"{name}.npy").exists() else None
                             for name in ("vector", "mean", "log_var"))  # fmt: skip
    mean = np.ascontiguousarray(vector[:, :dim]) if mean is None and vector is not None else mean
    items = [json.loads(line) for line in (place / "items.jsonl").read_bytes().split(b"\n")[:-1]]
    if mean is None or not len(items) == len(mean) == rows or (log_var is not None and log_var.shape != mean.shape):
        raise ValueError(f"{place} has not the {rows} rows of the manifest")
    log_var = np.full_like(mean, -np.inf) if log_var is None else log_var
    return Gaussian(torch.from_numpy(mean), torch.from_numpy(log_var)), items
