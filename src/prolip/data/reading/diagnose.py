"""Why shards hold no usable sample: said before a run starts, and where a stream or a test set stays empty."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import islice
from typing import Any

from webdataset.tariterators import base_plus_ext

from prolip.data.faults import SampleFault, ShardFault
from prolip.data.reading.remote import ReadPolicy
from prolip.data.reading.stream import open_stream
from prolip.data.reading.tar import open_archive, printable, read_shard
from prolip.data.samples import IMAGE_SUFFIXES, Raw, has_image, suffixes_of, why_no_image

#: Shards and samples of each that are tried before all count as unusable, and members whose names are read.
SHARDS, SAMPLES, MEMBERS = 20, 8, 200
NAMED = 4

WANTED = f"KEY.jpg ({', '.join(IMAGE_SUFFIXES[1:])}) beside KEY.txt or KEY.json"


def survey(urls: Sequence[str], policy: ReadPolicy | None = None, wanted: str = WANTED) -> str:
    """A sentence on the first shard: its members or its format, why that is no sample, and what is wanted."""
    if not urls:
        return "there is no shard"
    url, names = urls[0], []
    try:
        with closing(open_stream(url, policy)) as stream, open_archive(stream) as archive:
            for member in islice(iter(archive.next, None), MEMBERS):
                names += [] if member.isdir() else [printable(member.name.removeprefix("./"))]
                archive.members.clear()
    except Exception as error:  # every file system and every compression has its own
        return f"{url} cannot be read: {error.message if isinstance(error, SampleFault) else error}"
    if not names:
        return f"{url} holds no file; wanted: {wanted}"
    suffixes: dict[str, dict[str, None]] = {}
    for name in names:
        key, suffix = base_plus_ext(name)
        if key is not None and not key.endswith("/") and not name.startswith("__"):
            suffixes.setdefault(key, {})[suffix.lower()] = None
    why = "its images have no text beside them, of the same key, folder included"
    if not suffixes:
        why = f"{names[0]!r} is not named KEY.SUFFIX"
    elif not any(map(has_image, suffixes.values())):
        every = list(dict.fromkeys(suffix for found in suffixes.values() for suffix in found))
        why = why_no_image(every, os.path.basename(next(iter(suffixes))))
    more = ", ..." if len(names) > NAMED else ""
    return f"{url} begins with {', '.join(names[:NAMED])}{more}: {why}; wanted: {wanted}"


def refuse_unusable(
    urls: Sequence[str], use: Callable[[Raw], Any], policy: ReadPolicy | None = None, wanted: str = WANTED
) -> None:
    """ValueError where none of the first samples can be used; shards are opened one by one until one can.

    use: raises SampleFault for a sample that cannot be used.
    """
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
                    first = first or (survey([url], policy, wanted) if lacking else described)
        except ShardFault as fault:
            first = first or f"{url}: {fault}"
    if not first and len(urls) <= SHARDS:
        first = survey(urls, policy, wanted)
    if first:
        raise ValueError(f"none of the first samples can be used: {first}")
