"""Symbolic links in a folder: those that stay inside it are followed, all others are refused."""
from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def check_inside(folder: str | os.PathLike, path: str | os.PathLike) -> None:
    """ValueError for a link that leaves the folder, which may be one itself. Snapshots of the hub use its blobs."""
    root, target = Path(os.path.realpath(folder)), Path(os.path.realpath(path))
    roots = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    if os.path.islink(path) and not any(map(target.is_relative_to, roots)):
        raise ValueError(f"{path} is a link to {target}, outside {folder}, and is not followed: put the"
                         " file or folder itself there (cp -rL follows links)")  # fmt: skip


def check_links(folder: str | os.PathLike) -> None:
    """ValueError for the first file directly in a folder that is a link which leaves it."""
    for path in sorted(Path(folder).iterdir()):
        if path.is_file():
            check_inside(folder, path)


def walk(root: str | os.PathLike, below: str = "") -> Iterator[tuple[str, list[str]]]:
    """Every folder of a root, or of the part `below` it, with the names of its files, both in alphabetical order.

    Folders whose names begin with a dot are passed over, and links back to a folder that the path goes through.
    ValueError for a link to a folder outside the root, OSError for a folder that cannot be listed.
    """
    start = os.path.join(root, below) if below else os.fspath(root)
    if below:
        check_inside(root, start)
    jumps: dict[str, tuple[str, ...]] = {}  # folder -> the real folders of the links on the way to it
    for folder, folders, names in os.walk(start, followlinks=True, onerror=_refuse):
        way, kept = jumps.pop(folder, ()), []
        for name in sorted(name for name in folders if not name.startswith(".")):
            path = os.path.join(folder, name)
            through = way
            if os.path.islink(path):
                check_inside(root, path)
                through, target = (*way, os.path.realpath(folder)), os.path.realpath(path)
                if any(Path(place).is_relative_to(target) for place in through):
                    continue
            jumps[path] = through
            kept.append(name)
        folders[:] = kept
        yield folder, sorted(names)


def _refuse(error: OSError) -> None:
    """A folder that cannot be listed would be left out without a word."""
    raise error
