"""Checkpoint intervals and expected losses against a simulation of failures, and against each other."""
from __future__ import annotations

import math
import random

import numpy as np
import pytest

from planner.config import PlanConfig
from planner.failures import best_interval, expected_wall, failures
from planner.hardware import build_cluster
from planner.models import count_of_run


def play(work, every, stop, mean, restart, generator):
    """Seconds until `work` is done, failures drawn one by one; a failure costs the work since the last checkpoint."""
    now, done, next_failure = 0.0, 0.0, generator.expovariate(1 / mean)
    while done < work:
        segment = every + stop
        if now + segment <= next_failure:
            now, done = now + segment, done + every
            continue
        now = next_failure
        next_failure = now + generator.expovariate(1 / mean)
        while now + restart > next_failure:  # fails again while it starts
            now = next_failure
            next_failure = now + generator.expovariate(1 / mean)
        now += restart
    return now


@pytest.mark.parametrize("every, mean", [(100.0, 2000.0), (400.0, 1000.0), (50.0, 20000.0)])
def test_expected_time_is_that_of_failures_played_out(every, mean):
    generator = random.Random(0)
    work, stop, restart = 20 * every, 10.0, 30.0
    played = np.mean([play(work, every, stop, mean, restart, generator) for _ in range(3000)])
    assert expected_wall(work, every, stop, mean, restart) == pytest.approx(played, rel=0.02)


@pytest.mark.parametrize("stop, mean", [(1.0, 1e4), (30.0, 3e3), (100.0, 1e3)])
def test_the_best_interval_is_the_best(stop, mean):
    best = best_interval(stop, mean)
    grid = best * np.geomspace(0.3, 3, 601)
    walls = [expected_wall(1e6, every, stop, mean, 60.0) for every in grid]
    assert grid[int(np.argmin(walls))] == pytest.approx(best, rel=0.02)


def test_rare_failures_give_youngs_interval():
    assert best_interval(1.0, 1e8) == pytest.approx(math.sqrt(2e8), rel=1e-3)


def test_frequent_failures_give_dalys_interval():
    """d = 200, M = 400, x = d / 2M = 1/4: sqrt(2 d M) = 400, times 1 + 1/6 + 1/36, minus d."""
    assert best_interval(200.0, 400.0) == pytest.approx(400 * (1 + 1 / 6 + 1 / 36) - 200)
    assert best_interval(200.0, 100.0) == 100.0


def planned(gpus, step=0.1, model="ProLIP-ViT-B-16", **settings):
    """(seconds of the run, its table) on so many GPUs."""
    config = PlanConfig(gpus=[gpus], **settings)
    return failures(count_of_run(model, "prolip", 16), config, build_cluster(config, gpus), step)


def test_failure_rates_of_gpus_and_nodes_add_up():
    assert planned(64, mtbf_gpu_hours=6400.0, mtbf_node_hours=800.0)[1]["between failures"] == pytest.approx(50 * 3600)


def test_the_default_rate_is_that_of_llama_3():
    """419 interruptions nobody expected in 54 days of 16,384 H100s."""
    assert 54 * 86400 / planned(16384)[1]["between failures"] == pytest.approx(419, rel=0.03)


def test_a_cadence_that_is_given_is_taken_and_never_beats_the_best():
    best, rows = planned(1024, mtbf_gpu_hours=500.0)
    assert rows["interval taken"] == rows["best interval (Daly)"]
    assert rows["work lost per failure"] == pytest.approx(rows["interval taken"] / 2 + rows["written in"])
    for seconds in (12.0, 1800.0):
        wall, other = planned(1024, mtbf_gpu_hours=500.0, save_every_samples=seconds / 0.1 * 16384)
        assert other["interval taken"] == pytest.approx(seconds)
        assert wall > best


def test_an_interval_beyond_the_end_of_the_run_is_its_end():
    wall, rows = planned(32, step=0.2, max_samples=16384 * 1000, save_every_samples=1e13)
    assert rows["interval taken"] == pytest.approx(200.0)
    assert rows["work lost per failure"] == pytest.approx(100.0 + rows["written in"])
    assert wall == pytest.approx(200.0, rel=0.001)


def test_checkpoints_are_not_begun_before_the_last_one_is_written():
    _, rows = planned(1024, model="ProLIP-ViT-H-14", checkpoint_gbs=0.01, mtbf_gpu_hours=1000.0)
    assert rows["best interval (Daly)"] == rows["written in"]
