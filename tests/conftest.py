"""What all tests share: kernels without a GPU, and how two or more processes of pytest-xdist divide the work."""
from __future__ import annotations

import ctypes
import gc
import os
import sys

import pytest
import torch

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

#: Folders whose files take longest go first, so that no process ends long behind the others.
FIRST = ("tests/slurm/", "tests/training/")


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: next((n for n, name in enumerate(FIRST) if item.nodeid.startswith(name)), len(FIRST)))


def pytest_xdist_make_scheduler(config, log):
    """The tests of a file run in one process, in which they share fixtures; those of tests/slurm share one cluster."""
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid):
            return "slurm" if nodeid.startswith("tests/slurm/") else super()._split_scope(nodeid)

    return ByFile(config, log)


@pytest.fixture(scope="module", autouse=True)
def free_memory():
    """Give back what the tests of a file have freed: training keeps it, and forking some gigabytes takes its time."""
    yield
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL("libc.so.6").malloc_trim(0)


@pytest.fixture(scope="session")
def forked(tmp_path_factory):
    """One process that has loaded everything, from which runs are forked."""
    server = Forked(tmp_path_factory.mktemp("streams"))
    yield server
    server.close()
