"""Keys of a gallery on disk: sorted runs of (hash, row), searched by halving and merged by size.

An append writes one run, merged with the last ones while they are less than twice as large. So N rows have at most
log2(N) runs, and a row is merged O(log N) times, without sorting it again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

#: An entry of a run. Several keys may share a hash, so a search compares the keys.
ENTRY = np.dtype([("hash", "<u8"), ("row", "<i8")])
#: Entries of each run in memory during a merge.
READ = 2**16


def hashes_of(keys: Iterable[str]) -> np.ndarray:
    """64 bits of each key, (N,) uint64."""
    digests = [hashlib.blake2b(key.encode(errors="surrogatepass"), digest_size=8).digest() for key in keys]
    return np.frombuffer(b"".join(digests), dtype="<u8")


def run_of(keys: Sequence[str], start: int) -> np.ndarray:
    """The sorted run of keys whose rows begin at `start`, (N,) of ENTRY."""
    run = np.empty(len(keys), dtype=ENTRY)
    run["hash"], run["row"] = hashes_of(keys), np.arange(start, start + len(keys))
    return run[np.argsort(run["hash"], kind="stable")]


def absorbed(sizes: Sequence[int], new: int) -> int:
    """The number of last runs that a run of `new` entries is merged with."""
    count = 0
    while count < len(sizes) and sizes[-1 - count] < 2 * new:
        count += 1
        new += sizes[-count]
    return count


def merged(runs: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
    places = [0] * len(runs)
    while any(place < len(run) for place, run in zip(places, runs)):
        parts = [run[place : place + READ] for place, run in zip(places, runs)]
        ends = [part["hash"][-1] for run, place, part in zip(runs, places, parts) if place + READ < len(run)]
        if ends:  # entries after this hash may follow in another run
            parts = [part[: np.searchsorted(part["hash"], min(ends), side="right")] for part in parts]
        places = [place + len(part) for place, part in zip(places, parts)]
        both = np.concatenate(parts)
        yield both[np.argsort(both["hash"], kind="stable")]


def candidates(runs: Iterable[np.ndarray], hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All rows (M,) int64 with one of these hashes, and its place in `hashes` (M,) int64."""
    places, rows = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    order = np.argsort(hashes)  # rising hashes reuse the cache
    for run in filter(len, runs):
        low = np.searchsorted(run["hash"], hashes[order])
        there = run["hash"][np.minimum(low, len(run) - 1)] == hashes[order]
        high = np.searchsorted(run["hash"], hashes[order[there]], side="right")
        for place, start, end in zip(order[there], low[there], high):
            places.append(np.full(end - start, place))
            rows.append(run["row"][start:end])
    return np.concatenate(places), np.concatenate(rows)
