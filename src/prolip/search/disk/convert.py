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
from prolip.search.store import FORMER, LOCK, NAME, NUMBERED, Store, locked
from prolip.utils.documents import loads
from prolip.utils.outputs import replacing_folder


def convert(folder: str | os.PathLike) -> None:
    """Put an index of today in the place of one of the first version, without its deleted rows, when it is whole.

    ValueError for what is no such index, for a damaged one, and for a folder with other files; BlockingIOError.
    """
    folder = Path(folder)
    values: dict[str, Any] = loads((folder / NAME).read_bytes())
    if not isinstance(values, dict) or values.pop("format", None) != FORMER:
        raise ValueError(f"{folder} is no index of an earlier version: there is nothing to convert")
    for name in os.listdir(folder):
        if name not in (NAME, LOCK, "chunks", "deleted.npy") and not NUMBERED.fullmatch(name):
            raise ValueError(f"{folder} holds {name} beside the index: move it elsewhere")
    with locked(folder), replacing_folder(folder) as beside:
        try:
            dead = np.load(folder / "deleted.npy") if (folder / "deleted.npy").exists() else np.zeros(0, dtype=int)
            chunks, start = values.pop("chunks"), 0
            Store.create(beside, values | {"near": None})
            index = SearchIndex(beside)
            for number, entry in enumerate(chunks):
                place, shape = folder / "chunks" / f"{number:06}", (entry["rows"], values["dim"])
                found = {path.stem: torch.from_numpy(np.load(path)) for path in place.glob("*.npy")}
                mean = found["mean"] if "mean" in found else found["vector"][:, : shape[1]].contiguous()
                log_var = found.get("log_var", torch.full_like(mean, -torch.inf))
                items = [json.loads(line) for line in (place / "items.jsonl").read_bytes().split(b"\n")[:-1]]
                if not len(items) == shape[0] or not mean.shape == log_var.shape == shape:
                    raise ValueError(f"{place} has not the {shape[0]} rows of the manifest")
                kept = np.flatnonzero(~np.isin(np.arange(start, start + len(items)), dead))
                start += len(items)
                if own := [items[row] for row in kept]:
                    z = Gaussian(mean, log_var).select(kept)
                    index.store.append(z, own, index.coarse, index.side, values["sources"])
        except (FileNotFoundError, EOFError, ValueError, KeyError, TypeError, IndexError) as error:
            raise ValueError(f"{folder} is damaged ({error}): build the index anew in another folder") from error
        index.finish()
