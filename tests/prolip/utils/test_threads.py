"""Numbers of threads and processes: a rank's share of its machine, and the way its threads wait."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from prolip.utils.threads import cores, default_workers, share_busy_cores

SLURM = ("SLURM_CPUS_ON_NODE", "SLURM_CPUS_PER_TASK", "LOCAL_WORLD_SIZE")


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A machine of 256 cores without a quota."""
    for name in (*SLURM, "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "")  # so that what a test leaves is undone
        del os.environ[name]
    monkeypatch.setattr("os.cpu_count", lambda: 256)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(256)))
    monkeypatch.setattr("prolip.utils.threads.QUOTA", Path("/nowhere"))


@pytest.mark.parametrize("found, processes, threads", [(128, 8, 15), (32, 8, 3), (2, 2, 0), (1, 1, 0), (256, 1, 16)])
def test_ranks_of_one_machine_share_its_cores(monkeypatch, found, processes, threads):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(found)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    assert cores() == max(1, found // processes) and default_workers() == threads


def test_the_cores_of_a_slurm_job_are_those_of_its_node_or_of_a_task_that_is_one_process(monkeypatch):
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "64")
    assert cores() == 64
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "6")
    assert cores() == 6
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert cores() == 8


@pytest.mark.parametrize("quota, found", [("max 100000", 256), ("350000 100000", 3), ("50000 100000", 1), ("", 256)])
def test_a_container_has_the_cores_of_its_quota(monkeypatch, tmp_path, quota, found):
    (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr("prolip.utils.threads.QUOTA", tmp_path / "cpu.max")
    assert cores() == found


@pytest.mark.parametrize("load, spins", [(0.3, None), (127.0, None), (128.0, "1000"), (300.0, "1000")])
def test_threads_wait_shortly_on_a_busy_machine_alone(monkeypatch, load, spins):
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    share_busy_cores()
    assert os.environ.get("GOMP_SPINCOUNT") == spins
