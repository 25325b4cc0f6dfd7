"""What an evaluation reads: one image at a time with what is true of it, whatever the files look like."""
from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from PIL import Image

Kind = Literal["classification", "multilabel", "retrieval", "association"]


class Sample(NamedTuple):
    """One encoded image and what is known of it; unused fields are None.

    key: unique in its dataset; label: class, an int, or a multi-hot (C,) array for multilabel; groups: integers of the
    file's metadata (a region, an income, a year: the task knows which); captions: all texts of the image;
    cue, candidates, associated: WinoGAViL, where an instance has several images (see `Association`).
    """

    key: str
    image: bytes
    label: int | np.ndarray | None = None
    groups: np.ndarray | None = None
    captions: tuple[str, ...] | None = None

    def open(self) -> Image.Image:
        """The picture in RGB. Raises OSError when the bytes are no picture."""
        return Image.open(io.BytesIO(self.image)).convert("RGB")


class Association(NamedTuple):
    """One instance of WinoGAViL: which of the `images` (keys of samples) the cue belongs to."""

    cue: str
    images: tuple[str, ...]
    associated: frozenset[str]


@dataclass(frozen=True)
class Dataset:
    """A test set that can be read again and again, streamed.

    samples: a new pass over all of them in the order of the files; classnames and templates ({} or {c} where the class
    goes) of classification and multilabel; associations: of WinoGAViL; size: images, None if only reading tells;
    fingerprint: changes with the data (hash of names and sizes of the files, or of an index): the key of caches;
    relevance: (images, texts) pairs that match beyond each image's own captions, by (image key, caption index); None:
    own captions only; source: folder or URL, for messages.
    """

    name: str
    kind: Kind
    samples: Callable[[], Iterator[Sample]]
    fingerprint: str
    source: str
    classnames: tuple[str, ...] = ()
    templates: tuple[str, ...] = ()
    associations: tuple[Association, ...] = ()
    size: int | None = None
    relevance: frozenset[tuple[str, int]] | None = None
    info: dict[str, Any] = field(default_factory=dict)
