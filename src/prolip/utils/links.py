"""Symbolic links in a folder: links inside it are followed, all others are refused."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def check_inside(folder: str | os.PathLike, path: str | os.PathLike) -> None:
    """Raise ValueError for a link out of the folder, which may itself be a link; the hub's snapshots link to blobs."""
    root, target = Path(os.path.realpath(folder)), Path(os.path.realpath(path))
    roots = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    if os.path.islink(path) and not any(map(target.is_relative_to, roots)):
        raise ValueError(f"{path} is a link to {target}, outside {folder}: copy the file itself there (cp -rL)")


def check_links(folder: str | os.PathLike) -> None:
    """Raise ValueError if a file directly in a folder is a link out of it."""
    for path in sorted(Path(folder).iterdir()):
        if path.is_file():
            check_inside(folder, path)


def walk(root: str | os.PathLike, below: str = "") -> Iterator[tuple[str, list[str]]]:
    """Yield every folder of a root, or of the part `below` it, with the names of its files, both sorted.

    Skips hidden folders, and links that would make paths endless: back to a folder of the path or, below a link, to a
    folder already followed there. ValueError for a link out of the root, OSError for a folder that cannot be listed.
    """

    def refuse(error: OSError) -> None:
        raise error

    start = os.path.join(root, below) if below else os.fspath(root)
    if below:
        check_inside(root, start)
    # folder -> the real folders of the links on its path, and the targets followed below the first link
    jumps: dict[str, tuple[tuple[str, ...], set[str]]] = {}
    for folder, folders, names in os.walk(start, followlinks=True, onerror=refuse):
        (way, followed), kept = jumps.pop(folder, ((), set())), []
        for name in sorted(name for name in folders if not name.startswith(".")):
            path = os.path.join(folder, name)
            own = way, followed
            if os.path.islink(path):
                check_inside(root, path)
                target, through = os.path.realpath(path), (*way, os.path.realpath(folder))
                if target in followed or any(Path(place).is_relative_to(target) for place in through):
                    continue
                own = through, followed if way else set()
                own[1].add(target)
            jumps[path] = own
            kept.append(name)
        folders[:] = kept
        yield folder, sorted(names)
