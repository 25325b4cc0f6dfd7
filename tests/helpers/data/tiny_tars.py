"""Small shards, a transform and a tokenizer for the tests of the data module."""

from __future__ import annotations

import io
import json
import random
import tarfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from prolip.data.faults import FaultCounter, ShardFault
from prolip.data.reading.tar import read_shard

GROUPS = ("animals nature", "food drink", "objects")


def saved(image: Image.Image, kind: str = "JPEG", **options: object) -> bytes:
    """Return the file of an image."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def png(index: int = 0, size: int = 4, mode: str = "RGB") -> bytes:
    """Return an image whose pixels differ by `index`."""
    pixels = np.random.default_rng(index).integers(0, 256, (size, size, 3), dtype=np.uint8)
    return saved(Image.fromarray(pixels).convert(mode), "PNG")


def record(index: int) -> dict:
    """The JSON of sample `index`: one name, three keywords, one of three groups."""
    return {"name": f"name {index}", "keywords": [f"word {index} {i}" for i in range(3)], "group": GROUPS[index % 3]}


def members(index: int) -> dict[str, bytes]:
    """A complete sample."""
    return {"png": png(index), "txt": f"caption {index}".encode(), "json": json.dumps(record(index)).encode()}


def write_tar(path: Path, samples: Iterable[tuple[str, Mapping[str, bytes]]]) -> str:
    """Write a shard, members in the order given."""
    with tarfile.open(path, "w") as archive:
        for key, parts in samples:
            for suffix, data in parts.items():
                info = tarfile.TarInfo(f"{key}.{suffix}")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    return str(path)


def write_shards(folder: Path, sizes: Iterable[int]) -> list[str]:
    """Shards 0.tar, 1.tar... with keys s000, s001... that run on through all of them."""
    urls, start = [], 0
    for number, size in enumerate(sizes):
        rows = range(start, start + size)
        urls.append(write_tar(folder / f"{number}.tar", ((f"s{i:03d}", members(i)) for i in rows)))
        start += size
    return urls


def without_url(raw: dict) -> dict:
    """A raw sample, wherever it was read."""
    return {name: value for name, value in raw.items() if name != "__url__"}


def read_counted(url: object, policy=None, entry=None, reader=None) -> tuple[list[dict], FaultCounter]:
    """The samples of a shard up to a fault that ends it, and all faults, counted, in bounded time."""
    faults, samples, start = FaultCounter(), [], time.monotonic()
    try:
        raws = reader(str(url), faults.add) if reader else read_shard(str(url), faults.add, policy, entry)
        samples += map(without_url, raws)
    except ShardFault as fault:
        faults.add(fault)
    assert time.monotonic() - start < 15
    return samples, faults


def noisy(image: Image.Image) -> torch.Tensor:
    """An augmentation that draws from torch's, Python's and NumPy's global generators: (3, H, W)."""
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float()
    noise = torch.rand(()) + random.random() + np.random.random()  # noqa: NPY002
    return pixels + float(noise)


def plain(image: Image.Image) -> torch.Tensor:
    """uint8 pixels, (3, H, W)."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def letters(captions: list[str], context_length: int = 20) -> torch.Tensor:
    """Character codes padded with 0, (n, context_length)."""
    rows = [[ord(letter) for letter in caption[:context_length]] for caption in captions]
    return torch.tensor([row + [0] * (context_length - len(row)) for row in rows])
