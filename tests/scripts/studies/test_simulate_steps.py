"""The simulation: equal to closed forms where there are any, complete, monotone, reproducible, and quick."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from prolip.cli.command import RENAMED
from prolip.cli.main import main
from prolip.data.config import chunks_ahead
from prolip.plan.config import PlanConfig
from prolip.plan.models import build_cluster, count_of_run
from prolip.plan.phases import feed, pairs, step_times
from studies.scaling import simulate_steps
from studies.scaling.simulate_steps import Noise, exchange, simulate

QUIET = Noise(rank_sigma=0, step_sigma=0, block_sigma=0, image_sigma=0, open_sigma=0, steps=5)
EASY = {"images_per_core": 1e6, "open_ms": 0, "stream_mbs": 1e6, "store_gbs": 1e6}


def setting(gpus, local=512, rate=4e14, by="auto", **machines):
    config = PlanConfig(gpus=[gpus], global_batch_size=gpus * local, **machines)
    cluster, model = build_cluster(config, gpus), count_of_run(config.model, "prolip", local)
    step = step_times(model, config, cluster, rate)
    return cluster, step if by == "auto" else step._replace(pairs=pairs(by, local, model.dim, cluster)), config


def play(cluster, step, config, supply, noise):
    """The steps of a plan with other settings of the loader."""
    return simulate(cluster, step, dataclasses.replace(config, **supply), noise)


def draws():
    return np.random.default_rng(0)


def test_one_rank_without_jitter_is_the_closed_form():
    cluster, step, training = setting(1)
    result = play(cluster, step, training, EASY, QUIET)
    wanted = step.forward + step.backward + step.optimiser + step.pairs.scoring
    np.testing.assert_allclose(result.steps, wanted, rtol=1e-9)
    assert result.efficiency == pytest.approx(1)
    assert all(wait == pytest.approx(0, abs=1e-12) for wait in result.waits.values())


@pytest.mark.parametrize("by", ["ring", "gather"])
@pytest.mark.parametrize("gpus, local, inter", [(8, 512, None), (32, 512, None), (256, 64, None), (64, 512, 0.2)])
def test_equal_ranks_without_jitter_take_the_step_of_the_formula(by, gpus, local, inter):
    cluster, step, training = setting(gpus, local, by=by, inter_gbs=inter)
    assert step.pairs.exchange == by
    result = play(cluster, step, training, EASY, QUIET)
    np.testing.assert_allclose(result.steps, step.seconds, rtol=0.02)


@pytest.mark.parametrize("size", [2, 3, 4, 7, 64])
def test_ring_with_free_messages_takes_one_block_per_rank(size):
    done = exchange(np.zeros(size), 2.0, np.zeros(size), draws(), 0.0)
    np.testing.assert_allclose(done.end, 2.0 * size)
    np.testing.assert_allclose(done.waited, 0)


# One block of gathered texts is 0.2% of this step, the ring's blocks 2%.
@pytest.mark.parametrize("by, block_least", [("ring", 1.005), ("gather", 1.002)])
@pytest.mark.parametrize("name", ["rank_sigma", "step_sigma", "block_sigma"])
def test_stragglers_slow_monotonically(name, by, block_least):
    cluster, step, training = setting(32, by=by)
    seconds = []
    for sigma in (0.0, 0.05, 0.1, 0.2, 0.4):
        noise = dataclasses.replace(QUIET, **{name: sigma}, steps=8)
        seconds.append(play(cluster, step, training, EASY, noise).steps.mean())
    assert seconds == sorted(seconds)
    assert seconds[-1] > (block_least if name == "block_sigma" else 1.005) * seconds[0]


@pytest.mark.parametrize("local", [16, 100, 512, 4096])
def test_the_planner_prepares_as_many_chunks_ahead_as_the_loader(local):
    cluster, step, training = setting(8, local)
    noise, least = Noise(steps=4), {"prefetch": 2, "open_ms": 600.0}
    default, same = {"open_ms": 600.0}, {"prefetch": chunks_ahead(None, local), "open_ms": 600.0}
    configs = [PlanConfig(**supply) for supply in (default, same, least)]
    first, other, short = (feed(local, step.seconds, cluster, config) for config in configs)
    assert first == other
    longer = first["pause that prefetch bridges"] - short["pause that prefetch bridges"]
    assert longer == pytest.approx((chunks_ahead(None, local) - 2) * step.seconds)
    left, given = (play(cluster, step, training, supply, noise).steps for supply in (default, same))
    assert np.array_equal(left, given)


def test_the_command_prints_a_column_for_each_number_of_gpus(capsys):
    words = ["--mfu", "0.4", "--gpus", "1", "8", "--steps", "3"]
    assert simulate_steps.main(words) == 0
    head, _, empty, title, _, *rows = capsys.readouterr().out.splitlines()
    assert head.startswith("ProLIP-ViT-B-16: 197,923,586 parameters") and empty == ""
    assert [cell.strip() for cell in title.split("|")[1:-1]] == ["simulation", "1 GPU", "8 GPUs"]
    assert [row.split("|")[1].strip() for row in rows] == [name for name, _ in simulate_steps.ROWS]


@pytest.mark.parametrize("flag", [f"--{name}" for name, to in RENAMED["plan"].items() if "simulate_steps" in to])
def test_the_flags_that_planning_had_name_this_script(capsys, flag):
    assert main(["plan", "--mfu", "0.4", flag]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {flag} is not a flag here: use python scripts/studies/scaling/simulate_steps.py")
    assert error.count("\n") == 1
