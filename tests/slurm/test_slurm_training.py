"""slurm/train.sbatch under a real SLURM: stopped, requeued, robbed of a node, it ends where an undisturbed run ends."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from slurm_cluster import NODES, Cluster, missing, reported, sbatch, stand_in, train, wait_for
from training_runs import status, steps_done

STEPS = 180
pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.timeout(600),
]
RECIPE = f"""
model: {{model: ProLIP-ViT-test, init_logit_bias: -2.8}}
data:
  select: group=activities
  caption_sampling: name,keywords
  workers: 1
  shuffle_buffer: 20
optim: {{warmup: 5, ema_decay: 0.9}}
run:
  max_steps: {STEPS}
  global_batch_size: 16
  precision: fp32
  device: cpu
  log_every_n_steps: 1
  save_frequency: 0
  save_every_steps: 20
  keep_checkpoints: 2
  ledger: true
"""
# Task 0 says in status.json what it does, as a run would; a signal ends every task.
STAND_IN = r"""#!/bin/bash
case $1 in slurm/preflight.py|slurm/measure.py|slurm/blame.py) exit 0;; esac
say() { [ "$SLURM_PROCID" != 0 ] || printf '{\n  "state": "%s",\n  "reason": "%s",\n  "time": "%s"\n}\n' "$1" "$2" \
  "$(date +%s%N)" > "$RUNS/$NAME/status.json"; }
trap 'say stopped SIGUSR1; exit 1' USR1
trap 'say stopped SIGTERM; exit 1' TERM
say running
while sleep 0.1; do :; done
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The folder of all runs here, with the recipe."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "tiny.yaml").write_text(RECIPE)
    return folder


def ledgers(run: Path) -> list[list[dict]]:
    found = []
    for rank in range(2):
        rows = [json.loads(line) for line in (run / f"ledger/rank_{rank}.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
        found.append(rows)
    return found


@pytest.fixture(scope="module")
def whole(forked, folder) -> Path:
    """The folder of an undisturbed run of two ranks, without SLURM."""
    words = ["--config", folder / "tiny.yaml", "--train-data", "data/emoji/{noto,twemoji}.tar"]
    assert forked.run(*words, "--output", folder, "--name", "whole", ranks=2) == 0, forked.err
    return folder / "whole"


def disturbed(cluster: Cluster, folder: Path, name: str, losses: int) -> Path:
    """The folder of a job that is signalled, requeued, robbed of a node so many times, and ends."""
    run, job = folder / name, train(cluster, folder, name)
    try:
        wait_for("forty steps", lambda: steps_done(run) >= 40, 180)
        cluster.call("scancel", "--signal=USR1", job)  # as --signal=USR1@180 does before the time is up
        stopped = wait_for("the stop", lambda: status(run)["state"] == "stopped" and status(run), 60)
        assert 40 <= stopped["step"] < STEPS and "SIGUSR1" in stopped["reason"]
        for _ in range(losses):
            saved = wait_for("the second try's first checkpoint", lambda: second_checkpoint(run, stopped["step"]), 180)
            cluster.lose(NODES[1])
            wait_for("the node seen as lost", lambda: cluster.job(job)["JobState"] != "RUNNING", 90)
            assert saved <= steps_done(run) < STEPS
            cluster.launch("slurmd", "-D", "-f", cluster.conf, "-N", NODES[1], name=NODES[1])
        end = cluster.wait_for_end(job, 240)
    except AssertionError as error:
        raise AssertionError(str(error) + reported(cluster, folder, job)) from error
    assert end["JobState"] == "COMPLETED" and end["Restarts"] == str(1 + losses), reported(cluster, folder, job)
    return run


def assert_same(run: Path, whole: Path) -> None:
    assert status(run)["state"] == "finished" and status(run)["step"] == STEPS
    for part in ("model", "model_ema"):
        want, got = (load_file(path / part / "model.safetensors") for path in (whole, run))
        assert want.keys() == got.keys()
        assert all(torch.equal(value, got[key]) for key, value in want.items()), part
    assert ledgers(run) == ledgers(whole)


@pytest.fixture(scope="module")
def signalled(cluster, folder) -> Path:
    """Return the run folder of a job that was stopped and resumed."""
    return disturbed(cluster, folder, "signalled", losses=0)


def test_a_job_that_is_signalled_ends_as_an_undisturbed_run(signalled, whole):
    assert_same(signalled, whole)


@pytest.mark.slow
def test_a_job_that_is_signalled_and_loses_a_node_ends_as_an_undisturbed_run(cluster, folder, whole):
    assert_same(disturbed(cluster, folder, "robbed", losses=1), whole)


def second_checkpoint(run: Path, after: int) -> int:
    now = status(run)
    return now["step"] if now["state"] == "running" and now["checkpoint"] and now["step"] > after else 0


def test_logs_of_every_try_node_and_rank_are_kept_with_the_environment(signalled):
    logs = sorted(path for path in (signalled / "slurm").iterdir() if path.is_dir())
    assert [path.name[-2:] for path in logs] == ["-0", "-1"]
    for log in logs:
        nodes = [f"node-{number}.{end}" for number in (0, 1) for end in ("out", "err")]
        assert {path.name for path in log.iterdir()} >= {"environment.txt", *nodes, *NODES[:2]}
    last = logs[1]
    ranks = sorted(last.glob("*/*/attempt_0/0/stdout.log"))
    assert len(ranks) == 2, ranks
    assert sum(f"step {STEPS}/{STEPS}" in path.read_text() for path in ranks) == 1  # rank 0's
    console = (last / "node-0.out").read_text() + (last / "node-1.out").read_text()
    assert f"[rank 0] step {STEPS}/{STEPS}" in console
    record = (logs[0] / "environment.txt").read_text()  # of packages once
    assert "torch==" in record and "JobId=" in record


def test_an_array_evaluates_a_run_and_its_checkpoint_alike(cluster, folder, signalled):
    checkpoint = signalled / f"checkpoints/step_{STEPS}.pt"
    words = f"--array=0-1 slurm/eval.sbatch {signalled} {checkpoint} -- --select group=activities"
    job = sbatch(cluster, folder, *shlex.split(words))
    for task in range(2):
        end = cluster.wait_for_end(f"{job}_{task}", 180)
        assert end["JobState"] == "COMPLETED", reported(cluster, folder, end["JobId"])
    figures = [json.loads((path / "eval/metrics.json").read_text()) for path in (signalled, checkpoint.with_suffix(""))]
    assert figures[0]["metrics"] == figures[1]["metrics"] and len(figures[0]["metrics"]) > 5


def submit_stand_in(cluster: Cluster, folder: Path, name: str, *words: str) -> str:
    job = train(cluster, folder, name, options=words, PYTHON=stand_in(folder, "stand-in", STAND_IN))
    wait_for("the job's start", lambda: status(folder / name).get("state") == "running", 60)
    return job


@pytest.mark.parametrize("how", ["cancelled", "set at the start", "set later"])
def test_a_job_can_be_stopped_for_good(cluster, folder, how):
    name = how.replace(" ", "-")
    job = submit_stand_in(cluster, folder, name, *(["--no-requeue"] if how == "set at the start" else []))
    if how == "set later":
        cluster.call("scontrol", "update", f"JobId={job}", "Requeue=0")
    cluster.call("scancel", *([] if how == "cancelled" else ["--signal=USR1"]), job)
    end = cluster.wait_for_end(job, 60)
    assert end["Restarts"] == "0", reported(cluster, folder, job)
    assert end["JobState"] == ("CANCELLED" if how == "cancelled" else "FAILED")
    assert status(folder / name)["state"] == "stopped"
    assert ("requeueing failed" in (folder / f"{job}.out").read_text()) == (how != "cancelled")


def test_the_time_limit_stops_a_job_and_it_is_requeued(cluster, folder):
    job = submit_stand_in(cluster, folder, "limit", "--time=00:01:00", "--signal=USR1@30")
    wait_for("the second try", lambda: cluster.job(job)["Restarts"] == "1", 120)
    assert "SIGUSR1" in (folder / f"{job}.out").read_text()
    cluster.call("scancel", job)
    assert cluster.wait_for_end(job, 60)["JobState"] == "CANCELLED"


def test_a_try_that_fails_at_once_is_not_requeued(cluster, folder):
    job = train(cluster, folder, "bad", "--warmup", "9999")
    end, said = cluster.wait_for_end(job, 180), (folder / f"{job}.out").read_text()
    assert (end["JobState"], end["Restarts"]) == ("FAILED", "0"), reported(cluster, folder, job)
    assert "NOT requeued" in said and "the warm-up of 9999 steps is longer" in said
