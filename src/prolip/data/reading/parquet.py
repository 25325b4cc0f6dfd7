"""Parquet tables, read by row groups, with images as paths or as bytes that are read when needed."""

from __future__ import annotations

import glob
import json
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from prolip.data.faults import SampleFault
from prolip.data.reading.csv import TableError

#: Bytes of row groups that a process keeps.
ROOM = 128 << 20
Inside = tuple[int, int, int]


def parquet_files(address: str) -> list[str]:
    """The tables of a file, a folder or a wildcard, in order; FileNotFoundError where there is none."""
    pattern = os.path.join(glob.escape(address), "*.parquet") if os.path.isdir(address) else address
    files = [address] if os.path.isfile(address) else sorted(glob.glob(pattern))
    if not files:
        raise FileNotFoundError(f"no Parquet table {address!r} (looked from {os.getcwd()}): check the path")
    return files


def open_parquet(path: str) -> pq.ParquetFile:
    """One table; TableError for another file."""
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise TableError(f"{path} is no Parquet table ({error}): fetch or write it again") from error


def holds_bytes(kind: pa.DataType) -> bool:
    """Whether a column holds images: bytes, or {bytes, path} as Hugging Face writes them."""
    binary = pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
    return binary or (pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0)


class ParquetTable:
    """The rows of one table or of several with the same columns.

    columns: their names; head: the first rows, in which b"" stands for an image's bytes; embedded: reads those.
    """

    def __init__(self, address: str, head: int):
        self.files = parquet_files(address)
        first = open_parquet(self.files[0])
        self.schema: pa.Schema = first.schema_arrow
        self.columns = list(self.schema.names)
        self.bytes = {name for name in self.columns if holds_bytes(self.schema.field(name).type)}
        self.names = class_names(self.schema)
        self.embedded: EmbeddedImages | None = None
        rows = islice(self._values(first, self.columns), head)
        self.head = [dict(zip(self.columns, values)) for values in rows]

    def read(self, image: str, others: Sequence[str]) -> Iterator[tuple[str, int, Inside | None, list[Any]]]:
        """Of each row the file, its number from 1, where the image's bytes are, and the values of columns: the image's
        first, then the others.
        """
        if image in self.bytes:  # of which Hugging Face may write paths alone
            first = open_parquet(self.files[0]).iter_batches(batch_size=64, columns=[image], use_threads=False)
            if any(bytes_of(value) is not None for batch in islice(first, 1) for value in batch.column(0).to_pylist()):
                self.embedded = EmbeddedImages(tuple(self.files), image)
        for number, path in enumerate(self.files):
            file = open_parquet(path)
            if missing := [name for name in (image, *others) if name not in file.schema_arrow.names]:
                other = f"which {self.files[0]} has: give tables of one kind"
                raise TableError(f"{path} has no column {missing[0]!r}, {other}")
            groups = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
            places = ((number, group, row) for group, rows in enumerate(groups) for row in range(rows))
            for count, (place, values) in enumerate(zip(places, self._values(file, (image, *others))), 1):
                yield path, count, place if self.embedded else None, values

    def _values(self, file: pq.ParquetFile, columns: Sequence[str]) -> Iterator[list[Any]]:
        """The values of each row; of images their paths, or b"" where they have none."""
        kinds = {name: self.schema.field(name).type for name in columns}
        light = [
            f"{name}.path" if pa.types.is_struct(kind) else name
            for name, kind in kinds.items()
            if name not in self.bytes or (pa.types.is_struct(kind) and kind.get_field_index("path") >= 0)
        ]
        for batch in file.iter_batches(batch_size=1024, columns=light, use_threads=False):
            found = {name: batch.column(name).to_pylist() for name in batch.schema.names}
            for name in self.bytes & found.keys():
                found[name] = [(value or {}).get("path") or b"" for value in found[name]]
            for name, words in self.names.items():
                if name in found:
                    found[name] = [words[n] if isinstance(n, int) and 0 <= n < len(words) else n for n in found[name]]
            empty = [b""] * batch.num_rows
            yield from map(list, zip(*(found.get(name, empty) for name in columns)))


def class_names(schema: pa.Schema) -> dict[str, list[str]]:
    """Column -> the names of its classes, as Hugging Face's `ClassLabel` writes them."""
    try:
        features = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))["info"]["features"]
        return {name: list(kind["names"]) for name, kind in features.items() if "names" in kind}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


def bytes_of(value: Any) -> bytes | None:
    """The bytes in a cell."""
    return value.get("bytes") if isinstance(value, dict) else value


@dataclass
class EmbeddedImages:
    """The bytes of images in tables, by (file, row group, row in it); each process keeps ROOM bytes of row groups."""

    files: tuple[str, ...]
    column: str
    _kept: dict[tuple[int, int], Any] = field(default_factory=dict)
    _owner: int = 0
    _lock: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {"files": self.files, "column": self.column, "_kept": {}, "_owner": 0, "_lock": None}

    def __call__(self, place: Inside) -> bytes:
        """The bytes of an image; SampleFault where the row has none."""
        if self._owner != os.getpid():  # a fork may have copied a lock that is held
            self._owner, self._lock = os.getpid(), threading.Lock()
        with self._lock:
            column = self._group(place[0], place[1])
        data = bytes_of(column[place[2]].as_py())
        if not data:
            raise SampleFault("missing image", f"{self.files[place[0]]} holds no bytes in column {self.column!r} there")
        return data

    def share(self, file: int, group: int) -> float:
        """The size of a row group, as a share of ROOM."""
        return open_parquet(self.files[file]).metadata.row_group(group).total_byte_size / ROOM

    def _group(self, file: int, group: int) -> Any:
        if (found := self._kept.get((file, group))) is None:
            found = open_parquet(self.files[file]).read_row_group(group, [self.column], use_threads=False).column(0)
            while self._kept and sum(kept.nbytes for kept in self._kept.values()) + found.nbytes > ROOM:
                del self._kept[next(iter(self._kept))]
            self._kept[file, group] = found
        return found
