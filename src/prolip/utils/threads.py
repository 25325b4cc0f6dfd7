"""Work that threads do ahead of who wants it: Pillow and torch release the interpreter's lock where they work."""
from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice


def in_threads(work: Callable, items: Iterator, workers: int, ahead: int) -> Iterator:
    """`map(work, items)` by threads, in order; no more than `ahead` items are taken early. workers 0: none."""
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


def default_workers(processes: int = 1) -> int:
    """Threads that decode: all cores but the one that reads and batches, at most 16; of `processes` that share them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(0, min(16, cores // processes - 1))
