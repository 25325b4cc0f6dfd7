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
SHAPES = 6


@pytest.fixture(scope="module")
def binaries(tmp_path_factory) -> dict[str, list[dict]]:
    """What `kernel_binaries.py` says of each, by shape."""
    script = Path(__file__).with_name("kernel_binaries.py")
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
        "PYTHONPATH": str(script.parents[2] / "src"),
    }
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, list[dict]] = {}
    for line in done.stdout.splitlines():
        found.setdefault(json.loads(line)["shape"], []).append(json.loads(line))
    return found


def test_the_kernel_compiles_for_every_gpu_and_shape_of_training(binaries):
    own = {name: rows for name, rows in binaries.items() if name != "too large"}
    assert len(own) == SHAPES
    assert all([row["architecture"] for row in rows] == list(SHARED) for rows in own.values())
    assert all(row["bytes"] > 1000 and row["registers"] > 16 for rows in own.values() for row in rows)


def fits(row: dict) -> bool:
    """Whether nothing is spilt and programs find room beside each other."""
    resident = min(REGISTERS // (row["registers"] * row["threads"]), SHARED[row["architecture"]] // row["shared"])
    return row["local"] <= SPILT.get(row["shape"], 0) and resident >= RESIDENT


def test_little_is_spilt_and_programs_fit_beside_each_other(binaries):
    assert not [row for name, rows in binaries.items() if name != "too large" for row in rows if not fits(row)]


def test_a_tile_that_spills_is_found(binaries):
    (row,) = binaries["too large"]
    assert row["local"] > 0 and not fits(row)
    assert not fits(row | {"local": 0, "shared": 200 * 1024})
    assert not fits(row | {"local": 0, "threads": 1024})
