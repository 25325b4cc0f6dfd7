"""How any number of processes share work whose results are files: each takes what nobody has made or is making."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from prolip.curate.tables import read_words, write_words
from prolip.utils.documents import shown
from prolip.utils.outputs import lock, replacing

T = TypeVar("T")
Stamp = tuple[int, int] | None


def turned(numbers: list[int]) -> list[int]:
    """From a random one on and round: processes meet seldom, even where a file system has no locks."""
    start = random.randrange(len(numbers) or 1)
    return numbers[start:] + numbers[:start]


def stamp(path: Path) -> Stamp:
    """What is another once a file was replaced; None where there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


@contextmanager
def claimed(path: Path, seen: Stamp) -> Iterator[bool]:
    """Whether a file is this process's to make: nobody holds it, and its `stamp` is what it was when it was looked at.

    The claim is a lock beside the file, which ends with its process. On a file system without locks everyone may.
    """
    place = path.with_name(f".{path.name}.lock")
    held = lock(place)
    # who held it before may have deleted it between our opening and our locking it: then a third one may hold the next
    mine = held is not None and os.fstat(held.fileno()).st_nlink > 0
    try:
        yield mine and stamp(path) == seen
    finally:
        if mine:
            place.unlink(missing_ok=True)
        if held is not None:
            held.close()


def made(missing: Mapping[int, Stamp], path: Callable[[int], Path], make: Callable[[int], T]) -> Iterator[T]:
    """Make those of the missing shards that no other process makes, and give what `make` returns of each.

    missing: number -> `stamp` of the shard's file when it was looked at; path: where this file is.
    """
    for number in tqdm(turned([*missing]), unit="shard", disable=None):
        with claimed(path(number), missing[number]) as mine:
            found = [make(number)] if mine else []
        yield from found


def agree(path: Path, words: dict[str, Any], remedy: str) -> None:
    """Write words to a file where there is none, whoever else begins at this moment.

    ValueError naming what differs where the file has others; remedy: what to do about it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    while not path.exists():
        with claimed(path, None) as mine:
            if mine:
                with replacing(path) as temporary:
                    write_words(temporary, words)
            else:
                time.sleep(0.02)
    found, wanted = read_words(path, remedy), json.loads(json.dumps(words))
    for name in {**wanted, **found}:
        if found.get(name) != wanted.get(name):
            raise ValueError(
                f"{path} was made with {name} {shown(found.get(name))}, this is {shown(wanted.get(name))}: {remedy}"
            )
