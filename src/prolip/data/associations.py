"""The pass over all texts before training that noise needs: which (image, caption) associations there are."""
from __future__ import annotations

import logging
import time
from collections.abc import Iterator

from prolip.data.config import DataConfig
from prolip.data.faults import Gather, SampleFault, ShardFault
from prolip.data.order.streams import RowSource, ShardSource, Source
from prolip.data.samples.captions import CaptionSampler, Selector
from prolip.data.samples.noise import Noise, Owner, Slot, shuffle, slots_of
from prolip.data.samples.sample import Raw, has_image, is_selected

log = logging.getLogger(__name__)

#: Associations that are held in memory while they are shuffled, some 300 bytes each.
MOST = 20_000_000
#: Seconds between two lines on how far the pass has come.
EVERY = 10.0


def show_progress() -> None:
    """Let a command print how far the pass has come."""
    log.setLevel(logging.INFO)


def make_noise(config: DataConfig, source: Source, rank: int = 0, gather: Gather | None = None) -> Noise | None:
    """The noise that `config.noise_ratio` asks for, None for 0; the same for any number of ranks.

    gather: every rank reads a share of the shards, else each reads all of them. ValueError for a shard that cannot be
    read, and for more associations than memory holds.
    """
    if not config.noise_ratio:
        return None
    captions = CaptionSampler.parse(config.caption_sampling)
    ranks = len(gather(None)) if gather is not None else 1
    urls = source.urls if isinstance(source, ShardSource) else ()
    shards = {url: number for number, url in enumerate(dict.fromkeys(urls))}
    found: dict[int, list[Slot]] = {}
    fault = ""
    try:
        found = read_slots(source, shards, captions, rank % ranks, ranks)
    except ValueError as error:  # told to the other ranks, which wait for this one
        fault = f"--noise-ratio {config.noise_ratio}: {error}"
    parts = gather((found, fault)) if gather is not None else [(found, fault)]
    if problem := next((said for _, said in parts if said), ""):
        raise ValueError(problem)
    whole = {number: slots for part, _ in parts for number, slots in part.items()}
    slots = [slot for number in sorted(whole) for slot in whole[number]]
    if len(slots) > MOST:
        raise ValueError(f"--noise-ratio {config.noise_ratio}: {too_many()}")
    if not slots:
        raise ValueError(f"--noise-ratio {config.noise_ratio}: the data has no captions to shuffle: leave it out")
    return Noise(shuffle(slots, config.noise_ratio, config.noise_seed), len(slots), captions, shards)


def read_slots(
    source: Source, shards: dict[str, int], captions: CaptionSampler, rank: int, ranks: int
) -> dict[int, list[Slot]]:
    """This rank's share of the associations by the number of their shard, in the order of the data.

    Samples that cannot be used are passed over: training counts them. ValueError: see `make_noise`.
    """
    found: dict[int, list[Slot]] = {}
    count, told = 0, time.monotonic()
    for owner, raw in texts_of(source, shards, rank, ranks):
        try:
            slots = slots_of(raw, owner, captions)
        except SampleFault:
            continue
        found.setdefault(owner[0], []).extend(slots)
        count += len(slots)
        if count > MOST:
            raise ValueError(too_many())
        if rank == 0 and time.monotonic() - told > EVERY:
            told = time.monotonic()
            log.info("noise: read %s captions, shard %d of %d", f"{count:,}", owner[0] + 1, max(len(shards), 1))
    return found


def too_many() -> str:
    """Words on data whose associations memory does not hold."""
    return f"the data has more than {MOST:,} associations, and they are shuffled in memory: train on fewer samples"


def is_usable(raw: Raw, selector: Selector | None) -> bool:
    """Whether training takes a sample, as far as can be told without decoding its image."""
    try:
        return has_image(raw) and is_selected(raw, selector)
    except SampleFault:
        return False


def texts_of(source: Source, shards: dict[str, int], rank: int, ranks: int) -> Iterator[tuple[Owner, Raw]]:
    """The samples of a rank's share of the data with who they are; of tables and folders without their images."""
    if isinstance(source, RowSource):
        assert source.texts is not None
        for row in range(source.length if rank == 0 else 0):  # it is at hand
            raw = source.texts(row)
            yield (0, raw["__key__"]), raw
        return
    assert isinstance(source, ShardSource)
    for url, number in list(shards.items())[rank::ranks]:
        try:
            for raw in source.reader(url, lambda fault: None):
                if is_usable(raw, source.selector):
                    yield (number, raw["__key__"]), raw
        except ShardFault as fault:
            what = f"every caption is read before training, and {url} cannot be: {fault}"
            raise ValueError(f"{what}; mend this shard, or leave it out of --train-data") from fault
