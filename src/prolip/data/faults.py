"""Unusable samples and shards: named, counted, reported, and fatal above a limit."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from prolip.utils.secrecy import redacted, scrub

#: Faults that lose an unknown number of samples and count against the opened shards: missing or forbidden; cut or
#: damaged; source unavailable or stalled; replaced during reading; different from the index.
SHARD_KINDS = frozenset({"unreadable shard", "broken shard", "interrupted shard", "changed shard", "index mismatch"})
#: Faults that are counted but lose nothing further: a connection that was resumed; the last sample of a damaged shard;
#: a member that is not a file, or not named key.suffix.
RESUMED, HALF, SKIPPED = UNCHARGED = ("resumed read", "half sample", "skipped member")
#: Samples and shards of an epoch below which fractions are checked only at its end.
WINDOWS = {"samples": 1000, "shards": 100}
#: Faults that a message lists; consecutive unusable shards, and samples, after which a stream stops.
EXAMPLES, LOST_IN_A_ROW, LOST_SAMPLES = 5, 20, 20_000
SURE = 5.0  # standard deviations above the limit at which a run stops before the end of an epoch

#: (value of this rank, work) -> `work` of the values of all ranks; every rank calls it at the same place.
Gather = Callable[[Any, Callable[[list[Any]], Any]], Any]


def alone(value: Any, work: Callable[[list[Any]], Any]) -> Any:
    """Run `Gather` for a single rank."""
    return work([value])


class DamagedData(ValueError):
    """Damaged, incomplete or missing files of a data set; the message names them and gives a remedy."""


class SampleFault(Exception):
    """An unusable sample. kind: a few words under which it is counted."""

    def __init__(self, kind: str, message: str):
        super().__init__(f"{kind}: {message}")
        self.kind, self.message = kind, message


class ShardFault(SampleFault):
    """A shard that cannot be read to its end or has changed. kind: one of SHARD_KINDS."""


class TooManyBadSamples(RuntimeError):
    """More unusable samples or shards than `max_bad_fraction` allows."""

    many_lines = True


@dataclass
class FaultCounter:
    """Counts of samples, shards and faults."""

    samples: int = 0  # read, usable or not
    shards: int = 0  # opened
    kinds: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    lost_in_a_row: int = 0  # shards since the last sample
    lost_samples: int = 0  # since the last usable one
    limit: float = 1.0  # largest fraction of unusable samples
    rows: int = 0  # of a table or a folder, where samples are rows

    def __post_init__(self) -> None:
        self.kinds = Counter(self.kinds)

    def add(self, fault: SampleFault, key: str = "", url: str = "") -> None:
        """Count one fault; keep the first ones as examples, without secrets in addresses."""
        self.kinds[fault.kind] += 1
        if len(self.examples) < EXAMPLES and fault.kind not in UNCHARGED:
            place = redacted(url)
            if key != url:
                place = f"sample {key!r} of {place}" if key and url else key or place
            said = scrub(str(fault).replace(url, redacted(url)) if url else str(fault))
            example = f"{place}: {said}" if place else said
            if example not in self.examples:  # a small shard is read repeatedly
                self.examples.append(example)

    def lose_shard(self, fault: SampleFault, url: str) -> None:
        """Count a lost shard; TooManyBadSamples after LOST_IN_A_ROW, because each retry takes minutes."""
        self.add(fault, url=url)
        self.lost_in_a_row += 1
        if self.lost_in_a_row >= LOST_IN_A_ROW:
            self.fail(f"no sample in {self.lost_in_a_row} consecutive shards, the last of which was {redacted(url)}")

    def use_sample(self) -> None:
        """Count a usable sample."""
        self.samples += 1
        self.lost_samples = 0

    def lose_sample(self, fault: SampleFault, key: str = "", url: str = "") -> None:
        """Count an unusable sample.

        Raise TooManyBadSamples after LOST_SAMPLES or all rows without a usable one, or if a window clearly exceeds
        `limit`: the main process checks fractions, but would wait forever for a chunk that never fills.
        """
        self.samples += 1
        self.add(fault, key, url)
        self.lost_samples += 1
        if self.rows and self.lost_samples >= 2 * self.rows:  # which contain a whole pass
            self.fail(f"none of {self.rows} rows is usable")
        if self.lost_samples >= LOST_SAMPLES:
            self.fail(f"{self.lost_samples} consecutive samples were unusable")
        if self.bad_samples >= min(WINDOWS["samples"], self.rows or WINDOWS["samples"]):
            self.check(self.limit, "samples", SURE)

    def merge(self, other: FaultCounter) -> None:
        """Add the counts of another counter."""
        self.samples += other.samples
        self.shards += other.shards
        self.kinds.update(other.kinds)
        self.examples = (self.examples + other.examples)[:EXAMPLES]
        self.rows = self.rows or other.rows

    def drain(self) -> FaultCounter:
        """Return the counts since the last drain, for another process."""
        taken = FaultCounter(self.samples, self.shards, self.kinds, self.examples, rows=self.rows)
        self.samples, self.shards, self.kinds, self.examples = 0, 0, Counter(), []
        return taken

    def to_dict(self) -> dict[str, Any]:
        """Return a copy in plain types, the arguments of another counter."""
        return {"samples": self.samples, "shards": self.shards, "kinds": dict(self.kinds), "examples": [*self.examples]}

    @property
    def bad_shards(self) -> int:
        """Shards that could not be read to their end."""
        return sum(self.kinds[kind] for kind in SHARD_KINDS)

    @property
    def bad_samples(self) -> int:
        """Unusable samples, without those lost with a shard."""
        return sum(self.kinds.values()) - self.bad_shards - sum(self.kinds[kind] for kind in UNCHARGED)

    def summary(self) -> dict[str, int]:
        """Return counts by kind, with `samples` and `shards` read."""
        return {"samples": self.samples, "shards": self.shards, **dict(self.kinds)}

    def check(self, limit: float, what: str, deviations: float = 0.0) -> None:
        """Raise TooManyBadSamples if the bad share of "samples" or "shards" is that many deviations above `limit`."""
        bad, total = {"samples": (self.bad_samples, self.samples), "shards": (self.bad_shards, self.shards)}[what]
        if bad > limit * total + deviations * math.sqrt(limit * (1 - limit) * total):
            noun = "rows" if self.rows and what == "samples" else what
            share = f"{bad / max(total, 1):.1%}"
            self.fail(f"{bad} of {total} {noun} ({share}) are unusable; the limit is {limit:.1%}")

    def fail(self, reason: str) -> None:
        """Raise TooManyBadSamples with `reason`, the counts and the first faults."""
        kinds = ", ".join(f"{kind} {count}" for kind, count in self.kinds.most_common()) or "none"
        first = "; the first are:" + "".join(f"\n  {example}" for example in self.examples) if self.examples else ""
        remedy = f"Repair or remove these {'rows' if self.rows else 'shards'}, or raise --max-bad-fraction"
        raise TooManyBadSamples(f"{reason}\nfaults by kind: {kinds}{first}\n{remedy} if the loss is acceptable.")


class FaultGuard:
    """Check of the fraction of faults: of the whole epoch, and earlier if it is clearly above the limit."""

    def __init__(self, limit: float):
        self.limit = limit
        self.total, self.epoch = FaultCounter(), FaultCounter()

    def add(self, counts: FaultCounter) -> None:
        """Add the counts of one chunk; TooManyBadSamples once the epoch so far is clearly above the limit."""
        self.total.merge(counts)
        self.epoch.merge(counts)
        for what, size in WINDOWS.items():
            if getattr(self.epoch, what) >= size:
                self.epoch.check(self.limit, what, SURE)

    def to_dict(self) -> dict[str, Any]:
        """Return the counts in plain types."""
        return {"total": self.total.to_dict(), "epoch": self.epoch.to_dict()}

    def absorb(self, values: dict[str, Any]) -> None:
        """Add the counts of another rank's or an earlier run's guard."""
        self.total.merge(FaultCounter(**values["total"]))
        self.epoch.merge(FaultCounter(**values["epoch"]))

    def end_epoch(self, gather: Gather = alone) -> None:
        """Raise TooManyBadSamples if the whole epoch is above the limit, over all ranks, as each opens few shards."""

        def judge(everywhere: list[dict[str, Any]]) -> None:
            whole = FaultCounter()
            for counts in everywhere:
                whole.merge(FaultCounter(**counts))
            for what in WINDOWS:
                whole.check(self.limit, what)

        gather(self.epoch.to_dict(), judge)
