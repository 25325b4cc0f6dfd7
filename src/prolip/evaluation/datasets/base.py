"""The input of evaluations: one image at a time with its labels and captions, for every file format."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from PIL import Image

from prolip.data.faults import DamagedData, FaultCounter, SampleFault
from prolip.data.images import decode_image
from prolip.data.samples import Raw, image_bytes
from prolip.utils.documents import fingerprint as fingerprint
from prolip.utils.messages import NAMED, first_few

T = TypeVar("T")
Kind = Literal["classification", "multilabel", "retrieval", "association"]


class Share(NamedTuple):
    """One of `of` parts of a data set, which together have every sample once: the part that one process reads."""

    number: int = 0
    of: int = 1

    def take(self, items: Iterable[T]) -> Iterator[tuple[int, T]]:
        """Yield every `of`-th item, with its number among all of them."""
        return islice(enumerate(items), self.number, None, self.of)


WHOLE = Share()


class Sample(NamedTuple):
    """One encoded image and its labels; unused fields are None."""

    key: str  # unique in its data set
    image: bytes
    label: int | np.ndarray | None = None  # the class, or a multi-hot (C,) array for multilabel
    groups: np.ndarray | None = None  # integers of the file's metadata, defined by the task: a region, a year
    captions: tuple[str, ...] | None = None
    place: tuple[int, int] = (0, 0)  # (shard, number in it), the order of samples of all shares

    @property
    def content(self) -> str:
        """Hexadecimal digits of the bytes of the image's file, equal for copies."""
        return hashlib.blake2b(self.image, digest_size=16).hexdigest()

    def open(self) -> Image.Image:
        """Return the image in RGB, as in training; SampleFault as `decode_image`."""
        return decode_image(self.image)


class Association(NamedTuple):
    """One instance of WinoGAViL: a cue, and those of the `images` (keys of samples) that belong to it."""

    cue: str
    images: tuple[str, ...]
    associated: frozenset[str]


@dataclass(frozen=True)
class Dataset:
    """A test set that can be streamed any number of times."""

    name: str
    kind: Kind
    samples: Callable[..., Iterator[Sample]]  # a new pass in the order of the files, over all or over a `Share`
    fingerprint: str  # changes with names, sizes and samples of the files' bytes, not with class names or prompts
    source: str  # folder or URL, for messages
    classnames: tuple[str, ...] = ()
    templates: tuple[str, ...] = ()  # {} or {c} for the class
    associations: tuple[Association, ...] = ()
    size: int | None = None  # images, None if unknown before reading
    #: (image key, index of a caption in the order of the whole set) that match; None: each image's own captions only.
    relevance: frozenset[tuple[str, int]] | None = None
    #: JSON; `relevant_by: "label"`: a text matches all images of its class; `image_ids`, `caption_ids`: COCO's.
    info: dict[str, Any] = field(default_factory=dict)
    damage: FaultCounter | None = None  # skips and counts damaged samples; None: raise DamagedData
    state: tuple[str, int] | None = field(default=None, compare=False)  # `archive_state`: changes with every write

    @cached_property
    def contents(self) -> dict[str, str]:
        """`Sample.content` of every image by its key; the first use reads all files."""
        return {sample.key: sample.content for sample in self.samples()}

    @property
    def why_empty(self) -> str:
        """Cause of an empty data set, and the remedy."""
        if isinstance(share := self.info.get("split"), float):
            return f"--split {share} holds out none: give a larger share, such as --split {min(2 * share, 0.9):.2g}"
        return "the shards are empty"

    def shared_with(self, contents: Collection[str]) -> str:
        """Return the number of images with one of these contents, with some keys; "" for none."""
        shared = [key for key, content in self.contents.items() if content in contents]
        return f"{len(shared)} of {len(self.contents)} images ({first_few(shared, NAMED)})" if shared else ""


def note_fault(damage: FaultCounter | None, fault: SampleFault, key: str = "", place: str = "") -> None:
    """Count a fault in `damage`; without a counter, raise it as `DamagedData` with the sample's and the file's name."""
    if damage is not None:
        damage.add(fault, key, place)
        return
    where = " of ".join(part for part in (f"sample {key!r}" if key else "", place) if part)
    raise DamagedData(
        f"{where}: {fault}. Fetch this file again, or use --skip-damaged (in Python damage=FaultCounter()) to evaluate "
        "the rest and list the damaged samples in the result"
    ) from fault


def read_images(
    read: Callable[[int], Raw], samples: Sequence[Sample], damage: FaultCounter | None, share: Share = WHOLE
) -> Iterator[Sample]:
    """Yield the samples of a share with their images, in this order. read: returns the raw sample of a row."""
    for number, sample in share.take(samples):
        if damage is not None:
            damage.samples += 1
        try:
            yield sample._replace(image=image_bytes(read(number)), place=(0, number))
        except SampleFault as fault:
            note_fault(damage, fault, sample.key)
