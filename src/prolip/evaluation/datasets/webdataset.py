"""clip_benchmark's webdataset folders and URLs: classification, multi-label, groups next to labels, retrieval.

    FOLDER/classnames.txt                            a class per line
    FOLDER/zeroshot_classification_templates.txt     a prompt per line, {c} for the class
    FOLDER/dataset_type.txt                          classification (or no file), multilabel, retrieval
    FOLDER/test/nshards.txt                          number of shards
    FOLDER/test/0.tar ...                            KEY.{webp,png,jpg,jpeg} with KEY.cls, KEY.npy or KEY.txt
    FOLDER/test/relevance.json                       ours: additional matches of images and captions

`.npy` is the multi-hot label of a multilabel set, and the metadata (region, income, ...) next to `.cls` in others;
`.txt` has a caption per line. `relevance.json` is {"pairs": {image key: [caption index, ...]}}; the index counts the
captions of all images in the order of the shards. Other tools use the captions of `.txt` only.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np

from prolip.data.faults import UNCHARGED, DamagedData, FaultCounter, SampleFault
from prolip.data.reading.stream import is_local, local_path
from prolip.data.reading.tar import read_shard, refuse_unusable
from prolip.data.samples import Raw, image_bytes, members_of
from prolip.evaluation.datasets.base import WHOLE, Dataset, Kind, Sample, Share, fingerprint, note_fault
from prolip.evaluation.datasets.sources import SetPlace, archive_state, find_place, folder_holds, join, shard_marks
from prolip.utils.documents import LINE_END, loads
from prolip.utils.secrecy import redacted

CLASSNAMES, TEMPLATES = "classnames.txt", "zeroshot_classification_templates.txt"
TYPE, COUNT, RELEVANCE = "dataset_type.txt", "nshards.txt", "relevance.json"
#: Kinds of this layout, and the member next to their images; associations have other files.
MEMBERS: dict[str, str] = {"classification": "cls", "multilabel": "npy", "retrieval": "txt"}


class Reading(NamedTuple):
    """Arguments of a pass over shards."""

    urls: tuple[str, ...]
    kind: Kind
    parse: Callable[[Raw], Sample]  # raises SampleFault
    damage: FaultCounter | None = None


def open_wds(
    source: str | os.PathLike, split: str = "test", name: str | None = None, damage: FaultCounter | None = None
) -> Dataset:
    """Open a data set in the layout above and check all of it except the inside of the shards.

    source: a folder, a URL of shards, or a page of the hub. FileNotFoundError, DamagedData.
    """
    place = find_place(source)
    count = shard_count(place, split)
    kind = cast(Kind, (place.text(TYPE) or "classification").strip().lower())
    if kind not in MEMBERS:
        raise DamagedData(f"{TYPE} at {place.source} has {kind[:40]!r}: use one of {', '.join(MEMBERS)}")
    classnames: tuple[str, ...] = ()
    templates: tuple[str, ...] = ()
    if kind != "retrieval":
        classnames, templates = (place.lines(file) for file in (CLASSNAMES, TEMPLATES))
        if not classnames or not templates:
            file = TEMPLATES if classnames else CLASSNAMES
            raise FileNotFoundError(f"no {file} at {place.source}, or an empty one: add it for zero-shot evaluation")
        check_templates(templates, place.source)
    urls = tuple(join(place.data, split, f"{number}.tar") for number in range(count))
    reading = Reading(urls, kind, partial(parse, kind, len(classnames)), damage)
    pairs = read_relevance(place, split) if kind == "retrieval" else None
    marks = shard_marks(urls)
    check_first(reading)
    local = is_local(place.data)
    address = os.path.abspath(local_path(place.source)) if local else place.source.split("/tree/")[0].rstrip("/")
    return Dataset(
        name=name or os.path.basename(redacted(address)).removeprefix("wds_"),
        kind=kind,
        samples=partial(read_samples, reading),
        fingerprint=fingerprint("wds", kind, marks),
        source=redacted(place.source),
        classnames=classnames,
        templates=templates,
        relevance=pairs,
        info={"split": split, "shards": count},
        damage=damage,
        state=archive_state(urls),
    )


def check_templates(templates: tuple[str, ...], where: object) -> tuple[str, ...]:
    """Return the same templates; DamagedData for one without a place for the class."""
    for template in templates:
        if "{c}" not in template and "{}" not in template:
            raise DamagedData(f"{TEMPLATES} at {where}: {template!r} has no {{c}} for the class")
    return templates


def check_first(reading: Reading) -> None:
    """Raise DamagedData if none of the first samples of local shards is usable, before any computation."""
    if all(map(is_local, reading.urls)):
        try:
            refuse_unusable(reading.urls, reading.parse, None, f"KEY.jpg next to KEY.{MEMBERS[reading.kind]}")
        except ValueError as error:
            raise DamagedData(str(error)) from error


def shard_count(place: SetPlace, split: str) -> int:
    """Return the number in nshards.txt; FileNotFoundError says if a data set is above, below or in another split."""
    text = place.text(split, COUNT)
    if text is None:
        where = "the address has none"
        if is_local(place.data):
            here = Path(local_path(place.data)).resolve()
            above = [folder for folder in here.parents[:2] if (folder / split / COUNT).is_file()]
            below, other = sorted(here.glob(f"*/{split}/{COUNT}")), sorted(here.glob(f"*/{COUNT}"))
            if above:
                where = f"it is inside a data set: give {above[0]}"
            elif below:
                where = f"it is one level too high: give {below[0].parent.parent}"
            else:
                split_of = other[0].parent.name if other else ""
                where = f"it has the split {split_of}: give --split {split_of}" if other else folder_holds(here)
        what = f"no {split}/{COUNT} at {place.source}: {where}"
        raise FileNotFoundError(f"{what}. Give the folder above {split}/ of a data set")
    if not text.strip().isdecimal() or len(text.strip()) > 7 or int(text) < 1:
        said = f"{split}/{COUNT} at {place.source} has {text.strip()[:40]!r}"
        raise DamagedData(f"{said}: write the number of shards, below 10,000,000")
    return int(text)


def read_relevance(place: SetPlace, split: str) -> frozenset[tuple[str, int]] | None:
    """Read the pairs of relevance.json, None without the file."""
    text = place.text(split, RELEVANCE)
    if text is None:
        return None
    try:
        pairs = loads(text, unique=True)["pairs"]
        return frozenset((str(key), int(index)) for key, indices in pairs.items() for index in indices)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        what = f'{split}/{RELEVANCE} at {place.source} is not {{"pairs": {{image key: [caption index, ...]}}}}'
        raise DamagedData(f"{what} ({type(error).__name__}: {error}): write it again") from error


def read_samples(reading: Reading, share: Share = WHOLE) -> Iterator[Sample]:
    """Yield the samples in the order of the shards. A share is whole shards or, with too few, every n-th sample."""
    if len(reading.urls) >= share.of:
        yield from unique_keys(raw_samples(reading, share.take(reading.urls)))
        return
    if share.number and reading.damage is not None:  # every share reads all shards; only the first counts
        reading = reading._replace(damage=FaultCounter())
    yield from (sample for _, sample in share.take(unique_keys(raw_samples(reading, enumerate(reading.urls)))))


def unique_keys(samples: Iterable[Sample]) -> Iterator[Sample]:
    """Yield the samples; a key that an earlier shard also has becomes KEY@SHARD."""
    seen: set[str] = set()
    for sample in samples:
        key = sample.key if sample.key not in seen else f"{sample.key}@{sample.place[0]}"
        seen.add(key)
        yield sample._replace(key=key)


def raw_samples(reading: Reading, urls: Iterable[tuple[int, str]]) -> Iterator[Sample]:
    """Yield the samples of numbered shards, with their keys there."""
    damage = FaultCounter() if reading.damage is None else reading.damage

    def count(fault: SampleFault) -> None:  # faults that do not end a shard; those that cost no sample are not damage
        if fault.kind not in UNCHARGED:
            damage.add(fault, url=url)

    for number, url in urls:
        damage.shards += 1
        try:
            for inside, raw in enumerate(read_shard(url, None if reading.damage is None else count)):
                damage.samples += 1
                try:
                    sample = reading.parse(raw)._replace(place=(number, inside))
                except SampleFault as fault:
                    note_fault(reading.damage, fault, raw["__key__"], url)
                else:
                    yield sample
        except SampleFault as fault:
            note_fault(reading.damage, fault, place=url)


def parse(kind: Kind, classes: int, raw: Raw) -> Sample:
    """Parse a raw sample with its label, groups or captions; SampleFault for missing or invalid members."""
    key, image = raw["__key__"], image_bytes(raw)
    if kind == "retrieval":
        if "txt" not in raw:
            raise SampleFault("missing text", f"members: {members_of(raw)}; expected txt, a caption per line")
        try:
            lines = LINE_END.split(raw["txt"].decode())
        except UnicodeDecodeError as error:
            raise SampleFault("bad text", str(error)) from error
        return Sample(key, image, captions=tuple(line for line in lines if line.strip()))
    array = None
    if "npy" in raw:
        try:
            array = np.lib.format.read_array(io.BytesIO(raw["npy"]), allow_pickle=False).reshape(-1)
        except (ValueError, OSError, EOFError, MemoryError) as error:  # MemoryError: an impossible shape
            raise SampleFault("bad array", f"npy cannot be read: {error}") from error
    if kind == "multilabel":
        if array is None or array.shape != (classes,) or not np.isin(array, (0, 1)).all():
            got = "no npy member" if array is None else f"an array {array.shape} of {array.dtype}"
            raise SampleFault("bad label", f"{got}; expected zeros and ones ({classes},), one per class")
        return Sample(key, image, array.astype(np.int64))
    if "cls" not in raw:
        if array is None:
            raise SampleFault("missing label", f"members: {members_of(raw)}; expected cls, the number of the class")
        return Sample(key, image, None, array)
    text = raw["cls"].decode(errors="replace").strip()
    if not text.isdecimal() or len(text) > 9 or int(text) >= classes:
        raise SampleFault("bad label", f"cls has {text[:40]!r}; {CLASSNAMES} has the classes 0 to {classes - 1}")
    return Sample(key, image, int(text), array)


def class_files(classes: Sequence[str], templates: Sequence[str]) -> dict[str, str]:
    """Return names and contents of the text files of a classification set."""
    lists = {CLASSNAMES: classes, TEMPLATES: templates, TYPE: ["classification"]}
    return {name: "\n".join(lines) + "\n" for name, lines in lists.items()}
