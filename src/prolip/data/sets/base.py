"""An image of a published set with its captions, and the checks that its files are there."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from prolip.data.faults import DamagedData
from prolip.utils.messages import explain_missing, first_few

NAMED = 3


class CaptionedImage(NamedTuple):
    """An image file with all of its captions. key: unique in the set; facts: for `--select`; image_id, caption_ids: the
    set's own numbers, where it has any.
    """

    key: str
    path: str
    captions: tuple[str, ...]
    facts: Mapping[str, Any] = {}
    image_id: int = -1
    caption_ids: tuple[int, ...] = ()


class PublishedImages(NamedTuple):
    """The images of some splits of a set, and the name of the set."""

    name: str
    images: list[CaptionedImage]


def check_folders(*folders: Path) -> None:
    """FileNotFoundError for the first folder that is missing."""
    for folder in folders:
        if not folder.is_dir():
            raise FileNotFoundError(f"no folder {folder}: {explain_missing(str(folder))}")


def check_files(paths: Sequence[str], what: str) -> list[int]:
    """The sizes of local files. FileNotFoundError naming those that are missing, DamagedData those that are empty."""
    found = dict(zip(paths, map(size_of, paths)))
    for size, kind, state in ((-1, FileNotFoundError, "are missing"), (0, DamagedData, "are empty")):
        if names := [path for path in paths if found[path] == size]:
            hint = explain_missing(names[0]) if size < 0 else "Fetch them again."
            raise kind(f"{what}: {len(names)} of {len(paths)} files {state}: {first_few(names, NAMED)}. {hint}")
    return [found[path] for path in paths]


def size_of(path: str) -> int:
    """The bytes of a file, -1 where it is missing."""
    try:
        return os.stat(path).st_size
    except OSError:
        return -1
