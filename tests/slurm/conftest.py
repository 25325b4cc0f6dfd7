"""The cluster that all tests here share, and one line on what they ran with."""

from __future__ import annotations

import pytest
from slurm_cluster import NODES, NOTES, Cluster


def pytest_terminal_summary(terminalreporter):
    for note in NOTES:
        terminalreporter.write_line(note)


@pytest.fixture(scope="session")
def cluster():
    """Four nodes that run jobs until the last test."""
    cluster = Cluster()
    try:
        cluster.start()
        version = cluster.call("sinfo", "--version").stdout.strip()
        NOTES.append(f"tests/slurm ran with {version}, proctrack/{cluster.proctrack}, {len(NODES)} nodes")
        yield cluster
    finally:
        cluster.stop()
