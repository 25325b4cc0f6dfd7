"""Webdataset shards: the addresses in --train-data and the number of their samples."""

from __future__ import annotations

import glob
import os
import stat
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import fsspec

from prolip.data.captions import Selector
from prolip.data.faults import SampleFault
from prolip.data.reading.remote import ReadPolicy, file_system
from prolip.data.reading.shard_index import canonical
from prolip.data.reading.stream import check_address, expand_braces, is_local, local_path
from prolip.data.reading.tar import SAMPLE_BYTES, StrictHeader, grouped
from prolip.data.samples import has_image, is_selected
from prolip.utils.documents import loads, shown, text_of
from prolip.utils.messages import explain_missing, first_few, listing

#: Bytes of shards whose headers are read to count samples (about 15 s), and of a sizes.json or __len__.
COUNT_LIMIT, COUNT_BYTES = 4 * 2**30, 2**26
NAMED = 3


class Shard(NamedTuple):
    """The address of a shard and its upsampling factor."""

    url: str
    weight: float = 1.0


def parse_factors(factors: str | None, sources: int) -> list[float]:
    """Parse upsampling factors, one per source: "2::1" -> [2.0, 1.0]; all 1 for None; ValueError."""
    weights: list[float] = []
    with suppress(ValueError):
        weights = [float(factor) for factor in factors.split("::")] if factors is not None else [1.0] * sources
    if len(weights) != sources or not all(0 < weight < float("inf") for weight in weights):
        remedy = f"give {sources} positive numbers joined by '::', such as {'::'.join(['1'] * sources)}"
        raise ValueError(f"--train-data-upsampling-factors {factors!r} for {sources} source(s): {remedy}")
    return weights


def expand_shards(
    train_data: str, factors: str | None = None, pipes: bool = False, sizes: dict[str, int] | None = None
) -> list[Shard]:
    """Return the shards of `::`-joined sources in order, each with its source's factor, as in OpenCLIP.

    A source is a path or URL with brace patterns ({000..099}, {a,b}) or wildcards, a local folder (its *.tar) or, if
    `pipes`, a `pipe:` command. sizes: receives the bytes of local shards, each of which is looked up once.
    ValueError, FileNotFoundError, and ImportError for a URL scheme without its library.
    """
    sources, sizes = train_data.split("::"), {} if sizes is None else sizes
    weights = parse_factors(factors, len(sources))
    shards = [Shard(url, w) for source, w in zip(sources, weights) for url in expand_source(source, pipes, sizes)]
    remote = {shard.url.split("://")[0] for shard in shards if "://" in shard.url and not is_local(shard.url)}
    for scheme in sorted(remote & {"s3", "gs", "hf"}):
        try:
            fsspec.get_filesystem_class(scheme)
        except ImportError as error:
            raise ImportError(f"shards at {scheme}:// of {train_data!r} cannot be opened: {error}") from error
    urls = [shard.url for shard in shards if is_local(shard.url)]
    sizes |= {url: size for url in urls if url not in sizes and (size := size_of(url)) is not None}
    if missing := [url for url in urls if url not in sizes]:
        raise FileNotFoundError(
            f"{train_data!r}: {len(missing)} of {len(shards)} shards are missing: {first_few(missing, NAMED)} "
            f"(looked from {os.getcwd()}). {explain_missing(missing[0])}"
        )
    return shards


def size_of(url: str) -> int | None:
    """Return the bytes of a local shard, None if there is no file."""
    with suppress(OSError, ValueError):  # ValueError: a zero byte in the path
        found = os.stat(local_path(url))
        return found.st_size if stat.S_ISREG(found.st_mode) else None
    return None


def expand_source(source: str, pipes: bool = False, sizes: dict[str, int] | None = None) -> list[str]:
    """Return the URLs of a source; parameters and errors as in `expand_shards`. OSError if a wildcard has no match."""
    source, sizes = source.strip(), {} if sizes is None else sizes
    if not source:
        raise ValueError("a source is empty. Give shards such as data/{000..099}.tar, with '::' between sources")
    special = source.startswith("file:") or not {"{", "}", "\\"}.isdisjoint(source)  # others are not looked up twice
    is_path = special and is_local(source) and os.path.exists(local_path(source))
    urls: list[str] = []
    for url in [local_path(source)] if is_path else expand_braces(source):
        check_address(url, pipes)
        path, found = local_path(url), [url]
        if not is_local(url):
            if "*" in url and not url.startswith(("pipe:", "http://", "https://")):  # a shell's, or not listable
                found = list_objects(url, source)
        elif (size := size_of(url)) is not None:
            sizes[url] = size
        elif os.path.isdir(path):
            found = sorted(str(tar) for tar in Path(path).glob("*.tar"))
            if not found:
                raise ValueError(f"folder {path} has no .tar (it contains {listing(path)}). Give a folder of shards")
        elif "{" in path or "}" in path:
            remedy = "give a range {000..099} or a list {a,b}"
            raise ValueError(f"brace pattern {source!r} names no shard: {path!r} is left after expansion; {remedy}")
        else:
            found = sorted(glob.glob(path)) if glob.has_magic(path) else [path]
            if not found:
                raise FileNotFoundError(f"wildcard {source!r} matches no file: {explain_missing(path)}")
        urls += found
    return urls


def list_objects(url: str, source: str) -> list[str]:
    """Return the objects of a store that match a wildcard."""
    try:
        system, path = file_system(url, ReadPolicy())
        found = sorted(system.glob(path))
    except (ImportError, ValueError):
        raise
    except Exception as error:  # every file system has its own exceptions
        raise OSError(f"cannot list wildcard {source!r}: {type(error).__name__}: {error}") from error
    if not found:
        raise FileNotFoundError(f"wildcard {source!r} matches no object: check it, or give a range {{000..099}}")
    return [url.removesuffix(path) + name for name in found]


def urls_of(sources: Iterable[str]) -> list[str]:
    """Return the shards of sources, each once, for an index; ValueError if URLs differ only in parts it leaves out."""
    urls = list(dict.fromkeys(shard.url for source in sources for shard in expand_shards(source, pipes=True)))
    remote = [url for url in urls if not is_local(url)]
    if len(set(map(canonical, remote))) < len(remote):
        why = "some shards differ only in user info or query, which an index does not store"
        raise ValueError(f"{why}. Index them under different addresses")
    return urls


def count_samples(urls: Sequence[str], select: str | None = None, sizes: Mapping[str, int] | None = None) -> int:
    """Count samples of shards without an index, by sizes.json or __len__ next to them, else by headers (and JSON)."""
    selector, remote = Selector.parse(select), sum(not is_local(url) for url in urls)
    sizes = {url: os.path.getsize(local_path(url)) for url in urls if is_local(url)} if sizes is None else sizes
    if selector is None and not remote and (known := recorded_size(urls)) is not None:
        return known
    size = sum(sizes.get(url, 0) for url in urls)
    if remote or size > COUNT_LIMIT:
        reason = f"{remote} of them are remote" if remote else f"they hold {size / 2**30:.1f} GiB"
        others = ", or put a sizes.json {file name: count} next to the shards, or write an index (prolip data index)"
        what = f"the samples of {len(urls)} shards ({urls[0]}...) are unknown, because {reason}"
        raise ValueError(f"{what}: give --train-num-samples" + ("" if selector else others))
    return sum(count_shard(local_path(url), selector) for url in urls)


def recorded_size(urls: Sequence[str]) -> int | None:
    """Return the count in OpenCLIP's sizes.json, or __len__ of the whole folder, next to local shards; None without."""
    folders: dict[Path, list[str]] = {}
    for url in urls:
        path = Path(local_path(url))
        folders.setdefault(path.parent, []).append(path.name)
    total = 0
    for folder, names in folders.items():
        file = next((folder / name for name in ("sizes.json", "__len__") if (folder / name).is_file()), None)
        if file is None:
            return None
        try:
            found = loads(text_of(file, COUNT_BYTES), unique=True)
            sizes = found if isinstance(found, dict) else {"": found}
            if wrong := [size for size in sizes.values() if not str(size).isdecimal()]:
                raise ValueError(f"{shown(wrong[0])} is not a count")
        except ValueError as error:
            raise ValueError(f"{file} has no sample counts ({error}). Repair or remove it") from error
        names = [""] if file.name == "__len__" else names
        if absent := [name for name in names if name not in sizes]:
            raise ValueError(f"{file} has no entry for {absent[0]}. Add it or remove the file")
        total += sum(int(sizes[name]) for name in names)
    return total


def count_shard(path: str, selector: Selector | None) -> int:
    """Count samples with an image in one local shard up to its first fault, if `selector` keeps them."""

    def members(archive: Any) -> Iterator[tuple[str, bytes | None]]:
        while (member := archive.next()) is not None:
            archive.members.clear()  # otherwise the list grows with the shard
            name = member.name.removeprefix("./")
            if not member.isdir() and not name.startswith("__"):
                is_read = selector and member.isreg() and name.lower().endswith(".json") and member.size <= SAMPLE_BYTES
                content = archive.extractfile(member).read() if is_read else b""
                yield name, content if member.isreg() else None

    count = 0
    with suppress(Exception), tarfile.open(path, tarinfo=StrictHeader) as archive:
        for raw in grouped(members(archive), path, lambda fault: None):
            with suppress(SampleFault):  # a damaged JSON
                count += has_image(raw) and is_selected(raw, selector)
    return count
