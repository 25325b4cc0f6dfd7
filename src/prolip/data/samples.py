"""One sample: the steps from the bytes in a shard to an RGB image, a caption and its own random numbers."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from prolip.data.augment.crops import RandomCrop
from prolip.data.captions import (
    LIKELY,
    PLAIN,
    CaptionSampler,
    Plain,
    Selector,
    caption_id,
    drop_words,
    offer_fields,
    stable_hash,
)
from prolip.data.faults import SampleFault
from prolip.data.images import decode_image
from prolip.utils.documents import loads
from prolip.utils.messages import first_few

Raw = dict[str, Any]
#: Suffixes of image members; the first match is used.
IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff")
JSON_BYTES = 2**22  # bytes of a sample's JSON; parsed, it may need fifty times as much memory
SEVERAL = "captions"  # JSON field that lists the captions of an image with several, in place of `.txt`
#: Random images are shifted copies of this many, because separate noise for each costs more than a decode. Their ids
#: are small enough for any vocabulary.
POOL, VOCABULARY = 32, 1000


class Row(NamedTuple):
    """A raw sample in the order of its stream."""

    raw: Raw
    occurrence: int  # how often its stream read the sample before, in this epoch


class Example(NamedTuple):
    """One row of a batch."""

    key: str
    image: Tensor  # (3, H, W)
    text: str | tuple[str, ...] | Tensor  # caption, captions or (), or their (L,) or (K, L) token ids
    drawn_id: int = -1
    ids: tuple[int, ...] = ()  # of all captions


def has_image(raw: Container[str]) -> bool:
    """Return whether a raw sample has an image member; only then does it count as a sample."""
    return any(suffix in raw for suffix in IMAGE_SUFFIXES)


def image_bytes(raw: Raw) -> bytes:
    """Return the image member of a raw sample; SampleFault lists the members if there is none."""
    for suffix in IMAGE_SUFFIXES:
        if suffix in raw:
            return raw[suffix]
    expected, key = f"expected one of {', '.join(IMAGE_SUFFIXES)}", os.path.basename(raw["__key__"])
    raise SampleFault("missing image", f"members: {members_of(raw)}; {expected}: {why_no_image(suffixes_of(raw), key)}")


def suffixes_of(raw: Raw) -> list[str]:
    """Return the suffixes of a raw sample's members."""
    return [name for name in raw if not name.startswith("__")]


def members_of(raw: Raw) -> str:
    """Return the members of a raw sample, or the first few."""
    return first_few(suffixes_of(raw), 8) or "none"


def why_no_image(suffixes: Sequence[str], key: str) -> str:
    """Explain why members of a key with these lower-case suffixes are not an image, and what to do."""
    for suffix in suffixes:
        more, dot, last = suffix.rpartition(".")
        if dot and last in IMAGE_SUFFIXES:
            plain = f"{key}_{more.replace('.', '_')}.{last}"
            rule = f"a key ends at the first dot of the file name, so '{key}.{suffix}' has the key {key!r}"
            return f"{rule} and the suffix {suffix!r}: name it {plain!r}, and its text in the same way"
    others = [suffix for suffix in suffixes if suffix not in (PLAIN, "json", "cls", "npy", *LIKELY)]
    if not others:
        return "there are only texts or labels. Give the image the same name up to its suffix"
    return f"{others[0]!r} is not an image suffix. Name the file after its format, or convert it to one of these"


def plain_text(raw: Raw) -> Plain:
    """Return the `.txt` member of a shard's sample, or the list `captions` of its JSON; SampleFault."""
    if PLAIN in raw:
        try:
            return raw[PLAIN].decode() if isinstance(raw[PLAIN], bytes) else raw[PLAIN]
        except UnicodeDecodeError as error:
            raise SampleFault("bad text", str(error)) from error
    near = [suffix for suffix in suffixes_of(raw) if suffix in LIKELY or suffix.rpartition(".")[2] == PLAIN]
    instead = f": write {near[0]!r} as txt, without another dot in the name" if near else ""
    if "json" in raw:
        try:
            if isinstance(several := json_record(raw).get(SEVERAL), list):
                return several
            instead = "; " + offer_fields(json_record(raw))
        except SampleFault as fault:
            instead = f"; its json has no captions either: {fault.message}"
    raise SampleFault("missing text", f"members: {members_of(raw)}; expected txt{instead}")


def json_record(raw: Raw, flag: str = "--caption-sampling") -> dict[str, Any]:
    """Return the `.json` member as a dict, parsed once, for `flag`; SampleFault if it is missing or not an object."""
    if "json" not in raw:
        plain = PLAIN in raw and flag == "--caption-sampling"
        remedy = "give --caption-sampling txt for the plain text" if plain else f"leave out {flag}"
        raise SampleFault("missing json", f"members: {members_of(raw)}; expected json for {flag}: {remedy}")
    if isinstance(raw["json"], bytes):
        if len(raw["json"]) > JSON_BYTES:
            raise SampleFault("bad json", f"{len(raw['json'])} bytes, the limit is {JSON_BYTES}")
        try:
            raw["json"] = loads(raw["json"])
        except ValueError as error:
            raise SampleFault("bad json", str(error)) from error
    if not isinstance(raw["json"], dict):
        raise SampleFault("bad json", f"a {type(raw['json']).__name__}, expected an object")
    return raw["json"]


def is_selected(raw: Raw, selector: Selector | None) -> bool:
    """Return whether a raw sample passes the selector (None passes all); SampleFault without a JSON."""
    return selector is None or selector(json_record(raw, "--select"))


def caption_parts(raw: Raw, captions: CaptionSampler) -> tuple[Plain, dict[str, Any] | None]:
    """Return the plain text and the JSON that captions need; if they need both, a sample may lack one."""
    plain, record = PLAIN in captions.fields, any(field != PLAIN for field in captions.fields)
    both = plain and record
    return (
        plain_text(raw) if plain and (PLAIN in raw or not both) else None,
        json_record(raw) if record and ("json" in raw or not both) else None,
    )


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Restore torch's, Python's and NumPy's global generators."""
    states = torch.default_generator.get_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        yield
    finally:
        torch.default_generator.set_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])  # noqa: NPY002


def seed_rng(seed: int) -> None:
    """Seed the global CPU generators that image transforms draw from (torchvision's, timm's and others')."""
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would also queue work for devices
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002


@dataclass(frozen=True)
class Decoder:
    """Decoder of rows into examples, a random function of (seed, epoch, sample key, occurrence) only."""

    transform: Callable[[Image.Image], Tensor] | RandomCrop  # RGB image, or file for `RandomCrop` -> (3, H, W)
    captions: CaptionSampler = field(default_factory=CaptionSampler)
    seed: int = 0
    with_ids: bool = False  # hash all whole captions, for known matches
    count: int = 1  # captions to draw, without repeats as long as plain captions last
    word_drop: float = 0.0

    def __call__(self, row: Row, epoch: int) -> Example:
        """Decode, draw the captions and augment. Seeds the global generators: call within `preserved_rng`."""
        raw, key = row.raw, row.raw["__key__"]
        identity = (self.seed, epoch, key, row.occurrence)
        pixels = self._pixels(image_bytes(raw), stable_hash(*identity, "augmentation"))
        if self.count == 0:
            return Example(key, pixels, ())
        parts = caption_parts(raw, self.captions)
        several, distinct = [self.captions.draw(*parts, stable_hash(*identity, "caption"))], isinstance(parts[0], list)
        for n in range(1, self.count):
            seed, but = stable_hash(*identity, "caption", n), [one.caption for one in several if distinct]
            several.append(self.captions.draw(*parts, seed, but=but))
        texts = tuple(drop_words(one.text, self.word_drop, *identity, n) for n, one in enumerate(several))
        text = texts[0] if self.count == 1 else texts
        if not self.with_ids:
            return Example(key, pixels, text)
        return Example(key, pixels, text, caption_id(several[0].caption), tuple(map(caption_id, several[0].all)))

    def _pixels(self, data: bytes, seed: int) -> Tensor:
        size = f"{len(data)} bytes"
        try:
            if isinstance(self.transform, RandomCrop):
                return self.transform.from_file(data, random.Random(seed))
            image = decode_image(data)
            size = f"{image.size} pixels"
            seed_rng(seed)
            return self.transform(image)
        except SampleFault:
            raise
        except Exception as error:  # e.g. an image one pixel wide that cannot be resized
            raise SampleFault("failed transform", f"{size}: {type(error).__name__}: {error}") from error


@dataclass
class SyntheticDecoder:
    """Decoder of sample i into an image (3, H, W) of standard normal pixels and (L,) token ids, by (seed, i) only.

    Texts are ids from 1 to 999 of random length, padded with 0; (captions, L) if `captions` is not 1.
    """

    image_size: int | tuple[int, int]
    context_length: int
    seed: int = 0
    captions: int = 1

    @cached_property
    def pool(self) -> Tensor:
        size = (self.image_size, self.image_size) if isinstance(self.image_size, int) else tuple(self.image_size)
        return torch.randn(POOL, 3, *size, generator=torch.Generator().manual_seed(self.seed))

    def __call__(self, row: Row, epoch: int) -> Example:
        """Return the example of a row; the epoch does not matter."""
        index = row.raw["index"]
        image = self.pool[index % POOL].roll((index // POOL, index), dims=(1, 2))
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        texts = []
        for _ in range(self.captions):
            text = torch.randint(1, VOCABULARY, (self.context_length,), generator=generator)
            text[int(torch.randint(1, self.context_length + 1, (), generator=generator)) :] = 0
            texts.append(text)
        several = torch.stack(texts) if texts else ()
        return Example(row.raw["__key__"], image, texts[0] if self.captions == 1 else several, index, (index,))
