"""Runs that were done: the speed of one of ours from its metrics.jsonl, and runs that others published."""
from __future__ import annotations

import csv
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from planner.failures import HOUR
from planner.hardware import GPUS
from planner.models import count_of_run
from prolip.flops import FORWARD_AND_BACKWARD
from prolip.utils.documents import loads, read_json
from training.flags import FlagError

# The first lines hold compilation, caches that fill, and autotuning.
WARM_UP = 0.2


class Measurement(NamedTuple):
    """samples_per_second: median over the lines after the first fifth, of one rank, without the wait for data; model,
    flops: of one sample; None where the run folder has no config.json."""

    path: str
    lines: int
    samples_per_second: float
    model: str | None
    flops: float | None


def read_measurement(path: str, ranks: int) -> Measurement:
    """The speed of the run whose metrics.jsonl, or folder, this is. Raises FlagError when nothing can be read off."""
    file = Path(path)
    if file.is_dir():
        file = file / "metrics.jsonl"
    if not file.is_file():
        above = file.parent.parent / "metrics.jsonl"
        near = f": {above.parent} has one" if above.is_file() else ""
        wanted = f"give the metrics.jsonl of a run, or its folder{near}"
        raise FlagError(f"--measured {path}: there is no such file; {wanted}")
    lines = []
    for line in file.read_text(errors="replace").splitlines():
        try:
            values = loads(line)
        except ValueError:  # a line that was cut off
            continue
        if isinstance(values, dict) and values.get("kind") == "train" and values.get("samples_per_second"):
            lines.append(values)
    kept = lines[int(len(lines) * WARM_UP):] if len(lines) > 1 else lines
    if not kept:
        raise FlagError(f"--measured {path}: got no line with samples_per_second, wanted at least one: train longer, "
                        "or log more often with --log-every-n-steps")
    speeds = [v["samples_per_second"] / max(1e-9, 1 - float(v.get("data_wait") or 0.0)) for v in kept]
    name, flops = read_model(file.parent / "config.json", ranks)
    return Measurement(path, len(kept), statistics.median(speeds) / ranks, name, flops)


def read_model(config: Path, ranks: int) -> tuple[str | None, float | None]:
    """(model, FLOPs of one sample) of a saved config, where there is one."""
    if not config.is_file():
        return None, None
    try:
        values = read_json(config)
        name, method = values["model"]["model"], values["method"]
        local = values["data"].get("batch_size") or (values["run"].get("global_batch_size") or ranks) // ranks
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FlagError(f"--measured: {config} is no configuration of a run ({type(error).__name__}: {error}): give the"
                        " folder that training wrote") from error  # fmt: skip
    return name, count_of_run(name, method, max(1, local)).flops


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


def read_runs(path: Path) -> list[Published]:
    """The runs of a CSV file. Sources that do not give samples_per_second give samples, and the hours they took."""
    runs = []
    with open(path, encoding="utf-8-sig", newline="") as file:
        for row in csv.DictReader(file):
            given = row["samples_per_second"]
            speed = float(given) if given else float(row["samples"]) / (float(row["hours"]) * HOUR)
            size = int(row["gpus"]), int(row["global_batch"])
            runs.append(Published(row["name"], row["family"], row["model"], row["gpu"], *size, speed,
                                  row["recompute"] == "yes", row["source"]))  # fmt: skip
    return runs


#: Samples of LAION-400M: 32 passes, of which the same source counts 407,332,084 samples a pass.
RUNS = read_runs(Path(__file__).with_name("published.csv"))


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
