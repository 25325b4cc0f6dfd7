"""What is written of samples: a Parquet file for each shard, read back in bounded memory, and a manifest of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from prolip.utils.documents import loads

SCORES, MANIFEST = "scores", "manifest.json"
#: Columns that every table of scores has; figures stand beside them.
PLACE = {
    "row": pa.int32(),
    "key": pa.string(),
    "uid": pa.string(),
    "caption": pa.string(),
    "fault": pa.string(),
    "content": pa.binary(16),
}
SIZE = {"width": pa.int32(), "height": pa.int32()}
#: Of an image, in BITS; the angle between two means is about pi times the share in which theirs differ.
SIGNATURE, BITS = "signature", 256
NOTE = b"prolip"
SUM = "sha256"


class Table(NamedTuple):
    """A table as far as it was read. kinds: all columns with the names of their types."""

    note: dict[str, Any]
    kinds: dict[str, str]
    columns: dict[str, np.ndarray]


def table_path(folder: Path, number: int) -> Path:
    """Where what belongs to shard `number` is."""
    return folder / f"{number:06d}.parquet"


def write_table(path: Path, table: pa.Table, note: Mapping[str, Any]) -> None:
    """Write a table and a note as one file: equal input, equal bytes."""
    table = table.replace_schema_metadata({NOTE: json.dumps(note, sort_keys=True)})
    with path.open("wb") as file:
        pq.write_table(table, file, compression="zstd", write_page_checksum=True)


def read_table(path: Path, names: Sequence[str] = ()) -> Table:
    """A table with some of its columns: floats and whole numbers as float64, NaN where there is none; those without a
    sign, which count or hold bits, as they are; others as objects. ValueError for a file that is damaged or not ours.
    """
    try:
        with path.open("rb") as file:
            parquet = pq.ParquetFile(file, page_checksum_verification=True)
            schema = parquet.schema_arrow
            note = json.loads(schema.metadata[NOTE])
            kinds = {name: str(schema.field(name).type) for name in schema.names}
            table = parquet.read(columns=list(names)) if names else pa.table({})
            return Table(note, kinds, {name: _values(table.column(name)) for name in names})
    except Exception as error:  # Arrow has its own exceptions for every kind of damage
        command = "score" if path.parent.name == SCORES else "select"
        why = f"{type(error).__name__}: {error}".split("\n", maxsplit=1)[0]
        raise ValueError(
            f"{path} is damaged, or no table of `prolip curate` ({why}): delete it, and run"
            f" `prolip curate {command}` again"
        ) from None


def _values(column: pa.ChunkedArray) -> np.ndarray:
    if pa.types.is_floating(column.type) or pa.types.is_signed_integer(column.type):
        return column.to_numpy().astype(np.float64)
    return column.to_numpy(zero_copy_only=False)


def figures_of(kinds: Mapping[str, str]) -> list[str]:
    """The columns that hold numbers of samples, in order."""
    return [name for name in kinds if name not in PLACE and name != SIGNATURE]


def whole_column(paths: Sequence[Path], name: str) -> np.ndarray:
    """A column of all tables, (N,) float32: four bytes a sample."""
    return np.concatenate([read_table(path, [name]).columns[name].astype(np.float32) for path in paths])


def digest(words: Mapping[str, Any]) -> str:
    """SHA-256 of what a JSON file says."""
    return hashlib.sha256(json.dumps(words, sort_keys=True).encode()).hexdigest()


def write_words(path: Path, words: Mapping[str, Any]) -> None:
    """Write words as JSON with their checksum."""
    path.write_text(json.dumps({**words, SUM: digest(words)}, indent=1), encoding="utf-8")


def read_words(path: Path, remedy: str) -> dict[str, Any]:
    """What `write_words` wrote. ValueError where it is damaged, with the remedy; FileNotFoundError."""
    try:
        words = loads(path.read_bytes())
        if words.pop(SUM) == digest(words):
            return words
    except (ValueError, KeyError, AttributeError, TypeError):
        pass
    raise ValueError(f"{path} is damaged: {remedy}")


def manifest_of(folder: Path) -> dict[str, Any]:
    """What the scores below `folder` are of: `Scorer.words`. ValueError where there are none, or those of before."""
    path, again = folder / SCORES / MANIFEST, "`prolip curate score`"
    try:
        return read_words(path, f"delete it, and run {again} again")
    except FileNotFoundError:
        old = any((folder / SCORES).glob("*.parquet"))
        how = f"its tables are of an earlier version, run {again} with a new --output" if old else f"run {again} first"
        raise ValueError(f"no scores in {folder / SCORES}, it has no {MANIFEST}: {how}") from None


def tables_of(folder: Path) -> tuple[dict[str, Any], list[Path]]:
    """The manifest, and the scores of all shards, in order. ValueError where one is missing: its number says which."""
    manifest = manifest_of(folder)
    shards = len(manifest["shards"])
    paths = [table_path(folder / SCORES, number) for number in range(shards)]
    if missing := [number for number, path in enumerate(paths) if not path.exists()]:
        raise ValueError(
            f"{len(missing)} of {shards} shards have no scores yet, number {missing[0]} for one: go on"
            " with `prolip curate score`, in all of its parts"
        )
    return manifest, paths
