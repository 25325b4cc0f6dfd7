"""Webdataset shards: from the text of --train-data to raw samples, and how many there are.

A shard is a tar at a local path, behind any URL that fsspec opens (s3://, gs://, http://, memory://...), or the output
of a `pipe:` command.
"""
from __future__ import annotations

import glob
import json
import os
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import IO, Any, NamedTuple

import fsspec
from braceexpand import braceexpand
from webdataset.gopen import Pipe, gopen
from webdataset.tariterators import base_plus_ext, group_by_keys

from prolip.data.captions import Selector
from prolip.data.faults import FaultCounter, SampleFault, ShardFault
from prolip.data.samples import IMAGE_SUFFIXES, Raw, decode_image, image_bytes, is_selected, json_record, plain_text

#: Shards without a sizes.json are counted by reading their headers up to this many bytes in all (some 15 s).
COUNT_LIMIT = 4 * 2**30
NAMED = 3


class Shard(NamedTuple):
    """Where a shard is, and its upsampling factor."""

    url: str
    weight: float = 1.0


def is_local(url: str) -> bool:
    """Whether a URL is a path of this machine."""
    return url.startswith("file:") or not (url.startswith("pipe:") or "://" in url)


def local_path(url: str) -> str:
    """The path of a local URL."""
    return url.removeprefix("file:").removeprefix("//") if url.startswith("file:") else url


# --- what to read ----------------------------------------------------------------------------------------------------
def parse_factors(factors: str | None, sources: int) -> list[float]:
    """Upsampling factors, one per source: "2::1" -> [2.0, 1.0]; all 1 for None; ValueError otherwise."""
    if factors is None:
        return [1.0] * sources
    remedy = f"give {sources} positive numbers joined by '::', e.g. {'::'.join(['1'] * sources)}"
    try:
        weights = [float(factor) for factor in factors.split("::")]
    except ValueError:
        raise ValueError(f"train_data_upsampling_factors {factors!r} are no numbers: {remedy}") from None
    if len(weights) != sources or not all(0 < weight < float("inf") for weight in weights):
        raise ValueError(f"train_data_upsampling_factors {factors!r} for {sources} source(s) of train_data: {remedy}")
    return weights


def expand_shards(train_data: str, factors: str | None = None) -> list[Shard]:
    """The shards of `::`-joined sources, in the order given, all of them checked as far as that costs nothing.

    A source is a path or URL with brace patterns ({000..099}, {a,b}) or wildcards, a local folder (its *.tar), or a
    `pipe:` command. Every shard carries its source's factor, as in OpenCLIP. ValueError for a source that is empty,
    FileNotFoundError for local shards that are missing.
    """
    sources = train_data.split("::")
    weights = parse_factors(factors, len(sources))
    shards = [Shard(url, weight) for source, weight in zip(sources, weights) for url in expand_source(source)]
    check_shards([shard.url for shard in shards], train_data)
    return shards


def expand_source(source: str) -> list[str]:
    """The URLs of one source; ValueError where there is none."""
    source = source.strip()
    if not source:
        raise ValueError(
            "train_data holds an empty source: give shards such as data/{000..099}.tar, sources joined by '::'"
        )
    if is_local(source) and os.path.exists(local_path(source)):
        urls = [local_path(source)]
    else:
        try:
            urls = list(braceexpand(source))
        except ValueError as error:
            raise ValueError(f"brace pattern {source!r} is not balanced: {error}") from None
    return [url for part in urls for url in expand_path(part, source)]


def expand_path(url: str, source: str) -> list[str]:
    """Wildcards, folders and leftover braces of one URL of a source."""
    if not is_local(url) or os.path.isfile(local_path(url)):
        return [url]
    path = local_path(url)
    if os.path.isdir(path):
        found = sorted(str(tar) for tar in Path(path).glob("*.tar"))
        if not found:
            raise ValueError(f"folder {path} holds no .tar (it holds {listing(path)}): give a folder of shards")
        return found
    if "{" in path or "}" in path:
        raise ValueError(
            f"brace pattern {source!r} names no shard: {path!r} is left after expansion; "
            "give a range {000..099} or a list {a,b}"
        )
    if glob.has_magic(path):
        found = sorted(glob.glob(path))
        if not found:
            raise FileNotFoundError(f"wildcard {source!r} matches no file: {explain_missing(path)}")
        return found
    return [path]


def check_shards(urls: Sequence[str], train_data: str) -> None:
    """FileNotFoundError for missing local shards, ImportError for a URL scheme whose library is not installed."""
    for scheme in sorted({url.split("://")[0] for url in urls if not is_local(url) and not url.startswith("pipe:")}):
        try:
            fsspec.get_filesystem_class(scheme)
        except (ImportError, ValueError) as error:
            raise type(error)(f"shards at {scheme}:// of {train_data!r} cannot be opened: {error}") from error
    missing = [url for url in urls if is_local(url) and not os.path.isfile(local_path(url))]
    if missing:
        named = ", ".join(missing[:NAMED]) + (f" and {len(missing) - NAMED} more" if len(missing) > NAMED else "")
        raise FileNotFoundError(
            f"train_data {train_data!r}: {len(missing)} of {len(urls)} shards are missing: {named} "
            f"(looked from {os.getcwd()}). {explain_missing(missing[0])}"
        )


def explain_missing(path: str) -> str:
    """What is where a missing file was looked for: names close to it, or the nearest folder that exists."""
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(folder):
        near = get_close_matches(os.path.basename(path), os.listdir(folder), n=NAMED, cutoff=0.5)
        if near:
            return f"Did you mean {' or '.join(near)} in {folder}?"
        return f"{folder} holds {listing(folder)}."
    while not os.path.isdir(folder):
        folder, below = os.path.dirname(folder), os.path.basename(folder)
    near = get_close_matches(below, os.listdir(folder), n=NAMED, cutoff=0.5)
    return f"There is no {below} in {folder}" + (f": did you mean {' or '.join(near)}?" if near else ".")


def listing(folder: str, most: int = 5) -> str:
    """The first few names in a folder."""
    names = sorted(os.listdir(folder))
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "") or "nothing"


# --- reading ---------------------------------------------------------------------------------------------------------
class StrictHeader(tarfile.TarInfo):
    """A tar header after which nothing is lost in silence.

    tarfile, and webdataset with it, takes a damaged header, half a header or the end of the file for the end of the
    archive. Only a block of zeros is that.
    """

    @classmethod
    def frombuf(cls, buf: Any, encoding: str, errors: str) -> Any:
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if len(buf) == tarfile.BLOCKSIZE and not any(buf):
                raise
            raise tarfile.ReadError(f"no header where one should be ({error})") from error


def open_shard(url: str) -> IO[bytes]:
    """A readable binary stream of a shard."""
    if url.startswith("pipe:"):
        return gopen(url)
    if is_local(url):
        return open(local_path(url), "rb", buffering=2**20)
    return fsspec.open(url, "rb").open()


def read_members(stream: IO[bytes], url: str) -> Iterator[dict[str, Any]]:
    """The regular files of a tar as webdataset's dicts; OSError or TarError where it is not whole."""
    with tarfile.open(fileobj=stream, mode="r|*", tarinfo=StrictHeader) as archive:
        while (member := archive.next()) is not None:
            archive.members.clear()  # type: ignore[attr-defined]  # or the list grows with the shard
            content = archive.extractfile(member) if member.isreg() else None
            name = member.name.removeprefix("./")
            if content is not None and not name.startswith("__"):
                yield {"fname": name, "data": content.read(), "__url__": url}
        while rest := archive.fileobj.read(2**16):  # also brings a pipe to its end, where its exit status is known
            if any(rest):
                raise tarfile.ReadError("data after the end of the archive")


def read_shard(url: str, on_fault: Callable[[SampleFault], None] | None = None) -> Iterator[Raw]:
    """Raw samples of one shard: `__key__`, `__url__` and the bytes of each member by suffix, as webdataset groups them.

    ShardFault where the shard cannot be opened, is cut or damaged, or its command fails; a sample in the making is then
    dropped, never handed out by halves. on_fault takes what does not end the shard (a member that is there twice);
    without it that is raised, too.
    """

    def handler(error: Exception) -> bool:
        fault = SampleFault("duplicate member", str(error.args[0]))
        if on_fault is None:
            raise fault from error
        on_fault(fault)
        return True

    try:
        stream = open_shard(url)
    except Exception as error:  # every file system has its own exceptions
        raise ShardFault("unreadable shard", f"{type(error).__name__}: {error}") from error
    try:
        # a pipe's own read also looks whether its command has failed, which would drop samples by chance of timing
        source = stream.stream if isinstance(stream, Pipe) else stream
        yield from group_by_keys(read_members(source, url), handler=handler)
        stream.close()  # a pipe raises here if its command failed
    except SampleFault:
        raise
    except Exception as error:
        raise ShardFault("broken shard", f"{type(error).__name__}: {error}") from error
    finally:
        with suppress(Exception):  # left in mid-shard a pipe complains; at the end it was closed above
            stream.close()


def read_samples(
    train_data: str | Sequence[str], select: str | None = None, faults: FaultCounter | None = None
) -> Iterator[dict[str, Any]]:
    """Decoded samples in the order of the shards, for evaluation: key, url, image (RGB Pillow), txt, json.

    txt is "" and json {} where a sample has none. select: as `DataConfig.select`. Faults are raised as SampleFault, or
    counted in `faults` and passed over.
    """
    urls = [s.url for s in expand_shards(train_data)] if isinstance(train_data, str) else list(train_data)
    check_shards(urls, ", ".join(urls))
    selector = Selector.parse(select)

    def note(fault: SampleFault, key: str = "", url: str = "") -> None:
        if faults is None:
            raise type(fault)(fault.kind, f"{key} of {url}: {fault.message}") from fault
        faults.add(fault, key, url)

    for url in urls:
        try:
            for raw in read_shard(url, note if faults is not None else None):
                try:
                    if is_selected(raw, selector):
                        yield decode(raw)
                except SampleFault as fault:
                    note(fault, raw["__key__"], url)
        except ShardFault as fault:
            note(fault, url=url)


def decode(raw: Raw) -> dict[str, Any]:
    """A raw sample with its image, text and JSON decoded."""
    return {
        "key": raw["__key__"],
        "url": raw["__url__"],
        "image": decode_image(image_bytes(raw)),
        "txt": plain_text(raw).strip() if "txt" in raw else "",
        "json": json_record(raw) if "json" in raw else {},
    }


# --- counting --------------------------------------------------------------------------------------------------------
def count_samples(urls: Sequence[str], select: str | None = None) -> int:
    """How many samples the shards hold: by sizes.json or __len__ beside them, else by reading the headers.

    sizes.json maps file names to counts, __len__ holds the count of a whole folder (OpenCLIP's conventions). With
    `select` the JSON members are read. ValueError where neither is at hand and the shards are remote or large.
    """
    selector = Selector.parse(select)
    if selector is None and (known := recorded_size(urls)) is not None:
        return known
    remote = [url for url in urls if not is_local(url)]
    size = sum(os.path.getsize(local_path(url)) for url in urls if is_local(url))
    if remote or size > COUNT_LIMIT:
        reason = f"{len(remote)} of them are remote" if remote else f"they hold {size / 2**30:.1f} GiB"
        raise ValueError(
            f"the samples of {len(urls)} shards ({urls[0]}...) are not counted, because {reason}: give "
            "--train-num-samples" + ("" if selector else ", or put a sizes.json {file name: count} beside the shards")
        )
    return sum(count_shard(local_path(url), selector) for url in urls)


def recorded_size(urls: Sequence[str]) -> int | None:
    """The count that sizes.json or __len__ beside local shards give; None where any folder has neither."""
    if not all(is_local(url) for url in urls):
        return None
    folders: dict[Path, list[str]] = {}
    for url in urls:
        path = Path(local_path(url))
        folders.setdefault(path.parent, []).append(path.name)
    total = 0
    for folder, names in folders.items():
        if (folder / "sizes.json").is_file():
            sizes = json.loads((folder / "sizes.json").read_text())
            absent = [name for name in names if name not in sizes]
            if absent:
                raise ValueError(f"{folder / 'sizes.json'} has no entry for {absent[0]}: add it or remove the file")
            total += sum(int(sizes[name]) for name in names)
        elif (folder / "__len__").is_file():
            total += int((folder / "__len__").read_text())
        else:
            return None
    return total


def count_shard(path: str, selector: Selector | None) -> int:
    """Samples with an image in one local shard, up to where it breaks; those that `selector` keeps."""
    count, key, has_image, keep = 0, None, False, selector is None
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                prefix, suffix = base_plus_ext(member.name.removeprefix("./"))
                if prefix is None or not member.isreg():
                    continue
                if prefix != key:
                    count, key, has_image, keep = count + (has_image and keep), prefix, False, selector is None
                has_image |= suffix.lower() in IMAGE_SUFFIXES
                if selector is not None and suffix.lower() == "json":
                    keep = is_kept(archive, member, selector)
    except (tarfile.TarError, OSError, EOFError):
        pass  # the reader counts this fault where it matters; here it only ends the shard
    return count + (has_image and keep)


def is_kept(archive: tarfile.TarFile, member: tarfile.TarInfo, selector: Selector) -> bool:
    """Whether the JSON member passes; a broken one does not."""
    content = archive.extractfile(member)
    try:
        return content is not None and is_selected({"json": content.read()}, selector)
    except SampleFault:
        return False
