"""An ordered prefetching map over threads, for work that releases the interpreter's lock, such as Pillow's."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from pathlib import Path

#: Microseconds that a container may use over all cores in each period, and the period.
QUOTA = Path("/sys/fs/cgroup/cpu.max")


def in_threads(work: Callable, items: Iterator, workers: int, ahead: int) -> Iterator:
    """Yield `map(work, items)` in order, computed by threads up to `ahead` items early. workers 0: no threads."""
    if workers < 1:
        yield from map(work, items)
        return
    pool = ThreadPoolExecutor(workers)
    try:
        waiting: deque[Future] = deque(pool.submit(work, item) for item in islice(items, ahead))
        while waiting:
            done = waiting.popleft().result()
            waiting.extend(pool.submit(work, item) for item in islice(items, 1))
            yield done
    finally:
        pool.shutdown(cancel_futures=True)


def cores() -> int:
    """Return the cores of this process, limited by affinity, container quota and SLURM job; torchrun's ranks share."""
    ranks, found = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), [os.cpu_count() or 1]
    found += [len(os.sched_getaffinity(0))] if hasattr(os, "sched_getaffinity") else []
    with suppress(OSError, ValueError):  # no control groups, no quota
        quota, period = map(int, QUOTA.read_text(encoding="utf-8").split())
        found.append(quota // period)
    slurm = ("SLURM_CPUS_ON_NODE", "SLURM_CPUS_PER_TASK" if ranks == 1 else "")
    found += [int(os.environ[name]) for name in slurm if os.environ.get(name, "").isdecimal()]
    return max(1, min(found) // ranks)


def share_busy_cores() -> None:
    """Make OpenMP's threads sleep instead of spin on a busy machine. Call before importing torch."""
    if os.getloadavg()[0] >= (os.cpu_count() or 1) / 2 and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def default_workers() -> int:
    """Return the number of decoding threads: all cores except one for reading and batching, at most 16."""
    return min(16, cores() - 1)


def raise_file_limit() -> None:
    """Raise the limit of open files of this process and its workers to the hard limit: a worker's tensor is a file."""
    with suppress(ImportError, ValueError, OSError):  # Windows; a system may refuse an infinite soft limit
        import resource

        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
