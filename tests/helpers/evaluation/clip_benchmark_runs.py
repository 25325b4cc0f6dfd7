"""Helpers for the tests of prolip eval clip-benchmark: small test sets, one evaluation in this process."""

from __future__ import annotations

import json
from pathlib import Path

import miniatures as mini
from commands import clip_benchmark

CLASSES = mini.CLASSES[:6]


def write_sets(root: Path) -> Path:
    """single (6 classes), few (3), multi (several classes per image), pairs (3 captions each), probe (3 splits)."""
    mini.wds_classification(root / "single", CLASSES)
    mini.wds_classification(root / "few", CLASSES[:3], images=7, shards=1, seed=1)
    mini.wds_multilabel(root / "multi", CLASSES)
    mini.wds_retrieval(root / "pairs")
    for seed, split in enumerate(("train", "val", "test"), start=2):
        mini.wds_classification(root / "probe", CLASSES, images=12, shards=1, seed=seed, split=split)
    return root


def evaluate(folder: Path | str, *flags: str, workers: int = 0) -> dict:
    """The whole result file of one evaluation by our command."""
    common = ["--dataset", f"wds/{Path(folder).name}", "--dataset_root", str(folder), "--output", "result.json"]
    clip_benchmark(["eval", *common, "--batch_size", "5", "--num_workers", str(workers), "--quiet", *flags])
    return json.loads(Path("result.json").read_text())
