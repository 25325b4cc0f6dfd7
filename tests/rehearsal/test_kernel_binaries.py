"""The Triton kernel of PPCL as GPUs would get it: compiled for them without one, with bounds on what they take."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

#: Of CUDA's table of compute capabilities: shared bytes that a program may have, and registers of a multiprocessor.
SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
REGISTERS = 65_536
#: Programs that a multiprocessor runs at a time, at least: so one computes while another waits for memory.
RESIDENT = 2
#: Bytes that a thread keeps outside of its registers, at most: none but for batches that no 16 divides.
SPILT = {"odd": 64}
#: Shapes, each compiled for one architecture at least; two for all.
SHAPES = {"gathered, known matches": 3, "ring, others' texts": 2, "odd": 3, "without gradients": 1}


@pytest.fixture(scope="module")
def binaries(tmp_path_factory) -> dict[str, list[dict]]:
    """Return the output of `kernel_binaries.py` for each, by shape."""
    script = Path(__file__).with_name("kernel_binaries.py")
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    environment["PYTHONPATH"] = str(script.parents[2] / "src")
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, list[dict]] = {}
    for line in done.stdout.splitlines():
        found.setdefault(json.loads(line)["shape"], []).append(json.loads(line))
    return found


def fits(row: dict) -> bool:
    """Return whether nothing is spilt and programs have room next to each other."""
    resident = min(REGISTERS // (row["registers"] * row["threads"]), SHARED[row["architecture"]] // row["shared"])
    return row["local"] <= SPILT.get(row["shape"], 0) and resident >= RESIDENT


def test_the_kernel_compiles_for_every_gpu_and_shape_of_training_and_little_is_spilt(binaries):
    assert {name: len(rows) for name, rows in binaries.items()} == SHAPES
    assert [row["architecture"] for row in binaries["odd"]] == list(SHARED)
    rows = [row for found in binaries.values() for row in found]
    assert all(row["bytes"] > 1000 and row["registers"] > 16 for row in rows)
    assert not [row for row in rows if not fits(row)]
