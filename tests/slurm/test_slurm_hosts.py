"""slurm/train.sbatch where one of four nodes is bad: a host that fails is excluded, a slow one is named."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
from slurm_cluster import NODES, ROOT, Cluster, missing, reported, stand_in, train, wait_for

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.timeout(300),
]
RECIPE = """
model: {model: ProLIP-ViT-test, init_logit_bias: -2.8}
data: {select: group=activities, caption_sampling: "name,keywords", workers: 0, shuffle_buffer: 20}
optim: {warmup: 2}
run: {max_steps: 20, global_batch_size: 12, precision: fp32, device: cpu, log_every_n_steps: 1}
"""
# A node's faults, in every Python process of it: SLURM_TEST_FAULTS maps a node to words of Python.
FAULTS = """
import json, os, sys, time
exec(json.loads(os.environ.get("SLURM_TEST_FAULTS", "{}")).get(os.environ.get("SLURMD_NODENAME"), ""), globals())
"""
#: A rank is killed when the run has begun, as by a fault of its node's memory.
KILLED = """
def fail():
    file, begin = f"{os.environ['RUNS']}/{os.environ['NAME']}/status.json", time.time()
    while not (os.path.exists(file) and os.path.getmtime(file) > begin and '"running"' in open(file).read()):
        time.sleep(0.02)
    os.kill(os.getpid(), 9)
if "RANK" in os.environ:
    import threading
    threading.Thread(target=fail, daemon=True).start()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The folder of all runs here, with the recipe."""
    folder = tmp_path_factory.mktemp("hosts")
    (folder / "tiny.yaml").write_text(RECIPE)
    (folder / "faults").mkdir()
    (folder / "faults/sitecustomize.py").write_text(FAULTS)
    return folder


def submit(cluster: Cluster, folder: Path, name: str, nodes: int, faults: dict[str, str], **more: str) -> str:
    """Train on so many nodes, of which some have faults; returns the job's number."""
    more |= {"PYTHONPATH": f"{folder / 'faults'}:{ROOT / 'src'}", "SLURM_TEST_FAULTS": json.dumps(faults)}
    return train(cluster, folder, name, nodes=nodes, **more)


# Python of the job; the check before the start has its own tests.
UNCHECKED = f"""#!/bin/bash
[ "$1" = slurm/preflight.py ] || exec {sys.executable} "$@"
"""


def ended(cluster: Cluster, folder: Path, job: str, seconds: float) -> tuple[dict[str, str], str]:
    try:
        end = cluster.wait_for_end(job, seconds)
    except AssertionError as error:
        raise AssertionError(f"{error}{reported(cluster, folder, job)}") from error
    return end, (folder / f"{job}.out").read_text()


def test_a_host_that_fails_twice_is_excluded_and_the_run_ends_without_it(cluster, folder):
    unchecked = stand_in(folder, "unchecked", UNCHECKED)
    job = submit(cluster, folder, "killed", 2, {NODES[1]: KILLED}, PYTHON=unchecked)
    end, said = ended(cluster, folder, job, 240)
    assert end["JobState"] == "COMPLETED" and end["Restarts"] == "2", said
    last = cluster.call("scontrol", "show", "hostnames", end["NodeList"]).stdout.split()
    assert end["ExcNodeList"] == NODES[1] and NODES[1] not in last
    assert f"excluded from the next try: {NODES[1]}" in said and f"{NODES[1]} failed first (SIGKILL)" in said
    rows = [json.loads(line) for line in (folder / "killed/slurm/failures.jsonl").read_text().splitlines()]
    verdicts = [(row["try"], row["host"], row["verdict"]) for row in rows]
    assert verdicts == [(0, NODES[1], "again"), (1, NODES[1], "exclude")]
    assert json.loads((folder / "killed/status.json").read_text())["state"] == "finished"


# Python of the job: what measures is the real one, training and its check are not what is tested.
MEASURES_ONLY = f"""#!/bin/bash
case $1 in slurm/measure.py|*/slurm/measure.py) exec {sys.executable} "$@";; esac
"""
#: Every image takes long, as on a node whose cores are another's.
SLOW = """
if "measure.py" in " ".join(sys.orig_argv):
    import PIL.Image
    reading = PIL.Image.open
    PIL.Image.open = lambda *words, **more: time.sleep(0.1) or reading(*words, **more)
"""
HANGING = """
if "measure.py" in " ".join(sys.orig_argv):
    time.sleep(600)
"""


def test_a_slow_node_and_one_that_hangs_are_named_in_bounded_time(cluster, folder):
    settings = {"PREFLIGHT": "auto", "PREFLIGHT_SECONDS": "100"}
    settings["PYTHON"] = stand_in(folder, "measures-only", MEASURES_ONLY)
    job = submit(cluster, folder, "slow", 4, {NODES[2]: SLOW, NODES[3]: HANGING}, **settings)
    begin = time.monotonic()
    end, said = ended(cluster, folder, job, 150)
    assert end["JobState"] == "COMPLETED" and time.monotonic() - begin < 130, said
    found = json.loads((folder / f"slow/slurm/{job}-0/nodes.json").read_text())
    assert found["silent"] == [NODES[3]] and set(found["nodes"]) == set(NODES[:3]), said
    assert all(set(figures) == {"loader", "all_reduce"} for figures in found["nodes"].values()), said
    assert any(words.startswith("loader ") for words in found["slow"][NODES[2]])
    assert f"preflight: {NODES[2]} is slow: " in said and f"preflight: {NODES[3]} has no measurement: no answer" in said
    assert min(found["nodes"], key=lambda node: found["nodes"][node]["loader"]) == NODES[2]


def test_a_run_that_goes_on_with_other_ranks_is_explained_in_the_jobs_log_and_not_requeued(cluster, folder):
    recipe = (folder / "tiny.yaml").read_text().replace("max_steps: 20", "max_steps: 2000, save_every_steps: 5")
    (folder / "tiny.yaml").write_text(recipe.replace("workers: 0", "workers: 1"))
    job = submit(cluster, folder, "smaller", 3, {})  # of which two remain: one that fails is taken for a bad host
    wait_for("a checkpoint", lambda: list(folder.glob("smaller/checkpoints/step_*.pt")), 120)
    cluster.call("scancel", "--signal=USR1", job)
    wait_for("the requeued job", lambda: cluster.job(job)["JobState"] == "PENDING", 60)
    cluster.call("scontrol", "hold", job)  # or it begins again before it is changed
    cluster.call("scontrol", "update", f"JobId={job}", "NumNodes=2", "NumTasks=2")  # a task to a node
    cluster.call("scontrol", "release", job)
    end, said = ended(cluster, folder, job, 280)
    assert (end["JobState"], end["NumNodes"], end["Restarts"]) == ("FAILED", "2", "1"), said
    assert "2 processes, 3 in the last try" in said
    assert "choose --workers so that ranks x workers is 3" in said and "NOT requeued" in said
