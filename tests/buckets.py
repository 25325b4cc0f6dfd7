"""An object store in memory for gs:// URLs, so that tests read and write URLs without a network."""

from __future__ import annotations

import fsspec
from fsspec.implementations.memory import MemoryFileSystem


class Bucket(MemoryFileSystem):
    """fsspec's file system in memory under an address that is allowed, with objects of its own."""

    protocol = "gs"
    store: dict = {}
    pseudo_dirs = [""]

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("gs://"))


fsspec.register_implementation("gs", Bucket, clobber=True)
