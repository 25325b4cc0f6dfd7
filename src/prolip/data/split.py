"""Splits of images by their content: copies under another name fall into the same part."""

from __future__ import annotations

import hashlib
import os
from typing import Literal, NamedTuple

from prolip.utils.documents import read_file

MOST = 2**26  # bytes of an image to hash, as for every sample


class Split(NamedTuple):
    """One part of the data: the held-out `share` of its images, or the rest."""

    share: float
    part: Literal["held-out", "rest"] = "held-out"

    def takes(self, image: bytes | str | os.PathLike) -> bool:
        """Return whether an image (bytes or a path) is in this part; a larger share holds out a superset."""
        data = image if isinstance(image, bytes) else read_file(image, MOST)
        number = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")
        return (number < self.share * 2**64) == (self.part == "held-out")


def parse_split(text: str | None) -> str | Split | None:
    """Parse --split: a number between 0 and 1 is a share to hold out; any other text names a split."""
    try:
        share = float(text or "")
    except ValueError:
        return text
    if not 0 < share < 1:
        raise ValueError(f"--split {text}: give the share of the images to hold out, between 0 and 1, such as 0.1")
    return Split(share)
