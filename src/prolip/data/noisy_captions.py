"""Noisy correspondence: a share of all (image, caption) associations, read in advance, is shuffled for a whole run."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from prolip.data.captions import PLAIN, CaptionSampler, stable_hash, texts
from prolip.data.config import DataConfig
from prolip.data.faults import Gather, SampleFault, ShardFault, alone
from prolip.data.order import RowSource, ShardSource, Source
from prolip.data.samples import Raw, Row, caption_parts, has_image, is_selected, json_record

MOST = 20_000_000  # associations held in memory while they are shuffled, about 300 bytes each
TOO_MANY = "the data has more than {:,} associations, too many to shuffle in memory. Train on fewer samples"
#: Owner of a caption: the number of its shard in the order of --train-data (0 for tables and folders), and its key.
Owner = tuple[int, str]


class Slot(NamedTuple):
    """One association: a caption of a sample in a field, `.txt` or a text or list element of its JSON."""

    owner: Owner
    field: str
    number: int  # position in a list, else 0
    text: str


class Swap(NamedTuple):
    """A slot that gets the caption of another."""

    slot: Slot
    source: Slot


def slots_of(raw: Raw, owner: Owner, captions: CaptionSampler) -> list[Slot]:
    """Return the associations from which captions are drawn; SampleFault if there is none."""
    plain, record = caption_parts(raw, captions)
    values = {name: plain if name == PLAIN else (record or {}).get(name) for name in captions.fields}
    lists = {name: value if isinstance(value, list) else [value] for name, value in values.items() if value is not None}
    numbered = [(name, number, one) for name, found in lists.items() for number, one in enumerate(found)]
    return [Slot(owner, name, number, text) for name, number, one in numbered for text in texts([one], name)]


def derange(owners: Sequence[Hashable], rng: random.Random) -> list[int]:
    """Return a random permutation p for which as few owners[p[i]] as possible equal owners[i].

    A shuffle, then one swap for each i that kept its owner g, with the first j after a random one for which neither
    owners[j] nor owners[p[j]] is g. Without such a j, 2 n_g - n places keep their owner, the minimum by counting.
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
    """The swaps of a run."""

    swaps: tuple[Swap, ...]
    slots: int  # all associations
    captions: CaptionSampler
    shards: dict[str, int] = field(default_factory=dict)  # URL -> number of the shard

    @cached_property
    def by_owner(self) -> dict[Owner, list[Swap]]:
        """The swaps of each sample that has any."""
        found = defaultdict[Owner, list[Swap]](list)
        for swap in self.swaps:
            found[swap.slot.owner].append(swap)
        return dict(found)

    @cached_property
    def digest(self) -> str:
        """A hash that is equal if slots, counted in data order, got the same captions, wherever the data is."""
        whole = blake2b(digest_size=16)
        places: dict[Owner, int] = {}
        for slot, source in self.swaps:
            mine, other = (places.setdefault(owner, len(places)) for owner in (slot.owner, source.owner))
            row = [mine, slot.field, slot.number, slot.text, other, source.number, source.text]
            whole.update(json.dumps(row).encode())
        return whole.hexdigest()

    def __call__(self, row: Row) -> Row:
        """Return a copy of the sample with noisy captions; SampleFault if a caption changed since noise was made."""
        raw = row.raw
        owner = self.shards.get(raw.get("__url__", ""), 0), raw["__key__"]
        if owner not in self.by_owner:
            return row
        now = {(slot.field, slot.number): slot.text for slot in slots_of(raw, owner, self.captions)}
        given: dict[str, Any] = {}
        for slot, source in self.by_owner[owner]:
            if (text := now.get((slot.field, slot.number))) != slot.text:
                what = f"{slot.field} was {slot.text[:80]!r} when noise was made, now it is {text and text[:80]!r}"
                raise SampleFault("changed caption", what)
            if slot.field not in given:
                given[slot.field] = raw[PLAIN] if slot.field == PLAIN else json_record(raw)[slot.field]
            value, at = given[slot.field], slot.number
            given[slot.field] = [*value[:at], source.text, *value[at + 1 :]] if isinstance(value, list) else source.text
        plain = {PLAIN: given.pop(PLAIN)} if PLAIN in given else {}
        return row._replace(raw=raw | plain | ({"json": json_record(raw) | given} if given else {}))

    def __str__(self) -> str:
        """Format the counts for a log."""
        share = len(self.swaps) / self.slots if self.slots else 0.0
        changed = sum(slot.text != source.text for slot, source in self.swaps)
        return f"{len(self.swaps):,} of {self.slots:,} associations ({share:.1%}) shuffled, {changed:,} changed text"

    def write(self, path: Path) -> None:
        """Write one JSON object per shuffled association, in the order of fields and of the data."""
        with path.open("w", encoding="utf-8") as file:
            for slot, source in self.swaps:
                (shard, key), (from_shard, from_key) = slot.owner, source.owner
                line = {"key": key, "field": slot.field, "slot": slot.number, "own": slot.text, "given": source.text}
                line |= {"from": from_key, "from_slot": source.number, "shard": shard, "from_shard": from_shard}
                file.write(json.dumps(line) + "\n")


def shuffle(slots: Iterable[Slot], ratio: float, seed: int) -> tuple[Swap, ...]:
    """Draw round(ratio n) of the n slots of each field by `seed` and shuffle them among themselves."""
    fields = defaultdict[str, list[Slot]](list)
    for slot in slots:
        fields[slot.field].append(slot)
    swaps: list[Swap] = []
    for name, found in fields.items():
        rng = random.Random(stable_hash(seed, name, "noise"))
        chosen = [found[number] for number in sorted(rng.sample(range(len(found)), round(ratio * len(found))))]
        order = derange([slot.owner for slot in chosen], rng)
        swaps += [Swap(slot, chosen[place]) for slot, place in zip(chosen, order)]
    return tuple(swaps)


def make_noise(config: DataConfig, source: Source, rank: int = 0, gather: Gather = alone) -> Noise | None:
    """Return the noise of `config.noise_ratio`, None for 0; equal for any number of ranks, which share the reading."""
    if not config.noise_ratio:
        return None
    captions = CaptionSampler.parse(config.caption_sampling)
    ranks = gather(None, len)
    urls = source.urls if isinstance(source, ShardSource) else ()
    shards = {url: number for number, url in enumerate(dict.fromkeys(urls))}
    found: dict[int, list[Slot]] = {}
    fault = ""
    try:
        found = read_slots(source, shards, captions, rank % ranks, ranks)
    except ValueError as error:  # the other ranks wait for this one and must get the error
        fault = str(error)

    def merge(parts: list[tuple[dict[int, list[Slot]], str]]) -> tuple[tuple[Swap, ...], int]:
        whole = {number: slots for part, _ in parts for number, slots in part.items()}
        slots = [slot for number in sorted(whole) for slot in whole[number]]
        problem = next((said for _, said in parts if said), "") or (TOO_MANY.format(MOST) if len(slots) > MOST else "")
        if problem or not slots:
            none = "the data has no captions to shuffle. Leave the flag out"
            raise ValueError(f"--noise-ratio {config.noise_ratio}: {problem or none}")
        return shuffle(slots, config.noise_ratio, config.noise_seed), len(slots)

    swaps, count = gather((found, fault), merge)
    return Noise(swaps, count, captions, shards)


def read_slots(
    source: Source, shards: dict[str, int], captions: CaptionSampler, rank: int, ranks: int
) -> dict[int, list[Slot]]:
    """Return this rank's share of the associations by shard number, in order, without unusable samples."""

    def texts_of() -> Iterator[tuple[int, Raw]]:
        if isinstance(source, RowSource):
            assert source.texts is not None
            yield from ((0, source.texts(row)) for row in range(source.length if rank == 0 else 0))
            return
        assert isinstance(source, ShardSource)
        for url, number in list(shards.items())[rank::ranks]:
            try:
                yield from ((number, raw) for raw in source.reader(url, lambda fault: None) if has_image(raw))
            except ShardFault as fault:
                what = f"noise requires all captions before training, but {url} cannot be read: {fault}"
                raise ValueError(f"{what}. Repair this shard, or remove it from --train-data") from fault

    found: dict[int, list[Slot]] = {}
    count = 0
    selector = source.selector if isinstance(source, ShardSource) else None
    for number, raw in texts_of():
        with suppress(SampleFault):
            slots = slots_of(raw, (number, raw["__key__"]), captions) if is_selected(raw, selector) else []
            found.setdefault(number, []).extend(slots)
            count += len(slots)
        if count > MOST:
            raise ValueError(TOO_MANY.format(MOST))
    return found
