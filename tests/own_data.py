"""Twelve images, or more, with two captions and a class each, in every form that own data have."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from tiny_tars import write_tar

CLASSES = ("grey cat", "red car", "tree")


def image(number: int) -> bytes:
    """A PNG, different for every number."""
    rng = np.random.default_rng(number)
    out = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (24, 24, 3), dtype=np.uint8)).save(out, "PNG")
    return out.getvalue()


def label(number: int) -> str:
    return CLASSES[number % 3]


def captions(number: int) -> list[str]:
    return [f"image {number} of a {label(number)}", f"a {label(number)}, seen {number} times"]


def records(count: int = 12) -> list[dict[str, str]]:
    """A row for each caption; those of an image do not follow each other."""
    return [
        {"image": f"photos/{number:02d}.png", "caption": captions(number)[which], "label": label(number)}
        for which in range(2)
        for number in range(count)
    ]


def write_csv(path: Path, rows: list[dict[str, str]]) -> Path:
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)
    return path


def write(folder: Path, count: int = 12) -> dict[str, str]:
    """The same images as a source of each kind: kind -> KIND:ADDRESS; classes: class folders, bytes: Parquet."""
    (folder / "photos").mkdir(parents=True)
    for number in range(count):
        (folder / f"photos/{number:02d}.png").write_bytes(image(number))
        (folder / "classes" / label(number).replace(" ", "_")).mkdir(parents=True, exist_ok=True)
        (folder / "classes" / label(number).replace(" ", "_") / f"{number:02d}.png").write_bytes(image(number))
    write_csv(folder / "own.csv", records(count))
    (folder / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in records(count)))
    pq.write_table(pa.Table.from_pylist(records(count)), folder / "own.parquet")
    whole = [
        {"image": {"bytes": image(n), "path": None}, "captions": captions(n), "label": label(n)} for n in range(count)
    ]
    pq.write_table(pa.Table.from_pylist(whole), folder / "bytes.parquet")
    (folder / "tars").mkdir()
    for shard in range(2):
        samples = []
        for number in range(shard * count // 2, (shard + 1) * count // 2):
            words = json.dumps({"captions": captions(number), "label": label(number)}).encode()
            samples.append((f"{number:02d}", {"png": image(number), "json": words}))
        write_tar(folder / f"tars/{shard}.tar", samples)
    return {
        "csv": f"csv:{folder}/own.csv",
        "jsonl": f"jsonl:{folder}/own.jsonl",
        "parquet": f"parquet:{folder}/own.parquet",
        "bytes": f"parquet:{folder}/bytes.parquet",
        "shards": f"shards:{folder}/tars",
        "classes": f"images:{folder}/classes",
    }
