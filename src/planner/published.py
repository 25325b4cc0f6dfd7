"""Runs that others published, beside what the planner says of them."""
from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from planner.failures import HOUR
from planner.hardware import GPUS
from planner.models import count_of_run
from planner.tables import align
from prolip.flops import FORWARD_AND_BACKWARD

PAPER = "https://arxiv.org/abs/2410.18857"
SCALING = "https://huggingface.co/mehdidc/test/blob/main/trained_models_info.csv"
PRETRAINED = "https://github.com/mlfoundations/open_clip/blob/main/docs/PRETRAINED.md"
# 32 passes over LAION-400M, of which the same source counts 407,332,084 samples a pass.
LAION_400M = 32 * 407_332_084


class Published(NamedTuple):
    """samples_per_second: of all GPUs; given, or samples over the hours that the source states. family: whose code."""

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
    """Per GPU: GFLOPs of a sample, published samples/s, the MFU that implies, and the samples/s that the planner
    predicts from the median MFU of the *other* runs of the family (of all others where it is the only one)."""

    run: Published
    flops: float
    rate: float
    mfu: float
    predicted: float


RUNS = (
    Published("ProLIP B/16, 1.28B samples in a day", "ProLIP", "ProLIP-ViT-B-16", "H100", 32, 16384,
              1.28e9 / (24 * HOUR), False, PAPER),
    Published("OpenCLIP B/16, LAION-2B", "OpenCLIP", "ViT-B-16", "A100-40GB", 344, 344 * 256, 134239.8261, False,
              SCALING),
    Published("OpenCLIP L/14, LAION-2B, recomputing assumed", "OpenCLIP", "ViT-L-14", "A100-40GB", 1024,
              1024 * 84, 67928.46915, True, SCALING),
    Published("OpenCLIP B/16, LAION-400M, 61 h", "OpenCLIP", "ViT-B-16", "A100-40GB", 176, 33792,
              LAION_400M / (61 * HOUR), False, PRETRAINED),
    Published("OpenCLIP B/16+ 240, LAION-400M, 61 h", "OpenCLIP", "ViT-B-16-plus-240", "A100-40GB", 224, 35840,
              LAION_400M / (61 * HOUR), False, PRETRAINED),
    Published("OpenCLIP L/14, LAION-400M, 127 h, recomputing", "OpenCLIP", "ViT-L-14", "A100-40GB", 400, 38400,
              LAION_400M / (127 * HOUR), True, PRETRAINED),
)  # fmt: skip


def check_published(runs: Sequence[Published] = RUNS) -> list[Check]:
    """Every run with the speed that the others' MFU predicts for it. FLOPs done twice do not count into the MFU; their
    time does, so runs that recompute are compared by the FLOPs they do."""
    facts = []
    for run in runs:
        flops = count_of_run(run.model, "prolip", run.global_batch // run.gpus).flops
        rate = run.samples_per_second / run.gpus
        facts.append((run, flops, rate, rate * flops / (GPUS[run.gpu].bf16 * 1e12)))
    checks = []
    for run, flops, rate, mfu in facts:
        others = [m * done(r) for r, _, _, m in facts if r is not run and r.family == run.family]
        others = others or [m * done(r) for r, _, _, m in facts if r is not run]
        speed = statistics.median(others) * GPUS[run.gpu].bf16 * 1e12
        checks.append(Check(run, flops, rate, mfu, speed / (flops * done(run))))
    return checks


def done(run: Published) -> float:
    """FLOPs done over model FLOPs."""
    return 1 + run.recompute / FORWARD_AND_BACKWARD


def published_table(checks: Sequence[Check]) -> str:
    """Published and predicted side by side, then the sources."""
    cells = [["run", "GPUs", "GFLOPs/sample", "samples/s/GPU", "MFU", "predicted", "predicted/published"]]
    cells += [
        [c.run.name, f"{c.run.gpus} {c.run.gpu}", f"{c.flops / 1e9:.1f}", f"{c.rate:.1f}", f"{c.mfu:.1%}",
         f"{c.predicted:.1f}", f"{c.predicted / c.rate:.2f}"]
        for c in checks
    ]  # fmt: skip
    sources = dict.fromkeys(c.run.source for c in checks)
    return align(cells) + "\n\n" + "\n".join(f"source: {source}" for source in sources)
