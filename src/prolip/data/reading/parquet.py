"""Parquet tables, read by row groups, with images as paths or as bytes that are read on demand."""

from __future__ import annotations

import glob
import json
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from prolip.data.faults import SampleFault
from prolip.data.reading.csv import TableError

ROOM = 128 << 20  # bytes of row groups that a process keeps
Inside = tuple[int, int, int]


def open_parquet(path: str) -> pq.ParquetFile:
    """Open one table; TableError for another file."""
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise TableError(f"{path} is not a Parquet table ({error}). Fetch or write it again") from error


class ParquetTable:
    """The rows of a file, folder or wildcard with equal columns. head: the first; b"" represents image bytes."""

    def __init__(self, address: str, head: int):
        pattern = os.path.join(glob.escape(address), "*.parquet") if os.path.isdir(address) else address
        self.files = [address] if os.path.isfile(address) else sorted(glob.glob(pattern))
        if not self.files:
            raise FileNotFoundError(f"no Parquet table {address!r} (looked from {os.getcwd()}): check the path")
        first = open_parquet(self.files[0])
        self.columns = list(first.schema_arrow.names)
        #: Columns of bytes, or of {bytes, path} as Hugging Face writes them, and those with paths to read.
        self.bytes, self.paths = set[str](), set[str]()
        for column in first.schema_arrow:
            parts = {part.name for part in column.type} if pa.types.is_struct(column.type) else set()
            if "bytes" in parts or pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type):
                self.bytes.add(column.name)
            if "bytes" in parts and "path" in parts:
                self.paths.add(column.name)
        self.names: dict[str, list[str]] = {}  # column -> its classes, as in Hugging Face's `ClassLabel`
        with suppress(ValueError, KeyError, TypeError, AttributeError):
            features = json.loads((first.schema_arrow.metadata or {}).get(b"huggingface", b"{}"))["info"]["features"]
            self.names = {name: list(kind["names"]) for name, kind in features.items() if "names" in kind}
        self.embedded: EmbeddedImages | None = None
        self.head = [dict(zip(self.columns, values)) for values in islice(self._values(first, self.columns), head)]

    def read(self, image: str, others: Sequence[str]) -> Iterator[tuple[str, int, Inside | None, list[Any]]]:
        """Yield each row's file, its number from 1, the position of the image's bytes, and the values, image first."""
        if image in self.bytes:  # Hugging Face may write paths without bytes
            first = open_parquet(self.files[0]).iter_batches(batch_size=64, columns=[image], use_threads=False)
            if any(bytes_of(value) is not None for batch in islice(first, 1) for value in batch.column(0).to_pylist()):
                self.embedded = EmbeddedImages(tuple(self.files), image)
        for number, path in enumerate(self.files):
            file = open_parquet(path)
            if missing := [name for name in (image, *others) if name not in file.schema_arrow.names]:
                other = f"which {self.files[0]} has. Give tables with the same columns"
                raise TableError(f"{path} has no column {missing[0]!r}, {other}")
            groups = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
            places = ((number, group, row) for group, rows in enumerate(groups) for row in range(rows))
            for count, (place, values) in enumerate(zip(places, self._values(file, (image, *others))), 1):
                yield path, count, place if self.embedded else None, values

    def _values(self, file: pq.ParquetFile, columns: Sequence[str]) -> Iterator[list[Any]]:
        """Yield the values of each row; for images their paths, or b"" if they have none."""
        light = [f"{name}.path" if name in self.paths else name for name in columns]
        light = [name for name in light if name not in self.bytes]
        for batch in file.iter_batches(batch_size=1024, columns=light, use_threads=False):
            found = {name: batch.column(name).to_pylist() for name in batch.schema.names}
            for name in self.paths & found.keys():
                found[name] = [(value or {}).get("path") or b"" for value in found[name]]
            for name, words in self.names.items():
                if name in found:
                    found[name] = [words[n] if isinstance(n, int) and 0 <= n < len(words) else n for n in found[name]]
            empty = [b""] * batch.num_rows
            yield from map(list, zip(*(found.get(name, empty) for name in columns)))


def bytes_of(value: Any) -> bytes | None:
    """Return the bytes in a cell."""
    return value.get("bytes") if isinstance(value, dict) else value


@dataclass
class EmbeddedImages:
    """The bytes of images in tables, by (file, row group, row in it); each process keeps ROOM bytes of row groups."""

    files: tuple[str, ...]
    column: str
    _kept: dict[tuple[int, int], Any] = field(default_factory=dict)
    _owner: int = 0
    _lock: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        return EmbeddedImages, (self.files, self.column)

    def __call__(self, place: Inside) -> bytes:
        """Return the bytes of an image; SampleFault if the row has none."""
        if self._owner != os.getpid():  # a fork may have copied a held lock
            self._owner, self._lock = os.getpid(), threading.Lock()
        file, group, row = place
        with self._lock:
            if (column := self._kept.get((file, group))) is None:
                column = (
                    open_parquet(self.files[file]).read_row_group(group, [self.column], use_threads=False).column(0)
                )
                while self._kept and sum(kept.nbytes for kept in self._kept.values()) + column.nbytes > ROOM:
                    del self._kept[next(iter(self._kept))]
                self._kept[file, group] = column
        data = bytes_of(column[row].as_py())
        if not data:
            raise SampleFault("missing image", f"{self.files[file]} has no bytes there in column {self.column!r}")
        return data

    def share(self, file: int, group: int) -> float:
        """Return the size of a row group, as a share of ROOM."""
        return open_parquet(self.files[file]).metadata.row_group(group).total_byte_size / ROOM
