"""Setup of all tests: kernels without a GPU, and the division of work among processes of pytest-xdist."""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
import torch

import buckets  # noqa: F401  # registers the object store of tests
from forked import Forked

# Triton settles when it is imported whether kernels are compiled or interpreted; a machine without a GPU can only do
# the latter, and tests import everything into one process.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Processes that share the cores: each with its part of them, and what it starts as well.
if processes := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 0)):
    threads = max(1, (os.cpu_count() or 1) // processes)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    torch.set_num_threads(threads)


def pytest_configure(config):
    """Write the drawings that small runs train on, in the process that starts the others."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        folder = Path(tempfile.mkdtemp(prefix="prolip_drawings_"))
        os.environ["PROLIP_TEST_DRAWINGS"] = str(folder / "shards")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        import drawings

        drawings.write(drawings.FOLDER)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """One process more than there are cores, as tests of runs that are stopped, killed or forked wait much."""
    return (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1) + 1


def pytest_collection_modifyitems(items):
    """Sort the long training files first, so that all processes end at about the same time."""
    items.sort(key=lambda item: not item.nodeid.startswith("tests/training/"))


def pytest_collection_finish():
    """Leave what all modules have imported to no later collection, of which each file of tests has one."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    """Triton's binding takes frozen objects for leaks, and lists them."""
    gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def free_memory():
    """Give back what the tests of a file have freed: training keeps it, and forking some gigabytes takes its time."""
    yield
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL("libc.so.6").malloc_trim(0)


@pytest.fixture(scope="session")
def small_model(tmp_path_factory) -> str:
    """`local-dir:` address of a random model whose traces differ."""
    from miniatures import prolip_folder

    return prolip_folder(tmp_path_factory.mktemp("small_model"))


@pytest.fixture(scope="session")
def forked(tmp_path_factory):
    """One process that has loaded everything, from which runs are forked."""
    server = Forked(tmp_path_factory.mktemp("streams"))
    yield server
    server.close()
