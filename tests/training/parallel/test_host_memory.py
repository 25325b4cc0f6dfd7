"""Freed memory stays with the process: the kernel clears no pages for tensors that come and go."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FAULTS = """
import resource, sys
import torch
from training.parallel import keep_freed_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

kept = keep_freed_memory() if sys.argv[1] == "keep" else False
counts = []
for _ in range(15):
    before = faults()
    torch.ones(9_000_000)
    counts.append(faults() - before)
print(kept, sorted(counts)[7])
"""


def page_faults(how: str) -> tuple[bool, int]:
    source = str(Path(__file__).parents[3] / "src")
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, how], capture_output=True, text=True, env={"PYTHONPATH": source}, check=True
    )
    kept, faults = done.stdout.split()
    return kept == "True", int(faults)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc is of Linux")
def test_large_blocks_are_used_again():
    kept, few = page_faults("keep")
    if not kept:
        pytest.skip("the C library is not glibc")
    _, many = page_faults("leave")
    assert few < 100 and many > 10 * few
