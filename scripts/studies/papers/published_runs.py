"""Accuracy of the planner on runs that others published: each is predicted from the MFU of the others.

    python scripts/studies/papers/published_runs.py

published_runs.csv holds the runs with their sources. docs/benchmarks/planner.md shows the table.
"""

from __future__ import annotations

import csv
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import open_clip
import torch
from open_clip.model import CLIP

ROOT = Path(__file__).resolve().parents[3]
if str(ROOT / "src") not in sys.path:
    sys.path.insert(0, str(ROOT / "src"))

from prolip.flops import FORWARD_AND_BACKWARD, forward_flops
from prolip.models.registry import own_models
from prolip.plan.models import GPUS, count_of_run
from prolip.plan.tables import HOUR, align
from prolip.utils import console


class Published(NamedTuple):
    """A run. samples_per_second: of all GPUs, stated or samples over stated hours; family: origin of the code."""

    name: str
    family: str
    model: str
    gpu: str
    gpus: int
    global_batch: int
    samples_per_second: float
    recompute: bool
    source: str


class Check(NamedTuple):
    """A check per GPU: GFLOPs of a sample, published samples/s, the MFU that implies, and the samples/s predicted by
    the planner from the median MFU of the *other* runs of the family (of all others if it is the only one)."""

    run: Published
    flops: float
    rate: float
    mfu: float
    predicted: float


def read_runs(path: Path) -> list[Published]:
    """Read the runs of a CSV file. Sources without samples_per_second give samples and hours."""
    runs = []
    with open(path, encoding="utf-8-sig", newline="") as file:
        for row in csv.DictReader(file):
            given = row["samples_per_second"]
            speed = float(given) if given else float(row["samples"]) / (float(row["hours"]) * HOUR)
            size = int(row["gpus"]), int(row["global_batch"])
            runs.append(
                Published(
                    row["name"],
                    row["family"],
                    row["model"],
                    row["gpu"],
                    *size,
                    speed,
                    row["recompute"] == "yes",
                    row["source"],
                )
            )
    return runs


#: Samples of LAION-400M: 32 passes, of which the same source counts 407,332,084 samples a pass.
RUNS = read_runs(Path(__file__).with_suffix(".csv"))


def check_published(runs: Sequence[Published] = RUNS) -> list[Check]:
    """Return every run with the speed predicted from the MFU of the others. MFU does not count FLOPs done twice, but
    their time does; so runs that recompute are compared by the FLOPs they do."""
    facts = []
    for run in runs:
        flops = flops_of(run)
        rate = run.samples_per_second / run.gpus
        facts.append((run, flops, rate, rate * flops / (GPUS[run.gpu].peak_tflops * 1e12)))
    checks = []
    for run, flops, rate, mfu in facts:
        others = [m * done(r) for r, _, _, m in facts if r is not run and r.family == run.family]
        others = others or [m * done(r) for r, _, _, m in facts if r is not run]
        speed = statistics.median(others) * GPUS[run.gpu].peak_tflops * 1e12
        checks.append(Check(run, flops, rate, mfu, speed / (flops * done(run))))
    return checks


def flops_of(run: Published) -> float:
    """Return the model FLOPs of a sample, forward and backward, of one of our models or OpenCLIP's."""
    if run.model in own_models():
        return count_of_run(run.model, "prolip", run.global_batch // run.gpus).flops
    with torch.device("meta"):
        model = CLIP(**open_clip.get_model_config(run.model)).requires_grad_(False)
    return FORWARD_AND_BACKWARD * sum(forward_flops(model, kind) for kind in ("image", "text"))


def done(run: Published) -> float:
    """Return the FLOPs done over model FLOPs."""
    return 1 + run.recompute / FORWARD_AND_BACKWARD


def published_table(checks: Sequence[Check]) -> str:
    """Format published and predicted speeds side by side, then the sources."""
    cells = [["run", "GPUs", "GFLOPs/sample", "samples/s/GPU", "MFU", "predicted", "predicted/published"]]
    cells += [
        [
            c.run.name,
            f"{c.run.gpus} {c.run.gpu}",
            f"{c.flops / 1e9:.1f}",
            f"{c.rate:.1f}",
            f"{c.mfu:.1%}",
            f"{c.predicted:.1f}",
            f"{c.predicted / c.rate:.2f}",
        ]
        for c in checks
    ]
    sources = dict.fromkeys(c.run.source for c in checks)
    return align(cells) + "\n\n" + "\n".join(f"source: {source}" for source in sources)


def main() -> None:
    print(published_table(check_published()))


if __name__ == "__main__":
    console.command(main)
