"""Checkpoints and failures: how often to save, and what a failure costs on average."""
from __future__ import annotations

import math

from planner.config import FLOAT, PlanConfig
from planner.hardware import GB, Cluster
from planner.memory import ADAM_STATES
from planner.models import Model
from planner.tables import HOUR, MINUTE, Rows, Value, number, size, span
from prolip.utils.flags import FlagError


def best_interval(stop: float, mean: float) -> float:
    """Seconds of work between checkpoints that cost `stop` each, at a mean of `mean` seconds between failures.

    Young (1974): sqrt(2 d M). Daly (2006): sqrt(2 d M) [1 + sqrt(d / 2M) / 3 + (d / 2M) / 9] - d for d < 2M,
    else M.
    """
    if stop >= 2 * mean:
        return mean
    x = stop / (2 * mean)
    return math.sqrt(2 * stop * mean) * (1 + math.sqrt(x) / 3 + x / 9) - stop


def expected_wall(work: float, every: float, stop: float, mean: float, restart: float) -> float:
    """Seconds that `work` seconds of computing take with failures at exponential intervals, Daly (2006):

    M exp(R/M) (exp((tau + d)/M) - 1) work / tau. FlagError where that is beyond all numbers: the run never ends.
    """
    try:
        return mean * math.exp(restart / mean) * math.expm1((every + stop) / mean) * work / every
    except OverflowError:
        raise FlagError(
            f"a failure every {mean:.3g} s, {every:.3g} s between checkpoints, {restart:.3g} s to restart: such a run "
            "never ends; give a larger --mtbf-gpu-hours, a shorter cadence, or a smaller --restart-minutes"
        ) from None


def failures(model: Model, config: PlanConfig, cluster: Cluster, step: float) -> tuple[float, Rows]:
    """Return (seconds of the run, failures included; its table), for steps that take `step` seconds.

    The step waits for the copy to the host only. The file is written after that: the interval is at least the time of
    writing, and what was computed while the last file was being written is lost as well.
    """
    # Parameters, AdamW's moments and the averaged weights, float32.
    saved = model.parameters * FLOAT * (1 + ADAM_STATES + (config.ema_decay is not None))
    stop, write = saved / cluster.shards / (config.copy_gbs * GB), saved / (config.checkpoint_gbs * GB)
    # Rates of all GPUs and nodes add up.
    mean = HOUR / (cluster.gpus / config.mtbf_gpu_hours + cluster.nodes / (config.mtbf_node_hours or math.inf))
    per_sample = step / config.global_batch_size
    work = config.max_samples * per_sample
    best = max(best_interval(stop, mean), write)
    every = best if config.save_every_samples is None else config.save_every_samples * per_sample
    every = max(min(every, work), step)  # what is beyond the end of the run is its end
    wall = expected_wall(work, every, stop, mean, config.restart_minutes * MINUTE + write)
    return wall, {
        "between failures": Value(mean, span),
        "failures in the run": Value(wall / mean, "{:.2g}".format),
        "checkpoint": Value(saved, size),
        "step stands still for": Value(stop, span),
        "written in": Value(write, span),
        "best interval (Daly)": Value(best, span),
        "interval taken": Value(every, span),
        "in samples": Value(every / per_sample, number),
        "work lost per failure": Value(every / 2 + write, span),
        "time lost in the run": Value(1 - work / wall, "{:.2%}".format),
    }
