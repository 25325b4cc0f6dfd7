"""Checks of output paths before the work starts, atomic writes of files and folders by rename, and locks."""

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO

from prolip.utils.console import plain


def check_output(path: str | os.PathLike, folder: bool = False, size: int = 0, mark: str = "") -> None:
    """Raise ValueError unless a file (or with `folder`, files in a folder) can be written at this path.

    size: bytes that must be free there. mark: file of the caller's own folders; other folders with files are refused.
    """
    place, other, whole = Path(path), "give another path", os.R_OK | os.W_OK | os.X_OK
    there = place.exists()
    if there and place.is_dir() is not folder:
        remedy = "give a folder" if folder else f"give a file, such as {place / 'results.json'}"
        raise ValueError(f"{place} is a {'file' if folder else 'folder'}: {remedy}")
    if there and not os.access(place, whole if folder else os.W_OK):
        raise ValueError(f"cannot write to {place} (no permission): {other}")
    if _is_stream(place):
        return
    place = Path(os.path.realpath(place))  # a file is replaced by a rename in the folder that holds it
    above = place if there and folder else place.parent
    while not above.exists():
        above = above.parent
    if not above.is_dir() or not os.access(above, whole):
        why = f"no permission for {above}" if above.is_dir() else f"{above} is a file"
        raise ValueError(f"cannot write to {path} ({why}): {other}")
    try:  # file systems such as /proc refuse writes despite the permissions
        tempfile.TemporaryFile(dir=above).close()
        disk = shutil.disk_usage(above)
    except OSError as error:
        raise ValueError(f"cannot write to {path} ({error.strerror} in {above}): {other}") from None
    if disk.total and disk.free < size:  # some network file systems report no sizes
        needed, free = (f"{count / 2**20:,.0f} MiB" for count in (size, disk.free))
        raise ValueError(f"{path} needs about {needed}, but {free} are free in {above}: free space, or {other}")
    if mark and there and not (place / mark).exists() and (found := sorted(os.listdir(place))):
        deleted = f"{found[0]!r} in it would be deleted"
        raise ValueError(f"{path} has no {mark}, so {deleted}: give a new or an empty folder")


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield a temporary path next to `target`; sync it and rename it to `target` when the block succeeds.

    For a link, this replaces its target. A pipe or device is yielded unchanged.
    """
    if _is_stream(target):
        with _full_disk(target):
            yield target
        return
    target = Path(os.path.realpath(target))
    temporary = _temporary(target)
    temporary.touch(exist_ok=False)
    mode = (target if target.exists() else temporary).stat().st_mode
    try:
        with _full_disk(target):
            yield temporary
            temporary.chmod(mode)  # safetensors makes files private; keep them readable for others
            sync(temporary)
            os.replace(temporary, target)
            sync(target.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def replacing_folder(target: Path, kept: Callable[[str], bool] = lambda name: False) -> Iterator[Path]:
    """Yield an empty folder next to `target`; sync it and replace `target` with it when the block succeeds.

    This deletes former entries, except names that are `kept`. In a folder that cannot be renamed (a mount point, the
    current folder), entries are replaced one by one: a kill may leave only some replaced.
    """
    target = Path(os.path.realpath(target))
    if target.exists() and not target.is_dir():
        raise NotADirectoryError(f"{target} is a file: give a folder")
    stays = target.is_dir() and (target.is_mount() or not os.access(target.parent, os.W_OK | os.X_OK))
    with suppress(FileNotFoundError):  # the current folder may be deleted
        stays |= Path.cwd().is_relative_to(target)
    temporary = _temporary(target / "new" if stays else target)
    temporary.mkdir()
    try:
        with _full_disk(target):
            yield temporary
            mode = temporary.stat().st_mode & 0o666
            for path in (Path(here, name) for here, _, names in os.walk(temporary) for name in names):
                path.chmod(mode)  # as in `replacing`
                sync(path)
            old, new = (set(os.listdir(place)) if place.exists() else set() for place in (target, temporary))
            for name in old - new - {temporary.name}:
                if kept(name) is not stays:  # moved to the new folder, or out of the old one
                    (os.rename if stays else _link)(target / name, temporary / name)
            if target.exists():
                shutil.copymode(target, temporary)
            for here, _, _ in os.walk(temporary):
                sync(Path(here))
            for name in new if stays else ("",):
                _exchange(temporary / name, target / name)
            for name in os.listdir(temporary) if temporary.exists() else ():  # others may have written since
                if name not in old and kept(name) and not os.path.lexists(target / name):
                    os.rename(temporary / name, target / name)
            sync(target if stays else target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _full_disk(target: Path) -> Iterator[None]:
    """Turn the error of a full disk into an OSError with the target and the remedy."""
    try:
        yield
    except Exception as error:
        found = re.search(r"(?:os error|Os { code:) (\d+)", str(error))  # safetensors has its own exception
        number = int(found[1]) if found else getattr(error, "errno", None)
        if number not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        why = f"{target} was not written ({os.strerror(number)}): free space on its disk, or give another path"
        raise OSError(number, why) from error


def _is_stream(path: Path) -> bool:
    """Return True for a pipe or a device, such as /dev/stdout."""
    return path.exists() and not path.is_file() and not path.is_dir()


def _link(old: str | Path, new: str | Path) -> None:
    """Give a file or folder a second name, by hard links or else by a copy."""
    if os.path.isdir(old) and not os.path.islink(old):
        shutil.copytree(old, new, symlinks=True, copy_function=_link)
        return
    try:
        os.link(old, new, follow_symlinks=False)
    except OSError:
        shutil.copy2(old, new, follow_symlinks=False)


def sync(path: Path) -> None:
    """Sync a file, or the names in a folder, to disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:  # some network file systems cannot sync folders
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(number)


def _temporary(target: Path) -> Path:
    """Return a new hidden path next to `target`; makes the folder."""
    target.parent.mkdir(parents=True, exist_ok=True)
    _sweep(target.parent)
    return target.with_name(f".{target.name[:30]}.{_here()}.{os.getpid()}.{secrets.token_hex(8)}.tmp")


@cache
def _here() -> str:
    """Return the name space of process numbers: the machine and this container."""
    numbers = Path("/proc/self/ns/pid")
    return f"{socket.gethostname()}.{numbers.stat().st_ino if numbers.exists() else 0}"


@cache
def _sweep(folder: Path) -> None:
    """Delete temporary files of killed writers of this machine in a folder, once per process."""
    left = re.compile(rf"\..*\.{re.escape(_here())}\.(\d+)\.[0-9a-f]{{16}}\.tmp", re.DOTALL)
    for entry in os.scandir(folder):
        if owner := left.fullmatch(entry.name):
            try:
                os.kill(int(owner[1]), 0)  # sends no signal; raises if there is no such process
            except ProcessLookupError:
                shutil.rmtree(entry.path, ignore_errors=True)
                with suppress(OSError):  # not a file, or of another user
                    os.unlink(entry.path)
            except PermissionError:  # a process of another user
                pass


def _exchange(new: Path, target: Path) -> None:
    """Exchange `new` and `target` in one step (in two on file systems such as NFS), or rename without a target."""
    if not os.path.lexists(target):
        os.rename(new, target)
        return
    here, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if (rename := getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)) is not None:
        if rename(here, os.fsencode(new), here, os.fsencode(target), swap) == 0:
            return
        if (number := ctypes.get_errno()) not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise OSError(number, os.strerror(number), str(target))
    former = target.with_name(f"{target.name}.former-{secrets.token_hex(4)}")  # not hidden: `_sweep` would delete it
    os.rename(target, former)
    try:
        os.rename(new, target)
    except OSError:
        os.rename(former, target)
        raise
    os.rename(former, new)


def lock(path: Path) -> IO[str] | None:
    """Lock a file until the returned one is closed, and write owner and time to it; None if it is already locked."""
    file = open(path, "a+", encoding="utf-8")  # noqa: SIM115  the caller closes it
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if isinstance(error, BlockingIOError):
            file.close()
            return None
    os.ftruncate(file.fileno(), 0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
    file.flush()
    return file


def holder_of(path: Path) -> str:
    """Read the owner of a lock from its file."""
    found = ""
    with suppress(OSError):
        found = plain(path.read_text(encoding="utf-8", errors="replace").strip()[:200])
    return found or "another process"
