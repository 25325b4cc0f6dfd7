"""Check where results will go before the work starts, commit files and folders by one rename, lock what is written."""
from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import IO


def check_output(path: str | os.PathLike, folder: bool = False) -> None:
    """ValueError unless a file, or with `folder` files below a folder, can be written at this path."""
    place = Path(path)
    if place.exists() and place.is_dir() is not folder:
        remedy = "give a folder" if folder else f"give a file, such as {place / 'results.json'}"
        raise ValueError(f"{place} is a {'file' if folder else 'folder'}: {remedy}")
    above = place if place.exists() else place.absolute().parent
    while not above.exists():
        above = above.parent
    if above != place and not above.is_dir():
        raise ValueError(f"{place} cannot be written, {above} is a file: give another path")
    if not os.access(above, os.W_OK | (os.X_OK if above.is_dir() else 0)):
        raise ValueError(f"{place} cannot be written, you may not write to {above}: give another path")
    if above.is_dir():
        try:  # file systems such as /proc refuse what the permissions allow
            tempfile.TemporaryFile(dir=above).close()
        except OSError as error:
            raise ValueError(f"{place} cannot be written ({error.strerror} in {above}): give another path") from None


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield a temporary path beside `target`; sync it and rename it over `target` when the block succeeds."""
    temporary = _beside(target)
    temporary.touch(exist_ok=False)
    mode = temporary.stat().st_mode
    try:
        yield temporary
        temporary.chmod(mode)  # safetensors makes files private, and others are to read it
        sync(temporary)
        os.replace(temporary, target)
        sync(target.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def replacing_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder beside `target`; sync it and put it in the place of `target` when the block succeeds.

    What `target` held before is deleted after that, all of it: check with the caller's own marks that it may go.
    """
    temporary = _beside(target)
    temporary.mkdir()
    try:
        yield temporary
        for here, _, names in os.walk(temporary):
            for name in names:
                sync(Path(here, name))
            sync(Path(here))
        _exchange(temporary, target)
        sync(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def sync(path: Path) -> None:
    """Have the disk hold a file, or which names a folder has."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:  # some network file systems cannot sync folders
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(number)


def _beside(target: Path) -> Path:
    """A new hidden name next to `target`."""
    _sweep(target.parent)
    return target.with_name(f".{target.name}.{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(8)}.tmp")


@cache
def _sweep(folder: Path) -> None:
    """Delete what writers of this machine that were killed left in a folder, once a process: it may hold much."""
    left = re.compile(rf"\..+\.{re.escape(socket.gethostname())}\.(\d+)\.[0-9a-f]{{16}}\.tmp")
    for entry in os.scandir(folder):
        owner = left.fullmatch(entry.name)
        if owner and not _runs(int(owner[1])):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                Path(entry.path).unlink(missing_ok=True)


def _runs(process: int) -> bool:
    """Whether this machine has such a process."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _exchange(new: Path, target: Path) -> None:
    """Put `new` in the place of `target` in one step, and what `target` was in the place of `new`.

    File systems that cannot exchange two names, such as NFS, take two renames: a kill between them leaves the former
    folder under its hidden name.
    """
    if not os.path.lexists(target):
        os.rename(new, target)
        return
    here, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is not None and rename(here, os.fsencode(new), here, os.fsencode(target), swap) == 0:
        return
    if rename is not None and (number := ctypes.get_errno()) not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        raise OSError(number, os.strerror(number), str(target))
    former = _beside(target)
    os.rename(target, former)
    os.rename(new, target)
    os.rename(former, new)


def lock(path: Path) -> IO[str] | None:
    """Hold a file, made where it is missing, for this process until the returned file is closed; None: it is held.

    The file tells who holds it, and since when. A file system without locks lets everyone pass.
    """
    file = open(path, "a+", encoding="utf-8")  # noqa: SIM115  held as long as its user wants
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    except OSError:
        pass
    os.ftruncate(file.fileno(), 0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
    file.flush()
    return file


def holder_of(path: Path) -> str:
    """Who holds a lock, as its file tells."""
    try:
        return path.read_text(encoding="utf-8").strip() or "another process"
    except OSError:
        return "another process"
