"""Where checkpoints lie: a local folder, or a URL (s3, gs, hf) that fsspec can write to."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from prolip.data.reading.stream import check_address
from prolip.utils.flags import FlagError
from prolip.utils.outputs import replacing


class Storage:
    """Files in one folder, each either whole under its name or not there.

    beside: where files on their way from a URL lie where temporary files would lie in memory.
    """

    def __init__(self, url: str, beside: Path = Path()):
        self.filesystem, self.root = url_to_fs(check_address(url))
        self.local = Path(self.root) if isinstance(self.filesystem, LocalFileSystem) else None
        self.url, self.beside = str(self.local or url).rstrip("/"), beside

    def path(self, name: str) -> str:
        """A file as a person would name it."""
        return f"{self.url}/{name}"

    def names(self) -> list[str]:
        """What is there, in no order; nothing where the folder is missing."""
        self.filesystem.invalidate_cache()
        try:
            found = self.filesystem.ls(self.root, detail=False)
        except FileNotFoundError:
            return []
        return [name.rstrip("/").rsplit("/", 1)[-1] for name in found]

    def write(self, name: str, fill: Callable[[IO[bytes]], object]) -> None:
        """Have `fill` write a file, which then takes its name here in one move."""
        if self.local is not None:
            with replacing(self.local / name) as temporary, open(temporary, "wb") as file:
                fill(file)
            return
        self.filesystem.makedirs(self.root, exist_ok=True)
        # not every store shows a file only when it is whole, but a move is one step in all of them
        hidden = f"{self.root}/.{name}.tmp"
        with self.filesystem.open(hidden, "wb") as file:
            fill(file)
        self.filesystem.mv(hidden, f"{self.root}/{name}")

    @contextmanager
    def fetched(self, name: str) -> Iterator[Path]:
        """The file on this machine, for as long as the context lasts."""
        if self.local is not None:
            yield self.local / name
            return
        with self.scratch() as folder:
            self.filesystem.get_file(f"{self.root}/{name}", str(Path(folder) / name))
            yield Path(folder) / name

    def scratch(self) -> tempfile.TemporaryDirectory:
        """A temporary folder on a disk: in TMPDIR, SLURM_TMPDIR or `beside`. FlagError where all of them are memory."""
        places = [tempfile.gettempdir(), os.environ.get("SLURM_TMPDIR") or "", str(self.beside.resolve())]
        for place in (place for place in places if os.path.isdir(place) and not in_memory(place)):
            return tempfile.TemporaryDirectory(prefix=".checkpoint-", suffix=".tmp", dir=place)
        raise FlagError(
            f"a checkpoint on its way from {self.url} takes a folder on a disk, and "
            f"{', '.join(filter(None, places))} is memory: set TMPDIR to one"
        )

    def holds(self, address: str) -> bool:
        """Whether a file with this address would be one of those here."""
        other = Storage(address.rpartition("/")[0] or ".")
        if self.local is not None and other.local is not None:
            return other.local.resolve() == self.local.resolve()
        return other.url == self.url

    def rename(self, name: str, new: str) -> None:
        """Give a file or folder another name, in the place of what has it."""
        if new in self.names():
            self.delete(new)
        self.filesystem.mv(f"{self.root}/{name}", f"{self.root}/{new}", recursive=True)

    def delete(self, name: str) -> None:
        """Remove a file or a folder."""
        self.filesystem.rm(f"{self.root}/{name}", recursive=True)

    def size(self, name: str) -> int:
        """Bytes of a file, or of all in a folder."""
        self.filesystem.invalidate_cache()
        return self.filesystem.du(f"{self.root}/{name}")

    def sweep(self) -> list[str]:
        """Remove what a killed process left here, temporary files and shards without their file; returns the names."""
        for folder in self.beside.glob(".checkpoint-*.tmp") if self.local is None else ():
            shutil.rmtree(folder)
        there = {*self.names()}
        left = [name for name in there if name.startswith(".") and name.endswith(".tmp")]
        left += [name for name in there if name.endswith(".shards") and name.replace(".shards", ".pt") not in there]
        for name in left:
            self.delete(name)
        return left


def in_memory(folder: str) -> bool:
    """Whether the files of a folder lie in memory, as far as the system tells."""
    try:
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text("utf-8").splitlines()]
    except OSError:  # another system than Linux
        return False
    kinds, place = {mount[1]: mount[2] for mount in mounts}, Path(folder).resolve()
    kind = next((kinds[str(above)] for above in (place, *place.parents) if str(above) in kinds), "")
    return kind in ("tmpfs", "ramfs")
