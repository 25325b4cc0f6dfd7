"""What every reader of a published set of captioned images gives, and whether its files are there."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from prolip.data.faults import DamagedData
from prolip.utils.messages import explain_missing, first_few

NAMED = 3


class CaptionedImage(NamedTuple):
    """An image file with all that people wrote of it. key: unlike those of the set's other images; facts: what else is
    known of it, of which `--select` may choose; image_id, caption_ids: the set's own numbers, where it has any.
    """

    key: str
    path: str
    captions: tuple[str, ...]
    facts: Mapping[str, Any] = {}
    image_id: int = -1
    caption_ids: tuple[int, ...] = ()


class PublishedImages(NamedTuple):
    """The images of some splits of a set, and what the set is called."""

    name: str
    images: list[CaptionedImage]


def check_folders(*folders: Path) -> None:
    """FileNotFoundError for the first that is none."""
    for folder in folders:
        if not folder.is_dir():
            raise FileNotFoundError(f"no folder {folder}: {explain_missing(str(folder))}")


def check_files(paths: Sequence[str], what: str) -> list[int]:
    """The sizes of local files. FileNotFoundError naming those that are missing, DamagedData those that are empty."""
    sizes, missing, empty = [], [], []
    for path in paths:
        try:
            sizes.append(os.stat(path).st_size)
            if not sizes[-1]:
                empty.append(path)
        except OSError:
            missing.append(path)
    for kind, names in ((FileNotFoundError, missing), (DamagedData, empty)):
        if names:
            state = "are missing" if kind is FileNotFoundError else "are empty"
            hint = f" {explain_missing(names[0])}" if kind is FileNotFoundError else " Fetch them again."
            raise kind(f"{what}: {len(names)} of {len(paths)} files {state}: {first_few(names, NAMED)}.{hint}")
    return sizes
