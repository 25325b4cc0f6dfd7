"""slurm/datacomp.sbatch under a real SLURM: an array whose task is killed and requeued leaves one process's tables."""

from __future__ import annotations

import csv
import json
import shlex
import sys
from pathlib import Path

import pytest
from commands import datacomp
from slurm_cluster import ROOT, Cluster, kill, missing, processes, sbatch, wait_for

from prolip.evaluation.suites.datacomp.catalogue import COUNTED, TASKS, shard

sys.path += [str(ROOT / "tests/helpers/evaluation")]
import miniatures  # noqa: E402
from datacomp_suite import Oracle, write_suite  # noqa: E402

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A run that ended, and the 40 data sets in miniature."""
    folder = tmp_path_factory.mktemp("datacomp")
    write_suite(folder / "data", TASKS, Oracle(miniatures.prolip_folder(folder / "run/model")))
    return folder


def submit(cluster: Cluster, folder: Path, array: str) -> str:
    words = [f"--array={array}", "slurm/datacomp.sbatch", str(folder / "run")]
    return sbatch(cluster, folder, *words, DATA=str(folder / "data"))


def evaluators(cluster: Cluster, task: int) -> list[int]:
    def fits(env: dict[str, str], binary: str) -> bool:
        mine = env.get("SLURM_CONF") == str(cluster.conf) and env.get("SLURM_ARRAY_TASK_ID") == str(task)
        return mine and "SLURM_PROCID" in env and "python" in Path(binary).name

    return processes(fits)


def results(out: Path) -> dict[str, float | None]:
    try:
        lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    except FileNotFoundError:
        return {}
    found = {line["key"]: line["metrics"]["main_metric"] for line in lines}
    assert len(found) == len(lines)
    return found


def our_row(out: Path) -> dict[str, str]:
    with open(out / "tables.csv", newline="") as file:
        (row,) = [row for row in csv.DictReader(file) if row["kind"] == "ours"]
    return row


def test_an_array_whose_task_is_killed_and_requeued_leaves_the_tables_of_one_process(cluster, folder):
    out, share = folder / "run/datacomp", {task.key for task in shard(TASKS, 1, 2)}
    job = submit(cluster, folder, "0-1")
    victims = wait_for("the second task's process", lambda: evaluators(cluster, 1), 120)
    done = wait_for("a task of its share", lambda: share & set(results(out)), 120)
    kill(victims)
    end = cluster.wait_for_end(f"{job}_1", 60)
    said = folder / f"{end['JobId']}.out"
    assert end["JobState"] == "FAILED" and "Killed" in said.read_text(), said.read_text() + cluster.logs()
    left = share - set(results(out))
    assert left and done, "it was killed in the middle of its share"

    cluster.call("scontrol", "requeue", f"{job}_1")
    ends = [cluster.wait_for_end(f"{job}_{task}", 120) for task in range(2)]
    assert [end["JobState"] for end in ends] == ["COMPLETED"] * 2, said.read_text() + cluster.logs()
    assert [end["Restarts"] for end in ends] == ["0", "1"]
    assert "Killed" in said.read_text() and said.read_text().count("task 1 of the array") == 2  # what both tries said

    datacomp(
        shlex.split(f"--model local-dir:{folder}/run/model --data {folder}/data --output {folder}/alone --device cpu")
    )
    assert results(out) == pytest.approx(results(folder / "alone")) and len(results(out)) == len(TASKS)
    ours, alone = our_row(out), our_row(folder / "alone")
    assert ours == alone and all(ours[column] for column in ("Average", "VTAB", *(task.name for task in COUNTED)))
