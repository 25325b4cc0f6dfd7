"""Tables of samples, one Parquet file per shard with a manifest, and the division of files among processes."""

from __future__ import annotations

import hashlib
import json
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from prolip.utils.documents import loads, shown
from prolip.utils.outputs import lock, replacing

SCORES, MANIFEST = "scores", "manifest.json"
#: Columns of every table of scores, before its signals.
PLACE = {"row": pa.int32(), **dict.fromkeys(("key", "uid", "caption", "fault"), pa.string()), "content": pa.binary(16)}
SIZE = {"width": pa.int32(), "height": pa.int32()}
#: BITS of an image; the angle between two means is about pi times the share of differing bits.
SIGNATURE, BITS = "signature", 256
NOTE, SUM = b"prolip", "sha256"
T = TypeVar("T")
Stamp = tuple[int, int] | None


class SampleTable(NamedTuple):
    """The columns of a table that were read. kinds: every column -> the name of its type."""

    note: dict[str, Any]
    kinds: dict[str, str]
    columns: dict[str, np.ndarray]


def table_path(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}.parquet"


def write_table(path: Path, table: pa.Table, note: Mapping[str, Any]) -> None:
    """Write a table and a note as one file: equal input, equal bytes."""
    table = table.replace_schema_metadata({NOTE: json.dumps(note, sort_keys=True)})
    with path.open("wb") as file:
        pq.write_table(table, file, compression="zstd", write_page_checksum=True)


def read_table(path: Path, names: Sequence[str] = ()) -> SampleTable:
    """Read some columns of a table: floats and signed integers as float64 with NaN for missing values, unsigned ones
    (counts and bits) unchanged, others as objects. ValueError for a damaged or foreign file.
    """
    try:
        with path.open("rb") as file:
            parquet = pq.ParquetFile(file, page_checksum_verification=True)
            schema = parquet.schema_arrow
            note = json.loads(schema.metadata[NOTE])
            kinds = {name: str(schema.field(name).type) for name in schema.names}
            table = parquet.read(columns=list(names)) if names else pa.table({})
            columns = {}
            for name in names:
                kind, values = table.column(name).type, table.column(name).to_numpy(zero_copy_only=False)
                is_number = pa.types.is_floating(kind) or pa.types.is_signed_integer(kind)
                columns[name] = values.astype(np.float64) if is_number else values
            return SampleTable(note, kinds, columns)
    except Exception as error:  # Arrow has its own exceptions for every kind of damage
        again = f"run `prolip curate {'score' if path.parent.name == SCORES else 'select'}` again"
        why = f"{type(error).__name__}: {error}".split("\n", maxsplit=1)[0]
        raise ValueError(f"{path} is damaged or not of `prolip curate` ({why}). Delete it, and {again}") from None


def signals_of(kinds: Mapping[str, str]) -> list[str]:
    """Return the numeric columns of samples, in order."""
    return [name for name in kinds if name not in PLACE and name != SIGNATURE]


def whole_column(paths: Sequence[Path], name: str) -> np.ndarray:
    """Return a column of all tables, (N,) float32: four bytes a sample."""
    return np.concatenate([read_table(path, [name]).columns[name].astype(np.float32) for path in paths])


def digest(words: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(words, sort_keys=True).encode()).hexdigest()


def write_words(path: Path, words: Mapping[str, Any]) -> None:
    path.write_text(json.dumps({**words, SUM: digest(words)}, indent=1), encoding="utf-8")


def read_words(path: Path, remedy: str) -> dict[str, Any]:
    """Read the words in a file of `write_words`. ValueError with the remedy if it is damaged; FileNotFoundError."""
    with suppress(ValueError, KeyError, AttributeError, TypeError):
        words = loads(path.read_bytes())
        if words.pop(SUM) == digest(words):
            return words
    raise ValueError(f"{path} is damaged: {remedy}")


def manifest_of(folder: Path) -> dict[str, Any]:
    """Return the manifest of the scores in `folder`: `Scorer.words`. ValueError if there is none."""
    path, again = folder / SCORES / MANIFEST, "`prolip curate score`"
    if not path.exists():
        raise ValueError(f"no scores in {folder / SCORES} ({MANIFEST} is missing): run {again} first")
    return read_words(path, f"delete it, and run {again} again")


def tables_of(folder: Path) -> tuple[dict[str, Any], list[Path]]:
    """Return the manifest, and the scores of all shards in order. ValueError names the first missing one."""
    manifest = manifest_of(folder)
    paths = [table_path(folder / SCORES, number) for number in range(len(manifest["shards"]))]
    if missing := [number for number, path in enumerate(paths) if not path.exists()]:
        what = f"{len(missing)} of {len(paths)} shards have no scores yet, such as number {missing[0]}"
        raise ValueError(f"{what}: run all parts of `prolip curate score` again")
    return manifest, paths


def stamp(path: Path) -> Stamp:
    """Return a value that changes when a file is replaced; None if it is missing."""
    with suppress(FileNotFoundError):
        found = path.stat()
        return found.st_ino, found.st_mtime_ns
    return None


@contextmanager
def claimed(path: Path, seen: Stamp) -> Iterator[bool]:
    """Yield whether this process may make a file: it has the lock and the stamp is `seen`; True without locks."""
    place = path.with_name(f".{path.name}.lock")
    held = lock(place)
    # its former holder may have deleted it between our open and our lock; another process may hold the new file
    mine = held is not None and os.fstat(held.fileno()).st_nlink > 0
    try:
        yield mine and stamp(path) == seen
    finally:
        if mine:
            place.unlink(missing_ok=True)
        if held is not None:
            held.close()


def made(missing: Mapping[int, Stamp], path: Callable[[int], Path], make: Callable[[int], T]) -> Iterator[T]:
    """Make the missing files (number -> `stamp`) that no other process makes; yield the results of `make`."""
    numbers, start = [*missing], random.randrange(len(missing) or 1)
    for number in tqdm(numbers[start:] + numbers[:start], unit="shard", disable=None):
        with claimed(path(number), missing[number]) as mine:
            found = [make(number)] if mine else []
        yield from found


def agree(path: Path, words: Mapping[str, Any], remedy: str) -> None:
    """Write words to a file unless another process did. ValueError with the remedy names a difference."""
    path.parent.mkdir(parents=True, exist_ok=True)
    while not path.exists():
        with claimed(path, None) as mine:
            if mine:
                with replacing(path) as temporary:
                    write_words(temporary, words)
            else:
                time.sleep(0.02)
    found, new = read_words(path, remedy), json.loads(json.dumps(words))
    for name in {**new, **found}:
        if found.get(name) != new.get(name):
            differ = f"was made with {name} {shown(found.get(name))}, but this is {shown(new.get(name))}"
            raise ValueError(f"{path} {differ}: {remedy}")
