"""Where results are to go, checked before hours of work whose end they are; files that are whole or not there."""
from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
    """Yield a temporary path beside `target` and rename it over `target` when the block succeeds."""
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    temporary.touch(exist_ok=False)
    mode = temporary.stat().st_mode
    try:
        yield temporary
        temporary.chmod(mode)  # safetensors makes files private, and others are to read it
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
