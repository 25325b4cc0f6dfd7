"""The samples of training data once, each with all of its captions: what is looked at when the weights have settled."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple

from PIL import Image
from torch import Tensor

from prolip.data.associations import make_noise
from prolip.data.config import DataConfig
from prolip.data.faults import FaultCounter, SampleFault
from prolip.data.order.cursor import Cursor
from prolip.data.order.streams import Place, Source
from prolip.data.samples.decoding import decode_image
from prolip.data.samples.noise import Noise
from prolip.data.samples.sample import Row, caption_parts, image_bytes
from prolip.data.sources import build_source
from prolip.data.synthetic import SyntheticSource
from prolip.utils.threads import default_workers, in_threads

#: Samples that are decoded ahead of the one that is wanted.
AHEAD = 256
#: An epoch of its own, so that the order is that of no epoch of training.
EPOCH = 2**31 - 1


class Captioned(NamedTuple):
    """A sample as evaluation sees it. pixels: (3, H, W); chances: caption -> the probability that training draws it."""

    key: str
    pixels: Tensor
    chances: dict[str, float]


def captioned_samples(
    config: DataConfig,
    preprocess: Callable[[Image.Image], Tensor],
    count: int,
    rank: int = 0,
    ranks: int = 1,
    faults: FaultCounter | None = None,
    noise: Noise | None = None,
) -> Iterator[Captioned]:
    """This rank's share of at most `count` samples of the training data, none of them twice.

    Decoded by threads. Where config.captions is 0, a sample may have no caption. faults: counts what cannot be used,
    and ends the reading where that is too much. noise: that of the loader, which is otherwise made again where the
    config asks for it. ValueError for synthetic data, which has no captions.
    """
    source, _ = build_source(config, ranks)
    if isinstance(source, SyntheticSource):
        raise ValueError("synthetic data has no captions to fit anything to")
    noise = make_noise(config, source) if noise is None else noise
    captions = config.sampler
    counter = FaultCounter(limit=config.max_bad_fraction) if faults is None else faults
    share = count // ranks + (rank < count % ranks)

    def chances_of(row: Row) -> dict[str, float]:
        try:
            return captions.chances(*caption_parts(row.raw, captions))
        except SampleFault:
            if config.captions:
                raise
            return {}

    def decode(row: Row) -> Captioned | tuple[SampleFault, Row]:
        try:
            row = noise(row) if noise is not None else row
            chances = chances_of(row)
            return Captioned(row.raw["__key__"], preprocess(decode_image(image_bytes(row.raw))), chances)
        except SampleFault as fault:
            return fault, row
        except Exception as error:  # an image one pixel wide that cannot be resized, and more
            return SampleFault("failed transform", f"{type(error).__name__}: {error}"), row

    rows = once(source, Place(config.seed, EPOCH, rank, ranks), counter)
    for done in in_threads(decode, islice(rows, share), default_workers(), AHEAD):
        if isinstance(done, Captioned):
            counter.use_sample()
            yield done
        else:
            fault, row = done
            counter.lose_sample(fault, row.raw["__key__"], row.raw.get("__url__", ""))
            counter.judge_chunk()


def once(source: Source, place: Place, faults: FaultCounter) -> Iterator[Row]:
    """The rows of a stream up to the first that it reads again."""
    for row in source.stream(place, faults, Cursor()):
        if row.occurrence:
            return
        yield row
