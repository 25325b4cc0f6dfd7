"""Noisy correspondence: a share of all (image, caption) associations is shuffled, once for a whole run.

The unit is a slot: one caption of one sample in one field, be it `.txt`, a text of its JSON or of a list there.
"""
from __future__ import annotations

import json
import random
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from prolip.data.faults import SampleFault
from prolip.data.samples.captions import PLAIN, CaptionSampler, stable_hash, texts
from prolip.data.samples.sample import Raw, Row, caption_parts, json_record

#: A sample: the number of its shard in the order of --train-data (0 for tables and folders), and its key.
Owner = tuple[int, str]


class Slot(NamedTuple):
    """One association. number: of an element of a list, else 0."""

    owner: Owner
    field: str
    number: int
    text: str


class Swap(NamedTuple):
    """A slot whose caption is that of another one from now on."""

    slot: Slot
    source: Slot

    def to_dict(self) -> dict[str, Any]:
        """As it is written down."""
        (shard, key), (from_shard, from_key) = self.slot.owner, self.source.owner
        return {"key": key, "field": self.slot.field, "slot": self.slot.number, "own": self.slot.text,
                "given": self.source.text, "from": from_key, "from_slot": self.source.number,
                "shard": shard, "from_shard": from_shard}  # fmt: skip


def slots_of(raw: Raw, owner: Owner, captions: CaptionSampler) -> list[Slot]:
    """The associations that captions are drawn from; SampleFault where none could be drawn."""
    plain, record = caption_parts(raw, captions)
    found = []
    for name in captions.fields:
        value = plain if name == PLAIN else (record or {}).get(name)
        values = value if isinstance(value, list) else [] if value is None else [value]
        found += [Slot(owner, name, number, text) for number, one in enumerate(values) for text in texts([one], name)]
    return found


def derange(owners: Sequence[Hashable], rng: random.Random) -> list[int]:
    """A random permutation p in which owners[p[i]] differs from owners[i] wherever any permutation could have it so.

    A shuffle, then one swap for each i that kept its owner g, with the first j from a random one on for which neither
    owners[j] nor owners[p[j]] is g. Nothing is spoilt by that. Where there is no such j, the places of g and those that
    hold what was of g cover all n, so 2 n_g - n places hold their own: the least by counting.
    """
    count, stuck = len(owners), set[Hashable]()
    given = list(range(count))
    rng.shuffle(given)
    for place, owner in enumerate(owners):
        if owner in stuck or owners[given[place]] != owner:
            continue
        start = rng.randrange(count)
        others = (j % count for j in range(start, start + count))
        other = next((j for j in others if owner not in (owners[j], owners[given[j]])), None)
        if other is None:
            stuck.add(owner)
        else:
            given[place], given[other] = given[other], given[place]
    return given


@dataclass(frozen=True)
class Noise:
    """Which captions go where. slots: associations there are in all; shards: URL -> number of the shard."""

    swaps: tuple[Swap, ...]
    slots: int
    captions: CaptionSampler
    shards: dict[str, int] = field(default_factory=dict)

    @cached_property
    def by_owner(self) -> dict[Owner, list[Swap]]:
        """The swaps of each sample that has any."""
        found: dict[Owner, list[Swap]] = {}
        for swap in self.swaps:
            found.setdefault(swap.slot.owner, []).append(swap)
        return found

    @cached_property
    def digest(self) -> str:
        """Equal where slots, counted in the order of the data, got the same captions, wherever the data lies."""
        whole = blake2b(digest_size=16)
        places: dict[Owner, int] = {}
        for slot, source in self.swaps:
            mine, other = (places.setdefault(owner, len(places)) for owner in (slot.owner, source.owner))
            row = [mine, slot.field, slot.number, slot.text, other, source.number, source.text]
            whole.update(json.dumps(row).encode())
        return whole.hexdigest()

    def __call__(self, row: Row) -> Row:
        """The sample with the captions that it has from now on, a copy where these are others.

        SampleFault where a caption is not the one that was read before training.
        """
        raw = row.raw
        owner = self.shards.get(raw.get("__url__", ""), 0), raw["__key__"]
        swaps = self.by_owner.get(owner)
        return row if swaps is None else row._replace(raw=self._swapped(raw, owner, swaps))

    def _swapped(self, raw: Raw, owner: Owner, swaps: Sequence[Swap]) -> Raw:
        now = {(slot.field, slot.number): slot.text for slot in slots_of(raw, owner, self.captions)}
        given: dict[str, Any] = {}
        for slot, source in swaps:
            if (text := now.get((slot.field, slot.number))) != slot.text:
                what = f"{slot.field} was {slot.text[:80]!r} when noise was made, now it is {text and text[:80]!r}"
                raise SampleFault("changed caption", what)
            if slot.field not in given:
                given[slot.field] = raw[PLAIN] if slot.field == PLAIN else json_record(raw)[slot.field]
            value, at = given[slot.field], slot.number
            given[slot.field] = [*value[:at], source.text, *value[at + 1 :]] if isinstance(value, list) else source.text
        plain = {PLAIN: given.pop(PLAIN)} if PLAIN in given else {}
        return raw | plain | ({"json": json_record(raw) | given} if given else {})

    def __str__(self) -> str:
        """What a log says of it."""
        share = len(self.swaps) / self.slots if self.slots else 0.0
        changed = sum(slot.text != source.text for slot, source in self.swaps)
        return f"{len(self.swaps):,} of {self.slots:,} associations ({share:.1%}) shuffled, {changed:,} changed text"

    def write(self, path: Path) -> None:
        """One JSON object per shuffled association, in the order of fields and of the data."""
        with path.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(swap.to_dict()) + "\n" for swap in self.swaps)


def shuffle(slots: Iterable[Slot], ratio: float, seed: int) -> tuple[Swap, ...]:
    """round(ratio n) of the n slots of each field, drawn at random by `seed` and shuffled among themselves."""
    fields: dict[str, list[Slot]] = {}
    for slot in slots:
        fields.setdefault(slot.field, []).append(slot)
    swaps: list[Swap] = []
    for name, found in fields.items():
        rng = random.Random(stable_hash(seed, name, "noise"))
        chosen = [found[number] for number in sorted(rng.sample(range(len(found)), round(ratio * len(found))))]
        order = derange([slot.owner for slot in chosen], rng)
        swaps += [Swap(slot, chosen[place]) for slot, place in zip(chosen, order)]
    return tuple(swaps)
