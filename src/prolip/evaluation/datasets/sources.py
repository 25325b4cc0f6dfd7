"""Small files and shards of a test set, in a folder or at a URL."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from prolip.data.faults import DamagedData, ShardFault
from prolip.data.reading.stream import check_address, is_local, local_path, open_stream, read_up_to
from prolip.utils.documents import entries
from prolip.utils.messages import NAMED, explain_missing, first_few, listing

SAMPLED = 2**16  # bytes of a shard's head, middle and tail in its mark
CONNECTIONS = 8
TEXT_BYTES = 2**26  # of a small file: class names, prompts, additional pairs
#: The page of a data set on the hub: its small files are under raw/, its large ones under resolve/.
HUB_PAGE = re.compile(r"(?P<repo>https?://[^/]+/datasets/[^/]+/[^/]+)/tree/(?P<branch>.+)")


class SetPlace(NamedTuple):
    """Places of a test set. metadata, data: folders or URLs above text files and shards; source: as given."""

    source: str
    metadata: str
    data: str

    def text(self, *parts: str) -> str | None:
        """Return a text file, None if it is missing; DamagedData if it is unreadable or not in UTF-8."""
        url = join(self.metadata, *parts)
        try:
            with closing(open_stream(url)) as stream:
                data = read_up_to(stream, TEXT_BYTES + 1)
            if len(data) > TEXT_BYTES:
                raise DamagedData(f"{url} has more than {TEXT_BYTES:,} bytes: give the right file")
            return data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise DamagedData(f"{url} is not UTF-8 text ({error}): fetch it again") from error
        except ShardFault as fault:
            if isinstance(fault.__cause__, FileNotFoundError) or fault.message.startswith("HTTP 404"):
                return None
            raise unreadable(url, fault) from fault

    def lines(self, *parts: str) -> tuple[str, ...]:
        """Return the stripped lines of a text file, () without one; DamagedData for a blank line among them."""
        try:
            return entries(self.text(*parts) or "", join(self.metadata, *parts))
        except ValueError as error:
            raise DamagedData(str(error)) from error


def find_place(source: str | os.PathLike) -> SetPlace:
    """Find a folder, a URL of shards, a page of the hub (.../datasets/ORG/NAME/tree/main) or hf-hub:ORG/NAME."""
    source = str(source)
    if source.startswith("hf-hub:"):
        from huggingface_hub.constants import ENDPOINT

        source = f"{ENDPOINT}/datasets/{source.removeprefix('hf-hub:')}/tree/main"
    check_address(source)
    if page := HUB_PAGE.fullmatch(source.rstrip("/")):
        repo, branch = page["repo"], page["branch"]
        return SetPlace(source, f"{repo}/raw/{branch}", f"{repo}/resolve/{branch}")
    if not is_local(source):
        return SetPlace(source, source, source)
    path = local_path(source)
    if not os.path.isdir(path):
        why = "it is a file: give the folder of the test set" if os.path.isfile(path) else explain_missing(path)
        raise FileNotFoundError(f"no test set at {path}: {why}")
    return SetPlace(source, path, path)


def join(base: str, *parts: str) -> str:
    """Return a path or URL below another."""
    return "/".join([base.rstrip("/"), *parts])


def shard_marks(urls: Sequence[str]) -> list[str]:
    """Return a mark of each shard: `file_mark`, or the server's size and version; FileNotFoundError, DamagedData."""
    missing = [url for url in urls if is_local(url) and not os.path.isfile(local_path(url))]
    if missing:
        what = f"{len(missing)} of {len(urls)} shards are missing: {first_few(missing, NAMED)}"
        raise FileNotFoundError(f"{what}: fetch them, or correct nshards.txt")

    def mark(url: str) -> str:
        if is_local(url):
            return file_mark(local_path(url))
        try:
            with closing(open_stream(url)) as stream:
                return str(stream.identity)
        except ShardFault as fault:
            raise unreadable(url, fault) from fault

    with ThreadPoolExecutor(CONNECTIONS) as pool:
        return list(pool.map(mark, urls))


def unreadable(url: str, fault: ShardFault) -> DamagedData:
    """Return the error for an address that cannot be opened."""
    return DamagedData(f"{url} cannot be read ({fault.message}): check the address and the permission")


def file_mark(path: str | os.PathLike) -> str:
    """Return the size and a hash of three samples of a file's bytes."""
    size = os.path.getsize(path)
    digest = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as file:
        for start in sorted({0, max(0, size // 2 - SAMPLED // 2), max(0, size - SAMPLED)}):
            file.seek(start)
            digest.update(file.read(SAMPLED))
    return f"{size} {digest.hexdigest()}"


def archive_state(paths: Sequence[str]) -> tuple[str, int] | None:
    """Return the folder of local archives and the time of the last write to one of them, in ns; None for URLs."""
    if not all(is_local(path) for path in paths):
        return None
    files = [os.path.abspath(local_path(path)) for path in paths]
    return os.path.dirname(files[0]), max(os.stat(file).st_mtime_ns for file in files)


def folder_holds(folder: str | os.PathLike) -> str:
    """Return the part of a message that lists a folder."""
    return f"{folder} has {listing(str(folder))}" if Path(folder).is_dir() else f"there is no folder {folder}"
