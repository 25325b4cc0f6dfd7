"""Images of a gallery's items, read from their files or from a local shard."""

from __future__ import annotations

import io
import tarfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from PIL import Image
from webdataset.tariterators import base_plus_ext

from prolip.data.faults import SampleFault
from prolip.data.images import decode_image
from prolip.data.reading.named import parse_source
from prolip.data.reading.rows import read_rows
from prolip.data.reading.stream import is_local, local_path
from prolip.data.reading.tar import SAMPLE_BYTES, StrictHeader, printable
from prolip.data.samples import IMAGE_SUFFIXES, image_bytes
from prolip.search.store import Item, candidates, hashes_of, run_of
from prolip.utils.documents import read_file

#: Pixels of a thumbnail's longer side; thumbnails and shard tables to keep.
SIDE, KEPT, TABLES = 224, 1024, 256
PIXELS = 2**26  # most pixels of an image. Phones take up to 64 million; decoding needs up to 20 bytes for each
DECODER = ThreadPoolExecutor(1)  # decodes all images, one at a time; each further thread would need its own memory
PLACES = ("path", "table", "row", "shard")  # the fields of an item with the place of its image
PATIENCE = 30.0  # seconds that a request waits for its turn
Value = TypeVar("Value")


class Busy(Exception):
    """The request did not get its turn in time."""


@contextmanager
def turn(lock: threading.Lock, work: str) -> Iterator[None]:
    """Hold a lock. `Busy` after PATIENCE seconds without it."""
    if not lock.acquire(timeout=PATIENCE):
        raise Busy(f"this machine is busy with {work} of others. Try again in a moment")
    try:
        yield
    finally:
        lock.release()


class Gone(Exception):
    """An item without an image; the text gives the reason."""


def has_picture(item: Item) -> bool:
    """Return whether an item has the place of its image."""
    return any(name in item for name in PLACES)


class Thumbnails:
    """Images of items that have a `path`, a `table` and row, or a `shard` and the key SHARD/KEY."""

    def __init__(self) -> None:
        self._thumbnail = lru_cache(KEPT)(lambda *item: self.of(dict(item), thumbnail_of, 2 * SIDE))
        self._rows = lru_cache(KEPT)(lambda table: read_rows(parse_source(table)))
        self._places = lru_cache(TABLES)(lambda shard: places_of(local_path(shard)))

    def thumbnail(self, item: Item) -> bytes:
        """Return WebP of at most SIDE pixels a side. `Gone` without an image."""
        return self._thumbnail(*((name, item[name]) for name in ("key", *PLACES) if name in item))

    def of(self, item: Item, make: Callable[[Image.Image], Value], side: int | None = None) -> Value:
        """Compute a value from the decoded image of an item; side: as in `decode_image`. `Gone` without an image."""
        try:
            return decoded(lambda: make(decode_image(self.data(item), PIXELS, side)))
        except SampleFault as fault:
            raise Gone(str(fault)) from fault
        except OSError as error:
            raise Gone(f"{error.filename or item['key']}: {error.strerror or error}") from error

    def data(self, item: Item) -> bytes:
        """Return the bytes of an item's image file. `Gone` without an image, OSError if it is unreadable."""
        if "path" in item:
            try:
                return read_file(item["path"], SAMPLE_BYTES)
            except ValueError as error:
                raise Gone(str(error)) from error
        if "table" in item:
            return image_bytes(self._rows(item["table"])(int(item["row"])))
        if "shard" not in item:
            raise Gone("saved features have no images. Give an index of images or shards")
        shard: str = item["shard"]
        if not is_local(shard):
            raise Gone(f"{shard} is not on this machine; images are read only from local shards")
        key = item["key"].removeprefix(f"{Path(shard).stem}/")
        run, places = self._places(shard)
        _, rows = candidates([run], hashes_of([key]))
        if not len(rows):
            raise Gone(f"{shard} no longer has an image of {key}")
        first, size = places[rows[0]].tolist()
        with open(local_path(shard), "rb") as file:
            file.seek(first)
            return file.read(size)


def places_of(path: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the keys of a tar as a sorted run, and first byte and size of their images, (N, 2); or `Gone`."""
    found: dict[str, tuple[int, int, int]] = {}
    try:
        with tarfile.open(path, mode="r:", tarinfo=StrictHeader) as archive:
            while (member := archive.next()) is not None:
                cast(Any, archive).members.clear()  # otherwise the list grows with the shard
                key, suffix = base_plus_ext(printable(member.name.removeprefix("./")))
                if key is None or not member.isreg() or suffix.lower() not in IMAGE_SUFFIXES:
                    continue
                order = IMAGE_SUFFIXES.index(suffix.lower())
                if member.size <= SAMPLE_BYTES and order < found.get(key, (len(IMAGE_SUFFIXES),))[0]:
                    found[key] = (order, member.offset_data, member.size)
    except (tarfile.TarError, OSError) as error:
        raise Gone(f"{path}: {error}; images are read only from complete, uncompressed shards") from error
    return run_of([*found], 0), np.array([x[1:] for x in found.values()], dtype=np.int64).reshape(-1, 2)


def decoded(make: Callable[[], Value]) -> Value:
    """Call `make` while nothing else is decoded. `Busy` after PATIENCE seconds."""
    made = DECODER.submit(make)
    try:
        return made.result(PATIENCE)
    except FutureTimeout:
        made.cancel()
        raise Busy("this machine is busy with images of others. Try again in a moment") from None


def thumbnail_of(image: Image.Image) -> bytes:
    image.thumbnail((SIDE, SIDE))
    data = io.BytesIO()
    image.save(data, "WEBP", quality=86, method=2)
    return data.getvalue()
