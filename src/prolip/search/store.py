"""A gallery on disk that grows chunk by chunk, and is whole at any moment, whenever its writer is killed.

    FOLDER/index.json                the model, the score, the chunks and how far each source was read
    FOLDER/chunks/000000/mean.npy    (n, D) float32, where the vectors do not begin with it
    FOLDER/chunks/000000/log_var.npy (n, D) float32, unless these are points
    FOLDER/chunks/000000/vector.npy  (n, P + 1) float32, [v, b] of a score that factors: an inner product ranks them
    FOLDER/chunks/000000/items.jsonl what is known of each row: its key, path, captions; offsets.npy: where lines begin
    FOLDER/chunks/000000/hashes.npy  of the keys
    FOLDER/deleted.npy               rows that are found no more
    FOLDER/near-000000.faiss         an approximate index of the first rows

A chunk is written beside its place and renamed; index.json, which alone says that it counts, is replaced last.
"""
from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from prolip.gaussian import Gaussian
from prolip.scores import Score, Side, least_constant
from prolip.search.chunks import Chunk, make_chunk
from prolip.utils.documents import loads
from prolip.utils.outputs import replacing

FORMAT, NAME = "prolip-search-1", "index.json"
Item = dict[str, Any]


class Store:
    """Gaussians with what is known of them, below a folder; a row's number never changes."""

    def __init__(self, folder: str | os.PathLike):
        self.folder = Path(folder)
        path = self.folder / NAME
        if not path.is_file():
            raise FileNotFoundError(f"no index in {self.folder}: build one with python -m prolip.search build"
                                    f" {self.folder} --data ...")  # fmt: skip
        try:
            self.values: dict[str, Any] = loads(path.read_text(encoding="utf-8"))
            if self.values["format"] != FORMAT:
                raise ValueError(f"format {self.values['format']!r}, wanted {FORMAT!r}")
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} describes no index ({error}): build it anew in another folder") from error

    @classmethod
    def create(cls, folder: str | os.PathLike, values: Mapping[str, Any]) -> Store:
        """An empty one; values: JSON values of whoever makes it. FileExistsError where there is one."""
        folder = Path(folder)
        if (folder / NAME).exists():
            raise FileExistsError(f"{folder} holds an index already: extend it, or give another folder")
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / NAME, {"format": FORMAT, **values, "chunks": []})
        return cls(folder)

    def __len__(self) -> int:
        """Rows, those that were deleted too."""
        return sum(chunk["rows"] for chunk in self.values["chunks"])

    def write(self, **values: Any) -> None:
        """Change some of the values, all of them at once."""
        write_json(self.folder / NAME, self.values | values)
        self.values |= values

    def append(
        self, z: Gaussian, items: Sequence[Item], score: Score, side: Side, sources: Sequence[Mapping[str, Any]]
    ) -> None:
        """Write a chunk, and with it how far the sources were read. ValueError for keys that are there already."""
        hashes = hashes_of(item["key"] for item in items)
        self._refuse_known(hashes, items)
        chunk = make_chunk(score, z, len(self), side)
        place = self._folder_of(len(self.values["chunks"]))
        beside = place.with_name(f".{place.name}")
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        mean_in_vector = chunk.vector is not None and np.array_equal(chunk.vector[:, : chunk.mean.shape[1]], chunk.mean)
        arrays = {"log_var": chunk.log_var, "vector": chunk.vector, "hashes": hashes,
                  "mean": None if mean_in_vector else chunk.mean}  # fmt: skip
        lines = [json.dumps(item, ensure_ascii=False).encode(errors="backslashreplace") + b"\n" for item in items]
        arrays["offsets"] = np.cumsum([0, *map(len, lines)])
        for name, array in arrays.items():
            if array is not None:
                np.save(beside / f"{name}.npy", array)
        (beside / "items.jsonl").write_bytes(b"".join(lines))
        for path in beside.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        shutil.rmtree(place, ignore_errors=True)  # of a writer that was killed before it counted
        beside.rename(place)
        entry = {"rows": len(items), "reach": chunk.reach, "lift": chunk.lift}
        if chunk.vector is not None:
            entry["constant"] = least_constant(chunk.factors)
        self.write(chunks=[*self.values["chunks"], entry], sources=list(sources))
        self._forget()

    def chunks(self) -> list[Chunk]:
        """All of it, mapped from the files."""
        out, start, dead = [], 0, self.deleted
        for number, entry in enumerate(self.values["chunks"]):
            arrays = {name: self._array(number, name) for name in ("mean", "log_var", "vector")}
            vector, mean, rows = arrays["vector"], arrays["mean"], entry["rows"]
            if mean is None:
                assert vector is not None
                mean = vector[:, : self.values["dim"]]
            own = dead[(dead >= start) & (dead < start + rows)] - start
            alive = None
            if len(own):
                alive = np.ones(rows, dtype=bool)
                alive[own] = False
            out.append(Chunk(start, mean, arrays["log_var"], vector, entry["reach"], entry["lift"], alive))
            start += rows
        return out

    def items(self, rows: Sequence[int]) -> list[Item]:
        """What is known of these rows."""
        starts = np.cumsum([0, *(chunk["rows"] for chunk in self.values["chunks"])])
        out = []
        for row in rows:
            number = int(np.searchsorted(starts, row, side="right")) - 1
            offsets, inside = self._array(number, "offsets"), row - int(starts[number])
            assert offsets is not None
            with (self._folder_of(number) / "items.jsonl").open("rb") as file:
                file.seek(int(offsets[inside]))
                out.append(json.loads(file.read(int(offsets[inside + 1] - offsets[inside]))))
        return out

    def rows_of(self, keys: Sequence[str]) -> list[int]:
        """The rows of these keys. KeyError, naming some, for those that are not there or were deleted."""
        known = {int(code): row for row, code in zip(self._living, self._hashes[self._living].tolist())}
        codes = hashes_of(keys).tolist()
        rows = [known.get(code, -1) for code in codes]
        missing = [key for key, row in zip(keys, rows) if row < 0]
        if missing:
            raise KeyError(f"{len(missing)} of {len(keys)} keys are not in {self.folder}: {', '.join(missing[:3])}")
        return rows

    def delete(self, keys: Sequence[str]) -> None:
        """Have the rows of these keys found no more; their bytes stay. KeyError as `rows_of`."""
        rows = np.union1d(self.deleted, np.array(self.rows_of(keys), dtype=np.int64))
        with replacing(self.folder / "deleted.npy") as temporary, temporary.open("wb") as file:
            np.save(file, rows)
        self._forget()

    @cached_property
    def deleted(self) -> np.ndarray:
        """Rows that were deleted, rising."""
        path = self.folder / "deleted.npy"
        return np.load(path) if path.exists() else np.zeros(0, dtype=np.int64)

    @cached_property
    def alive(self) -> np.ndarray | None:
        """(N,) bool; None where nothing was deleted."""
        if not len(self.deleted):
            return None
        alive = np.ones(len(self), dtype=bool)
        alive[self.deleted] = False
        return alive

    @cached_property
    def _living(self) -> np.ndarray:
        return np.arange(len(self)) if self.alive is None else np.flatnonzero(self.alive)

    @cached_property
    def _hashes(self) -> np.ndarray:
        found = [self._array(number, "hashes") for number in range(len(self.values["chunks"]))]
        return np.concatenate([np.zeros(0, dtype=np.uint64), *(x for x in found if x is not None)])

    def _refuse_known(self, hashes: np.ndarray, items: Sequence[Item]) -> None:
        """ValueError for keys that stand twice, or that a row has which was not deleted."""
        _, first = np.unique(hashes, return_index=True)
        twice = np.ones(len(hashes), dtype=bool)
        twice[first] = False
        twice |= np.isin(hashes, self._hashes[self._living])
        if twice.any():
            keys = [items[row]["key"] for row in np.flatnonzero(twice)[:3]]
            raise ValueError(f"{int(twice.sum())} keys are in {self.folder} already or stand twice ({', '.join(keys)}):"
                             " delete them first, or leave them out")  # fmt: skip

    def _array(self, number: int, name: str) -> np.ndarray | None:
        path = self._folder_of(number) / f"{name}.npy"
        return np.load(path, mmap_mode="r") if path.exists() else None

    def _folder_of(self, number: int) -> Path:
        return self.folder / "chunks" / f"{number:06}"

    def _forget(self) -> None:
        """Read again what changed on the disk."""
        for name in ("deleted", "alive", "_living", "_hashes"):
            self.__dict__.pop(name, None)


def hashes_of(keys: Iterable[str]) -> np.ndarray:
    """64 bits of each key, (N,) uint64."""
    digests = [hashlib.blake2b(key.encode(), digest_size=8).digest() for key in keys]
    return np.frombuffer(b"".join(digests), dtype=np.uint64)


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """A file that is there whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(values), encoding="utf-8")
