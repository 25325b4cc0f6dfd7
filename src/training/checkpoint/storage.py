"""Storage of checkpoints: a local folder, or a URL (s3, gs, hf) that fsspec can write to."""

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
    """Files in one folder, each whole or absent. beside: for downloads where temporary folders are memory."""

    def __init__(self, url: str, beside: Path = Path()):
        self.filesystem, self.root = url_to_fs(check_address(url))
        self.local = Path(self.root) if isinstance(self.filesystem, LocalFileSystem) else None
        self.url, self.beside = str(self.local or url).rstrip("/"), beside

    def path(self, name: str) -> str:
        """The address of a file."""
        return f"{self.url}/{name}"

    def names(self) -> list[str]:
        """The names of all files and folders, unordered; none where the folder is missing."""
        self.filesystem.invalidate_cache()
        try:
            found = self.filesystem.ls(self.root, detail=False)
        except FileNotFoundError:
            return []
        return [name.rstrip("/").rsplit("/", 1)[-1] for name in found]

    def write(self, name: str, fill: Callable[[IO[bytes]], object]) -> None:
        """Let `fill` write a file, and rename it to `name` when it is whole."""
        if self.local is not None:
            with replacing(self.local / name) as temporary, open(temporary, "wb") as file:
                fill(file)
            return
        self.filesystem.makedirs(self.root, exist_ok=True)
        # not every store hides a file until it is whole, but a move is atomic in all of them
        hidden = f"{self.root}/.{name}.tmp"
        with self.filesystem.open(hidden, "wb") as file:
            fill(file)
        self.filesystem.mv(hidden, f"{self.root}/{name}")

    @contextmanager
    def fetched(self, name: str) -> Iterator[Path]:
        """A local path of the file while the context lasts; FlagError where there is no disk for a download."""
        if self.local is not None:
            yield self.local / name
            return
        places = [tempfile.gettempdir(), os.environ.get("SLURM_TMPDIR") or "", str(self.beside.resolve())]
        disk = next((place for place in places if os.path.isdir(place) and not in_memory(place)), None)
        if disk is None:
            what = f"downloading a checkpoint from {self.url} takes a folder on a disk"
            raise FlagError(f"{what}, and {', '.join(filter(None, places))} is memory: set TMPDIR to one")
        with tempfile.TemporaryDirectory(prefix=".checkpoint-", suffix=".tmp", dir=disk) as folder:
            self.filesystem.get_file(f"{self.root}/{name}", str(Path(folder) / name))
            yield Path(folder) / name

    def rename(self, name: str, new: str) -> None:
        """Rename a file or folder, replacing what has the new name."""
        if new in self.names():
            self.delete(new)
        self.filesystem.mv(f"{self.root}/{name}", f"{self.root}/{new}", recursive=True)

    def delete(self, name: str) -> None:
        """Remove a file or a folder."""
        self.filesystem.rm(f"{self.root}/{name}", recursive=True)

    def size(self, name: str) -> int:
        """Bytes of a file, or of all files in a folder."""
        self.filesystem.invalidate_cache()
        return self.filesystem.du(f"{self.root}/{name}")

    def sweep(self) -> list[str]:
        """Remove temporary files, and shards without their file, of a killed process; returns their names."""
        for folder in self.beside.glob(".checkpoint-*.tmp") if self.local is None else ():
            shutil.rmtree(folder)
        there = {*self.names()}
        left = [name for name in there if name.startswith(".") and name.endswith(".tmp")]
        left += [name for name in there if name.endswith(".shards") and name.replace(".shards", ".pt") not in there]
        for name in left:
            self.delete(name)
        return left


def in_memory(folder: str) -> bool:
    """Whether a folder is on tmpfs or ramfs; False where the system does not tell."""
    mounts = Path("/proc/self/mounts")
    lines = mounts.read_text("utf-8").splitlines() if mounts.exists() else []  # none on another system than Linux
    kinds, place = {line.split()[1]: line.split()[2] for line in lines}, Path(folder).resolve()
    kind = next((kinds[str(above)] for above in (place, *place.parents) if str(above) in kinds), "")
    return kind in ("tmpfs", "ramfs")
