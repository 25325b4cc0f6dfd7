"""Helpers of all benches: memory of a process, spread of repeated measurements."""

from __future__ import annotations

import ctypes
import gc
import statistics
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path


def held(field: str = "VmHWM", process: int | str = "self") -> int:
    """Return bytes of a process from /proc: VmHWM is the peak since `forget_peak`, VmRSS the current size."""
    lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def forget_peak() -> int:
    """Return freed memory to the system, reset the peak, and return the resident bytes."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return held("VmRSS")


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Format the median, and the middle half of the values in brackets."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"
