"""Keys of a gallery on disk: sorted runs of (hash, row), which are searched by halving and merged by size.

An append writes one run, together with the last ones as long as they are less than twice as large. So N rows have at
most log2(N) runs, and a row takes part in O(log N) merges, which read runs in their order and sort nothing again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

#: An entry of a run. Equal hashes are of one key or, rarely, of several: whoever searches compares the keys.
ENTRY = np.dtype([("hash", "<u8"), ("row", "<i8")])
#: Entries of each run that are in memory while runs are merged.
READ = 2**16


def hashes_of(keys: Iterable[str]) -> np.ndarray:
    """64 bits of each key, (N,) uint64."""
    digests = [hashlib.blake2b(key.encode(errors="surrogatepass"), digest_size=8).digest() for key in keys]
    return np.frombuffer(b"".join(digests), dtype="<u8")


def run_of(keys: Sequence[str], start: int) -> np.ndarray:
    """The sorted run (N,) of ENTRY of keys whose rows begin at `start`."""
    run = np.empty(len(keys), dtype=ENTRY)
    run["hash"], run["row"] = hashes_of(keys), np.arange(start, start + len(keys))
    return run[np.argsort(run["hash"], kind="stable")]


def absorbed(sizes: Sequence[int], new: int) -> int:
    """How many of the last runs a run of `new` entries is merged with."""
    count = 0
    while count < len(sizes) and sizes[-1 - count] < 2 * new:
        count += 1
        new += sizes[-count]
    return count


def merged(runs: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
    """Sorted runs as one, part by part."""
    places = [0] * len(runs)
    while any(place < len(run) for place, run in zip(places, runs)):
        parts = [run[place : place + READ] for place, run in zip(places, runs)]
        ends = [part["hash"][-1] for run, place, part in zip(runs, places, parts) if place + READ < len(run)]
        if ends:  # what lies beyond may come later in a run that goes on
            parts = [part[: np.searchsorted(part["hash"], min(ends), side="right")] for part in parts]
        places = [place + len(part) for place, part in zip(places, parts)]
        both = np.concatenate(parts)
        yield both[np.argsort(both["hash"], kind="stable")]


def candidates(runs: Iterable[np.ndarray], hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Places in `hashes` (M,) int64, and a row (M,) int64 with the hash of each, all there are."""
    places, rows = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    order = np.argsort(hashes)  # rising ones are halved among what the cache holds
    for run in filter(len, runs):
        low = np.searchsorted(run["hash"], hashes[order])
        there = run["hash"][np.minimum(low, len(run) - 1)] == hashes[order]
        high = np.searchsorted(run["hash"], hashes[order[there]], side="right")
        for place, start, end in zip(order[there], low[there], high):
            places.append(np.full(end - start, place))
            rows.append(run["row"][start:end])
    return np.concatenate(places), np.concatenate(rows)
