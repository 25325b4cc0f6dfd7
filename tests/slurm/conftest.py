"""The marker of tests that start a real SLURM, and one line on what they ran with."""
from __future__ import annotations

from slurm_cluster import NOTES


def pytest_configure(config):
    config.addinivalue_line("markers", "slurm: starts a SLURM cluster on this machine; skipped where none can be")


def pytest_terminal_summary(terminalreporter):
    for note in NOTES:
        terminalreporter.write_line(note)
