"""What is written of samples: a Parquet file for each shard, whole or not there, and read back in bounded memory."""
from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from prolip.utils.outputs import replacing

#: Columns that every table of scores has; figures stand beside them.
PLACE = {"row": pa.int32(), "key": pa.string(), "uid": pa.string(), "caption": pa.string(), "fault": pa.string()}
SIGNATURE = "signature"
NOTE = b"prolip"


def table_path(folder: Path, number: int) -> Path:
    """Where what belongs to shard `number` is."""
    return folder / f"{number:06d}.parquet"


def write_table(path: Path, columns: Mapping[str, Any], note: Mapping[str, Any]) -> None:
    """Write columns and a note as one file: whole or not at all; equal input, equal bytes."""
    table = pa.table({name: x if isinstance(x, pa.Array) else pa.array(x) for name, x in columns.items()})
    table = table.replace_schema_metadata({NOTE: json.dumps(note, sort_keys=True)})
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        pq.write_table(table, temporary, compression="zstd")


def read_note(path: Path) -> dict[str, Any]:
    """The note of a table. ValueError for a file that is none of ours."""
    try:
        return json.loads((pq.read_schema(path).metadata or {})[NOTE])
    except (KeyError, pa.ArrowInvalid, OSError, ValueError) as error:
        raise ValueError(f"{path} is no table of `prolip.curate` ({error}): delete it") from None


def read_columns(path: Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Columns of a table: numbers as float64 with NaN where there is none, others as objects."""
    table = pq.read_table(path, columns=list(names))
    found = {}
    for name in names:
        column = table.column(name)
        numeric = pa.types.is_floating(column.type) or pa.types.is_integer(column.type)
        found[name] = column.to_numpy().astype(np.float64) if numeric else column.to_numpy(zero_copy_only=False)
    return found


def column_names(path: Path) -> list[str]:
    """All columns of a table, in order."""
    return pq.read_schema(path).names


def whole_column(paths: Sequence[Path], name: str) -> np.ndarray:
    """A column of all tables, (N,) float32: four bytes a sample."""
    return np.concatenate([read_columns(path, [name])[name].astype(np.float32) for path in paths])


def in_order(paths: Sequence[Path], names: Sequence[str]) -> Iterator[tuple[Path, dict[str, np.ndarray]]]:
    """Tables one after the other."""
    for path in paths:
        yield path, read_columns(path, names)
