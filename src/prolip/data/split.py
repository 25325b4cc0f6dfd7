"""A share of the images that is held out by their content: a copy under another name is on the same side."""

from __future__ import annotations

import hashlib
import os
from typing import Literal, NamedTuple

from prolip.utils.documents import read_file

MOST = 2**26  # bytes of an image that is hashed, as of every sample


class Split(NamedTuple):
    """One part of the data: the `share` of its images that is held out, or the rest."""

    share: float
    part: Literal["held-out", "rest"] = "held-out"

    def takes(self, image: bytes | str | os.PathLike) -> bool:
        """Whether an image, its bytes or the path of its file, is in this part; held out also at every larger share."""
        data = image if isinstance(image, bytes) else read_file(image, MOST)
        number = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")
        return (number < self.share * 2**64) == (self.part == "held-out")


def parse_split(text: str | None) -> str | Split | None:
    """The value of --split: a number is a share to hold out, between 0 and 1, any other text the name of a split."""
    try:
        share = float(text or "")
    except ValueError:
        return text
    if not 0 < share < 1:
        raise ValueError(f"--split {text}: give the share of the images to hold out, between 0 and 1, such as 0.1")
    return Split(share)
