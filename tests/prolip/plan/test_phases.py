"""Start, stop, save, load and failures: by hand, by what training does, and by failures played one by one."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest

from prolip.plan.config import PlanConfig
from prolip.plan.models import build_cluster, count_of_run
from prolip.plan.phases import MOST_STEPS, failures, known_to_all, load, phases, read_seconds, start
from training.parallel import StopConsensus, World

NAME = "ProLIP-ViT-B-16"
#: Of its checkpoint: parameters and two moments, float32.
SAVED = 197_923_586 * 4 * 3


def setting(gpus, **settings):
    """(config, its cluster) of so many GPUs, 16 samples each."""
    config = PlanConfig(gpus=[gpus], global_batch_size=16 * gpus, **settings)
    return config, build_cluster(config, gpus)


def table(gpus, step=0.1, **settings):
    """The phases of so many GPUs."""
    config, cluster = setting(gpus, **settings)
    return phases(count_of_run(NAME, "prolip", 16), config, cluster, step)


# --- start ------------------------------------------------------------------------------------------------------------
def test_a_start_by_hand():
    """4,096 ranks, 512 nodes, 65,536 loader processes that share 200 GB/s; 100,000 shards."""
    config, cluster = setting(4096, dataset_samples=1e9)
    found = start(count_of_run(NAME, "prolip", 16), config, cluster)
    assert found["ranks connecting"] == pytest.approx(12.288)
    assert found["shards listed"] == pytest.approx(100_000 * 1e-3 + 0.4 + 12 * 8.8e-3)
    tree = 9 * 20e-6 + 3 * 10e-6
    assert found["model"] == pytest.approx(197_923_586 * (7e-9 + 4 / 320e9) + tree)
    share = 200e9 / 65_536
    assert found["first samples"] == pytest.approx(0.15 + 1001 * 40e3 / share + 1 / 250)


def test_streams_read_at_their_own_rate_until_the_store_is_shared_by_too_many():
    assert read_seconds(1000, *setting(8, store_gbs=50.0)) == pytest.approx(1000 * 40e3 / 60e6)
    assert read_seconds(1000, *setting(8)) == pytest.approx(1000 * 40e3 / (5e9 / 128))
    assert read_seconds(1000, *setting(4096)) == pytest.approx(1000 * 40e3 / (200e9 / 65_536))


# --- stop -------------------------------------------------------------------------------------------------------------
class Clock:
    """Time that passes by steps."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now


@pytest.mark.parametrize("step", [0.001, 0.03, 0.1, 0.2, 0.7, 3.0])
def test_a_stop_is_known_as_late_as_the_real_agreement_says_at_most(monkeypatch, step):
    """One rank's StopConsensus, whose all-reduce gives what this rank asked for; asked at every phase of its rounds."""
    latest = 0
    for asked in range(300, 300 + MOST_STEPS + 1):
        clock = Clock()
        monkeypatch.setattr("training.parallel.time", SimpleNamespace(monotonic=clock.monotonic))
        agreement = StopConsensus(World(rank=0, world_size=2))
        monkeypatch.setattr(agreement, "_post", lambda numbers: (lambda: None, numbers))
        for number in range(asked + 3 * MOST_STEPS):
            clock.now += step
            if agreement.exchange(int(number >= asked))[0]:
                latest = max(latest, number - asked)
                break
        else:
            raise AssertionError("no progress was reported")
    # the step in which the signal comes counts, too
    assert known_to_all(step) == pytest.approx((latest + 1) * step, abs=1.01 * step)
    assert latest * step <= known_to_all(step)


# --- save, load -------------------------------------------------------------------------------------------------------


def test_every_node_reads_the_checkpoint_of_ddp_and_its_part_of_that_of_fsdp():
    copied = SAVED / 20e9
    few, many = (load(SAVED, *setting(gpus)) for gpus in (32, 4096))
    assert few["read and copied"] == pytest.approx(SAVED / 5e9 + copied)
    assert many["read and copied"] == pytest.approx(512 * SAVED / 200e9 + copied)
    few, many = (load(SAVED, *setting(gpus, fsdp=True)) for gpus in (32, 4096))
    assert few["read and copied"] == pytest.approx(SAVED / 4 / 5e9 + copied / 32)
    assert many["read and copied"] == pytest.approx(SAVED / 200e9 + copied / 4096)


# --- failures ---------------------------------------------------------------------------------------------------------
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


def planned(gpus, step=0.1, **settings):
    """(seconds of the run, its phases, its table) on so many GPUs."""
    config, cluster = setting(gpus, **settings)
    parts = phases(count_of_run(NAME, "prolip", 16), config, cluster, step)
    return *failures(config, cluster, parts), parts


@pytest.mark.parametrize("mtbf, every", [(2000.0, 800.0), (1000.0, 300.0), (20_000.0, None)])
def test_the_run_takes_as_long_as_with_failures_played_out(mtbf, every):
    """20 intervals on 1,024 GPUs. What is computed while a file is written is lost, as a part of the restart."""
    cadence = {} if every is None else {"save_every_samples": every * 16384 / 0.1}
    _, rows, _ = planned(1024, mtbf_gpu_hours=mtbf, queue_minutes=0.5, dataset_samples=1e6, **cadence)
    work = 20 * rows["interval used"]
    settings = {"mtbf_gpu_hours": mtbf, "queue_minutes": 0.5, "dataset_samples": 1e6, **cadence}
    wall, rows, parts = planned(1024, max_samples=work / 0.1 * 16384, **settings)
    restart = rows["restart"] + parts["save, in the background"]
    generator, still = random.Random(0), parts["save, training paused"]
    played = [
        play(work, rows["interval used"], still, rows["between failures"], restart, generator) for _ in range(3000)
    ]
    assert wall - parts["start"] == pytest.approx(np.mean(played), rel=0.03)


def test_no_other_interval_is_better_than_the_best_one():
    best, rows, _ = planned(1024, mtbf_gpu_hours=20_000.0)
    for factor in (0.25, 0.5, 2.0, 4.0):
        samples = factor * rows["best interval (Young)"] / 0.1 * 16384
        wall, other, _ = planned(1024, mtbf_gpu_hours=20_000.0, save_every_samples=samples)
        assert other["interval used"] == pytest.approx(factor * rows["interval used"])
        assert wall > best
