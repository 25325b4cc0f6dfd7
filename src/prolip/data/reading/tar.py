"""Strict reader of webdataset shards that reports every loss; `survey` explains why one has no usable sample."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from webdataset.tariterators import base_plus_ext

from prolip.data.faults import HALF, SKIPPED, UNCHARGED, SampleFault, ShardFault
from prolip.data.reading.remote import ReadPolicy
from prolip.data.reading.stream import CheckedStream, Entry, Note, ResumingStream, open_stream, read_up_to
from prolip.data.samples import IMAGE_SUFFIXES, Raw, has_image, image_bytes, suffixes_of, why_no_image
from prolip.data.split import Split
from prolip.utils.messages import HEAD, appearance

if TYPE_CHECKING:
    from prolip.data.reading.shard_index import ShardIndex

FAULT = "__fault__"  # key of the fault in a skipped sample
CHUNK = 2**16  # bytes that tarfile requests from its stream at once
#: Bytes of all members of a sample, and of headers with long names (a path has at most 4,096).
SAMPLE_BYTES, HEADER_BYTES = 2**26, 2**14
GLOBALS = 100  # names that global headers may set for all members
#: Largest expansion of compressed shards, and the bytes from which it applies: images hardly shrink.
EXPANSION, EXPANSION_FROM = 100, 2**28
#: Shards, and samples of each, tried before all count as unusable; member names read, and shown.
SHARDS, SAMPLES, MEMBERS, NAMED = 20, 8, 200, 4
WANTED = f"KEY.jpg ({', '.join(IMAGE_SUFFIXES[1:])}) and KEY.txt or KEY.json"


#: First bytes of compressed archives, and their readers, which verify checksums.
COMPRESSIONS: dict[bytes, Callable[[Any], Any]] = {
    b"\x1f\x8b": lambda stream: gzip.GzipFile(fileobj=stream, mode="rb"),
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ\x00": lzma.LZMAFile,
}


@dataclass
class Peeked:
    """A stream whose first bytes can be seen before reading; ReadError if unpacking exceeds EXPANSION."""

    stream: Any
    packed: Peeked | None = None  # source of a decompressor
    head: bytes = b""
    given: int = 0  # bytes read so far

    def peek(self, count: int) -> bytes:
        """Return the next `count` bytes, or fewer at the end, without consuming them."""
        self.head += read_up_to(self.stream, max(count - len(self.head), 0))
        return self.head[:count]

    def read(self, size: int = CHUNK) -> bytes:
        data = self.head[:size] or self.stream.read(size)
        self.head = self.head[size:]
        self.given += len(data)
        if self.packed is not None and self.given > EXPANSION_FROM + EXPANSION * self.packed.given:
            raise tarfile.ReadError(f"its first {self.packed.given} bytes unpack to {self.given}, a decompression bomb")
        return data


class StrictHeader(tarfile.TarInfo):
    """A tar header that must be complete, or a zero block; tarfile treats any damage as the end of the archive."""

    @classmethod
    def frombuf(cls, buf: Any, encoding: str, errors: str) -> Any:
        try:
            header = super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if len(buf) == tarfile.BLOCKSIZE and not any(buf):
                raise
            raise tarfile.ReadError(f"no header where one is expected ({error})") from error
        # for GNU's long names and links, pax headers and Solaris' headers, tarfile keeps the data in memory
        if header.size < 0 or (header.type in (b"L", b"K", b"x", b"g", b"X") and header.size > HEADER_BYTES):
            raise tarfile.ReadError(f"a header of {header.size} bytes; the limit is {HEADER_BYTES}")
        return header

    def _proc_sparse(self, *_: Any) -> Any:
        """Refuse the maps of sparse files, which have no size limit."""
        raise tarfile.ReadError("a sparse file is not supported: pack the shard without tar's --sparse")

    _proc_gnusparse_10 = _proc_sparse


@contextmanager
def open_archive(stream: Any) -> Iterator[Any]:
    """Open and unpack the archive in a stream; tarfile verifies no checksums and misses a cut after its last byte."""
    source = Peeked(stream)
    head = source.peek(HEAD)
    opener = next((opener for magic, opener in COMPRESSIONS.items() if head.startswith(magic)), None)
    tar = source if opener is None else Peeked(opener(source), source)
    inside = tar.peek(HEAD)
    try:
        archive = tarfile.open(  # type: ignore[call-overload]  # noqa: SIM115  # closed below
            fileobj=tar, mode="r|", tarinfo=StrictHeader, bufsize=CHUNK
        )
    except tarfile.ReadError as error:
        seen, packed = appearance(inside), inside != head[: len(inside)]
        if "tar archive" in seen.what:
            raise
        what = f"{appearance(head).what} with {seen.what} in it" if packed else seen.what
        raise tarfile.ReadError(f"it is not a tar archive but {what}: {seen.remedy}") from error
    with archive:
        yield archive


def read_members(stream: Any) -> Iterator[tuple[str, bytes | int | None]]:
    """Yield name and bytes of members except folders and `__*`; if above SAMPLE_BYTES the size, None for links."""
    with open_archive(stream) as archive:
        while (member := archive.next()) is not None:
            archive.members.clear()  # otherwise the list grows with the shard
            if len(archive.pax_headers) > GLOBALS:
                raise tarfile.ReadError(f"global headers set more than {GLOBALS} names")
            name = printable(member.name.removeprefix("./"))
            if not member.isdir() and not name.startswith("__"):
                if member.isreg() and member.size > SAMPLE_BYTES:
                    yield name, member.size
                else:
                    yield name, archive.extractfile(member).read() if member.isreg() else None
            # read to the next header in bounded steps: this one may claim any size
            while (missing := archive.offset - archive.fileobj.tell()) > 0:
                if not archive.fileobj.read(min(missing, CHUNK)):
                    raise tarfile.ReadError("unexpected end of data")
        while rest := archive.fileobj.read(CHUNK):  # a command reports its failure only at its end
            if any(rest):
                raise tarfile.ReadError("data after the end of the archive")
        if length := archive.fileobj.tell() % tarfile.BLOCKSIZE:  # bytes are missing or repeated in the last file
            raise tarfile.ReadError(f"{length} bytes more than whole blocks")


def printable(name: str) -> str:
    """Return a name with its non-UTF-8 bytes escaped: keys are hashed, logged and written to ledgers."""
    return name.encode("utf-8", "backslashreplace").decode()


def grouped(members: Iterator[tuple[str, bytes | int | None]], url: str, note: Note) -> Iterator[Raw]:
    """Yield whole samples: consecutive members with one key, as webdataset groups them. Errors of `members` are raised.

    Faults given to `note`: "duplicate member" (the first is kept); "oversized member", a skipped sample of more than
    SAMPLE_BYTES; "duplicate key", skipped because its key came before in the shard; "half sample", the last one of a
    damaged shard; "skipped member", a link, or a file whose name is not key.suffix.
    """
    seen: set[int] = set()
    held = 0
    sample: Raw = {}

    def is_good() -> bool:
        if not sample:
            return False
        mark = hash(sample["__key__"])
        if mark in seen:
            note(SampleFault("duplicate key", f"{sample['__key__']} occurs before in this shard"))
            return False
        seen.add(mark)
        if FAULT in sample:
            note(sample[FAULT])
        return FAULT not in sample

    try:
        for name, content in members:
            key, suffix = base_plus_ext(name)
            if key is None or key.endswith("/") or content is None:  # "a/.b.jpg" has nothing before its dot
                note(SampleFault(SKIPPED, f"{name!r} is " + ("not a file" if key else "not named key.suffix")))
                continue
            if key != sample.get("__key__"):
                if is_good():
                    yield sample
                sample, held = {"__key__": key, "__url__": url}, 0
            size, suffix = content if isinstance(content, int) else len(content), suffix.lower()
            held += size + tarfile.BLOCKSIZE
            if held > SAMPLE_BYTES:
                what = f"{name} has {size} bytes" if isinstance(content, int) else f"{key} has {held} bytes in all"
                fault = SampleFault("oversized member", f"{what}; the limit of a sample is {SAMPLE_BYTES}")
                sample = {"__key__": key, "__url__": url, FAULT: fault}
            elif suffix in sample:
                note(SampleFault("duplicate member", f"{name} occurs twice; the first is kept"))
            else:
                sample[suffix] = content
    except Exception as error:
        if sample and type(error) is not SampleFault:  # `note` raised a SampleFault itself
            parts = ", ".join(suffixes_of(sample))
            note(SampleFault(HALF, f"{sample['__key__']} with {parts} may be incomplete and is skipped"))
        raise
    if is_good():
        yield sample


def read_shard(
    url: str,
    on_fault: Note | None = None,
    policy: ReadPolicy | None = None,
    entry: Entry | None = None,
    stream: ResumingStream | None = None,
) -> Iterator[Raw]:
    """Yield raw samples of a shard: `__key__`, `__url__` and the bytes of members by suffix, grouped as in webdataset.

    on_fault: receives faults that do not end the shard (see `grouped`; "resumed read"); without it the first that loses
    a sample is raised. stream: to read instead of opening the shard. ShardFault if it cannot be read to its end (see
    `ResumingStream`; "broken shard": cut or damaged), or differs from the `entry` of an index.
    """
    if stream is None:
        opened = (url, policy, on_fault)
        stream = ResumingStream(*opened) if entry is None else CheckedStream(*opened, entry)
    images = 0
    try:
        for sample in grouped(read_members(stream), url, on_fault or strict_note):
            images += has_image(sample)
            yield sample
    except SampleFault:
        raise
    except Exception as error:  # tarfile, zlib, lzma and bz2 have their own exceptions
        raise ShardFault("broken shard", f"{type(error).__name__}: {error}") from error
    finally:
        stream.close()
    if entry is not None and images != entry.samples:
        raise ShardFault("index mismatch", f"the shard has {images} samples, but the index says {entry.samples}")


def strict_note(fault: SampleFault) -> None:
    """Raise a fault that loses a sample."""
    if fault.kind not in UNCHARGED:
        raise fault


@dataclass(frozen=True)
class ShardReader:
    """`read_shard` with a run's settings."""

    policy: ReadPolicy = ReadPolicy()
    index: ShardIndex | None = None
    addresses: Mapping[str, str] | None = None  # canonical addresses, without secrets, -> those to read
    split: Split | None = None  # part of a split by content to yield

    def __call__(self, url: str, on_fault: Note | None = None) -> Iterator[Raw]:
        """Yield raw samples of one shard; ShardFault as in `read_shard`, and if the index lacks it."""
        url = (self.addresses or {}).get(url, url)
        try:
            entry = self.index[url] if self.index is not None else None
        except ValueError as error:
            raise ShardFault("index mismatch", str(error)) from error
        every = read_shard(url, on_fault, self.policy, entry)
        split = self.split
        return every if split is None else (raw for raw in every if not has_image(raw) or split.takes(image_bytes(raw)))


def survey(urls: Sequence[str], policy: ReadPolicy | None = None, expected: str = WANTED) -> str:
    """Describe the first shard: its members or format, why they are not a sample, and what is expected."""
    if not urls:
        return "no shards"
    url, names = urls[0], []
    try:
        with closing(open_stream(url, policy)) as stream, open_archive(stream) as archive:
            for member in islice(iter(archive.next, None), MEMBERS):
                names += [] if member.isdir() else [printable(member.name.removeprefix("./"))]
                archive.members.clear()
    except Exception as error:  # every file system and every compression has its own exceptions
        return f"{url} cannot be read: {error.message if isinstance(error, SampleFault) else error}"
    if not names:
        return f"{url} contains no file; expected: {expected}"
    suffixes: dict[str, dict[str, None]] = {}
    for name in names:
        key, suffix = base_plus_ext(name)
        if key is not None and not key.endswith("/") and not name.startswith("__"):
            suffixes.setdefault(key, {})[suffix.lower()] = None
    why = "its images have no text with the same key, including the folder"
    if not suffixes:
        why = f"{names[0]!r} is not named KEY.SUFFIX"
    elif not any(map(has_image, suffixes.values())):
        every = list(dict.fromkeys(suffix for found in suffixes.values() for suffix in found))
        why = why_no_image(every, os.path.basename(next(iter(suffixes))))
    more = ", ..." if len(names) > NAMED else ""
    return f"{url} begins with {', '.join(names[:NAMED])}{more}: {why}; expected: {expected}"


def refuse_unusable(
    urls: Sequence[str], use: Callable[[Raw], Any], policy: ReadPolicy | None = None, expected: str = WANTED
) -> None:
    """Raise ValueError if none of the first samples is usable (`use` raises SampleFault), shard by shard."""
    first = ""
    for url in urls[:SHARDS]:
        try:
            for raw in islice(read_shard(url, lambda fault: None, policy), SAMPLES):
                try:
                    use(raw)
                    return
                except SampleFault as fault:
                    lacking = not has_image(raw) or len(suffixes_of(raw)) == 1  # other members may show the cause
                    described = f"sample {raw['__key__']!r} of {url}: {fault}"
                    first = first or (survey([url], policy, expected) if lacking else described)
        except ShardFault as fault:
            first = first or f"{url}: {fault}"
    if not first and len(urls) <= SHARDS:
        first = survey(urls, policy, expected)
    if first:
        raise ValueError(f"none of the first samples is usable: {first}")
