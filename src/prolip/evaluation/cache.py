"""Embeddings in a folder: images/NAME-KEY and texts/KEY.safetensors with checksums, and tasks/NAME-KEY.json."""

from __future__ import annotations

import json
import logging
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from prolip.gaussian import Gaussian
from prolip.utils.documents import loads
from prolip.utils.outputs import replacing

log = logging.getLogger(__name__)

FORMAT = "prolip-features-1"
STRINGS = "strings"


class Record(NamedTuple):
    """Content of a file: tensors by name, and JSON values."""

    tensors: dict[str, Tensor]
    values: dict[str, Any]


class FeatureStore:
    """Files of embeddings below a folder; without a folder, texts stay in memory and images are not kept."""

    def __init__(self, folder: str | os.PathLike | None = None):
        self.folder = Path(folder) if folder is not None else None
        self._texts: dict[str, Record] = {}

    def read(self, kind: str, key: str, name: str = "") -> Record | None:
        """Return the record of this key; None without one and, with a warning, for a damaged file."""
        if self.folder is None:
            return self._texts.get(key) if kind == "texts" else None
        path = self.folder / kind / file_name(name, key, "safetensors")
        if not path.is_file():
            return None
        try:
            with safe_open(str(path), framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
            if metadata.get("format") != FORMAT or metadata.get("key") != key:
                raise ValueError(f"it has {metadata.get('format')} {metadata.get('key')}, expected {FORMAT} {key}")
            if metadata.get("crc32") != checksum(tensors):
                raise ValueError("its bytes do not match their checksum")
            return Record(tensors, loads(tensors.pop(STRINGS).numpy().tobytes()))
        except (SafetensorError, ValueError, KeyError, OSError) as error:
            log.warning("%s is damaged (%s): computing it again", path, str(error).splitlines()[0])
            return None

    def write(self, kind: str, key: str, record: Record, name: str = "") -> None:
        """Write a record under this key, atomically."""
        if self.folder is None:
            if kind == "texts":
                self._texts[key] = record
            return
        tensors = {name: tensor.contiguous() for name, tensor in record.tensors.items()}
        text = json.dumps(record.values).encode()  # as a tensor, because headers are bounded
        tensors[STRINGS] = torch.from_numpy(np.frombuffer(text, dtype=np.uint8).copy())
        with replacing(self.folder / kind / file_name(name, key, "safetensors")) as temporary:
            save_file(tensors, temporary, metadata={"format": FORMAT, "key": key, "crc32": checksum(tensors)})

    def write_task(self, name: str, key: str, task: Mapping[str, Any]) -> None:
        """Write the description of a task."""
        if self.folder is not None:
            with replacing(self.folder / "tasks" / file_name(name, key, "json")) as temporary:
                temporary.write_text(json.dumps({"format": FORMAT, **task}), encoding="utf-8")

    def tasks(self) -> Iterator[dict[str, Any]]:
        """Yield all tasks by name. FileNotFoundError if the folder has none, ValueError for another file."""
        paths = sorted(self.folder.glob("tasks/*.json")) if self.folder is not None else []
        if not paths:
            remedy = f"write them with --model ... --data ... --save-features {self.folder}"
            raise FileNotFoundError(f"no features in {self.folder}: {remedy}")
        for path in paths:
            try:
                task = loads(path.read_text(encoding="utf-8"))
                if task["format"] != FORMAT:
                    raise ValueError(f"format {task['format']!r}, expected {FORMAT!r}")
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path} is not a task file ({error}): remove it, and compute it again") from error
            yield task


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """Return the CRC-32 of all tensors' bytes, by name."""
    value = 0
    for name, tensor in sorted(tensors.items()):
        value = zlib.crc32(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode(), value)
        value = zlib.crc32(tensor.numpy().tobytes(), value)
    return f"{value:08x}"


def pack(name: str, z: Gaussian) -> dict[str, Tensor]:
    """Return the tensors of a Gaussian (N, D); points, with log_var -inf everywhere, are stored as means only."""
    points = bool(z.log_var.isneginf().all())
    return {f"{name}_mean": z.mean} | ({} if points else {f"{name}_log_var": z.log_var})


def unpack(name: str, tensors: Mapping[str, Tensor]) -> Gaussian:
    """Return the Gaussian of tensors by `pack`."""
    mean = tensors[f"{name}_mean"]
    log_var = tensors.get(f"{name}_log_var")
    return Gaussian(mean, torch.full_like(mean, -torch.inf) if log_var is None else log_var)


def slug(name: str) -> str:
    """Return a name as part of a file name."""
    return re.sub(r"[^\w.-]+", "-", name).strip("-.")


def file_name(name: str, key: str, ending: str) -> str:
    """Return NAME-KEY.ending, or KEY.ending without a name."""
    return "-".join(filter(None, (slug(name), key))) + f".{ending}"
