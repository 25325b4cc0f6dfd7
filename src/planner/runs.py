"""The speed of a run of ours, from its metrics.jsonl."""
from __future__ import annotations

import statistics
from pathlib import Path
from typing import NamedTuple

from planner.models import count_of_run
from prolip.utils.documents import loads, read_json
from prolip.utils.flags import FlagError

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
