"""Checkpoints and failures: how often to save, and what a failure costs on average."""
from __future__ import annotations

import math
from typing import NamedTuple

from planner.hardware import GB, Cluster
from planner.memory import ADAM_STATES, FLOAT
from planner.models import Model
from planner.question import HOUR, MINUTE, Safety, Training
from prolip.utils.flags import FlagError


class Risk(NamedTuple):
    """Bytes and seconds. stop: how long a step stands still for a checkpoint; write: until it is safe; every: between
    checkpoints; best: by Daly's formula; lost: of work per failure; failures, wall, share_lost: of the whole run."""

    checkpoint: float
    stop: float
    write: float
    between_failures: float
    best: float
    every: float
    lost: float
    failures: float
    wall: float
    share_lost: float


def checkpoint_bytes(model: Model, training: Training) -> float:
    """Parameters, AdamW's moments and the averaged weights, float32."""
    return model.parameters * FLOAT * (1 + ADAM_STATES + (training.ema_decay is not None))


def between_failures(cluster: Cluster, safety: Safety) -> float:
    """Seconds between failures of the whole cluster: rates of all GPUs and nodes add up."""
    rate = cluster.gpus / safety.mtbf_gpu_hours
    if safety.mtbf_node_hours is not None:
        rate += cluster.nodes / safety.mtbf_node_hours
    return HOUR / rate


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


def risk(model: Model, training: Training, cluster: Cluster, safety: Safety, step: float) -> Risk:
    """What failures do to a run whose steps take `step` seconds.

    The step waits for the copy to the host only; the file is written behind it, so the interval is at least the time of
    writing, and what was computed while the last file was being written is lost as well.
    """
    size = checkpoint_bytes(model, training)
    shards = cluster.gpus if training.fsdp else 1
    stop, write = size / shards / (safety.copy_gbs * GB), size / (safety.checkpoint_gbs * GB)
    mean = between_failures(cluster, safety)
    best = max(best_interval(stop, mean), write)
    every = best
    if safety.save_every_steps is not None:
        every = safety.save_every_steps * step
    elif safety.save_every_samples is not None:
        every = safety.save_every_samples / training.global_batch_size * step
    elif safety.save_every_minutes is not None:
        every = safety.save_every_minutes * MINUTE
    work = training.max_samples / training.global_batch_size * step
    every = max(min(every, work), step)  # what is beyond the end of the run is its end
    restart = safety.restart_minutes * MINUTE + write
    wall = expected_wall(work, every, stop, mean, restart)
    lost = every / 2 + write
    return Risk(size, stop, write, mean, best, every, lost, wall / mean, wall, 1 - work / wall)
