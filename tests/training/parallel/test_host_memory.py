"""Freed memory stays with the process: the kernel clears no pages for tensors that come and go."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FAULTS = """
import resource
import torch
from training.parallel import keep_freed_memory

def faults():
    counts = []
    for _ in range(15):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(9_000_000)
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return sorted(counts)[7]

print(faults(), int(keep_freed_memory()), faults())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc is of Linux")
def test_large_blocks_are_used_again():
    """Page faults of the median of 15 tensors: the heap grows at first."""
    environment = {"PYTHONPATH": str(Path(__file__).parents[3] / "src")}
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, env=environment, check=True)
    many, kept, few = map(int, done.stdout.split())
    if not kept:
        pytest.skip("the C library is not glibc")
    assert few < 100 and many > 10 * few
