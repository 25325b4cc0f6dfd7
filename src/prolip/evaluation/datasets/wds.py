"""clip_benchmark's webdataset folders and URLs: classification, multi-label, groups beside labels, retrieval.

    FOLDER/classnames.txt                            a class per line
    FOLDER/zeroshot_classification_templates.txt     a prompt per line, {c} where the class goes
    FOLDER/dataset_type.txt                          classification (or no file), multilabel, retrieval
    FOLDER/test/nshards.txt                          how many shards
    FOLDER/test/0.tar ...                            KEY.{webp,png,jpg,jpeg} with KEY.cls, KEY.npy or KEY.txt
    FOLDER/test/relevance.json                       ours: further true pairs of images and captions

`.npy` is the multi-hot label of a multilabel set and the metadata (region, income, ...) beside `.cls` elsewhere; `.txt`
holds a caption per line. `relevance.json` is {"pairs": {image key: [caption index, ...]}}; the index counts the
captions of all images in the order of the shards. Tools that do not know it see the captions of `.txt` alone.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, get_args

import numpy as np

from prolip.data.faults import UNCHARGED, FaultCounter, SampleFault
from prolip.data.reading.diagnose import refuse_unusable
from prolip.data.reading.remote import ReadPolicy
from prolip.data.reading.stream import is_local, local_path
from prolip.data.reading.tar import read_shard
from prolip.data.samples import Raw, image_bytes, members_of
from prolip.evaluation.datasets.base import WHOLE, DamagedData, Dataset, Kind, Sample, Share, fingerprint, note_fault
from prolip.evaluation.datasets.places import Place, archive_state, find_place, folder_holds, join, shard_marks
from prolip.utils.documents import LINE_END, loads
from prolip.utils.secrecy import redacted

CLASSNAMES, TEMPLATES = "classnames.txt", "zeroshot_classification_templates.txt"
TYPE, COUNT, RELEVANCE = "dataset_type.txt", "nshards.txt", "relevance.json"
SHOWN = 5
#: What a shard-wise data set may be; associations have files of their own.
KINDS = tuple(kind for kind in get_args(Kind) if kind != "association")
#: What stands beside the images of each kind.
MEMBERS = {"classification": "cls", "multilabel": "npy", "retrieval": "txt"}


class Reading(NamedTuple):
    """What a pass over the shards needs to know. read: what makes a sample of a raw one where it is not `parse`."""

    urls: tuple[str, ...]
    kind: Kind
    classes: int
    damage: FaultCounter | None
    policy: ReadPolicy | None
    read: Callable[[Raw], Sample] | None = None


def open_wds(
    source: str | os.PathLike,
    split: str = "test",
    name: str | None = None,
    damage: FaultCounter | None = None,
    policy: ReadPolicy | None = None,
) -> Dataset:
    """A data set in the layout above, at a folder, a URL that shards may have, or a page of the hub.

    Everything but the inside of the shards is checked here. FileNotFoundError for files that are missing, DamagedData
    for files that do not say what they should. damage: see `Dataset`; policy: time-outs and retries.
    """
    place = find_place(source)
    count = shard_count(place, split, policy)
    kind = read_kind(place, policy)
    classnames = place.lines(CLASSNAMES, policy=policy)
    templates = place.lines(TEMPLATES, policy=policy)
    if kind != "retrieval":
        for file, lines in ((CLASSNAMES, classnames), (TEMPLATES, templates)):
            if not lines:
                raise FileNotFoundError(f"no {file} at {place.source}, or an empty one: zero-shot evaluation needs it")
        for template in templates:
            if "{c}" not in template and "{}" not in template:
                raise DamagedData(f"{TEMPLATES} at {place.source}: {template!r} has no {{c}} where the class goes")
    urls = tuple(join(place.data, split, f"{number}.tar") for number in range(count))
    reading = Reading(urls, kind, len(classnames), damage, policy)
    pairs = read_relevance(place, split, policy) if kind == "retrieval" else None
    marks = shard_marks(urls, policy)
    check_first(reading)
    here = is_local(place.data)
    address = os.path.abspath(local_path(place.source)) if here else place.source.split("/tree/")[0].rstrip("/")
    return Dataset(
        name=name or os.path.basename(redacted(address)).removeprefix("wds_"),
        kind=kind,
        samples=partial(read_samples, reading),
        fingerprint=fingerprint("wds", kind, marks),
        source=redacted(place.source),
        classnames=() if kind == "retrieval" else classnames,
        templates=() if kind == "retrieval" else templates,
        relevance=pairs,
        info={"split": split, "shards": count},
        damage=damage,
        state=archive_state(urls),
    )


def check_first(reading: Reading) -> None:
    """DamagedData where none of the first samples of local shards can be used: before anything is computed."""
    if not all(map(is_local, reading.urls)):
        return
    try:
        refuse_unusable(
            reading.urls, partial(parse, reading=reading), reading.policy, f"KEY.jpg beside KEY.{MEMBERS[reading.kind]}"
        )
    except ValueError as error:
        raise DamagedData(str(error)) from error


def shard_count(place: Place, split: str, policy: ReadPolicy | None) -> int:
    """What nshards.txt says."""
    text = place.text(split, COUNT, policy=policy)
    if text is None:
        wanted = f"Give the folder above {split}/ of a clip_benchmark data set, or the split it has"
        where = "the address answers that there is none"
        if is_local(place.data):
            where = other_level(place, split) or folder_holds(place.data)
        raise FileNotFoundError(f"no {split}/{COUNT} at {place.source}: {where}. {wanted}")
    if not text.strip().isdecimal() or len(text.strip()) > 7 or int(text) < 1:
        said = f"{split}/{COUNT} at {place.source} says {text.strip()[:40]!r}"
        raise DamagedData(f"{said}: want the number of shards, below 10,000,000")
    return int(text)


def other_level(place: Place, split: str) -> str | None:
    """Where the data set is that a local folder is not: above it, below it, or under another split; None for none."""
    folder = Path(place.data).resolve()
    above = next((p for p in folder.parents[:2] if is_wds(p, split)), None)
    counts = [found for depth in ("*", "*/*") for found in folder.glob(f"{depth}/{split}/{COUNT}")]
    below = sorted({found.parent.parent for found in counts})
    if above is not None:
        return f"it lies inside a data set: give {above}"
    if (folder / COUNT).is_file():
        return f"it is the split {folder.name!r} of a data set: give {folder.parent} and --split {folder.name}"
    if below:
        more = f" or another of the {len(below)} data sets in it" if len(below) > 1 else ""
        return f"it is one level too high: give {below[0]}{more} ({', '.join(p.name for p in below[:SHOWN])})"
    splits = sorted(found.parent.name for found in folder.glob(f"*/{COUNT}"))
    if splits:
        return f"it has the split {' and '.join(splits)}: give --split {splits[0]}"
    return None


def read_kind(place: Place, policy: ReadPolicy | None) -> Kind:
    """What dataset_type.txt says; classification without it."""
    kind = (place.text(TYPE, policy=policy) or "classification").strip().lower()
    if kind not in KINDS:
        raise DamagedData(f"{TYPE} at {place.source} says {kind[:40]!r}: want one of {', '.join(KINDS)}")
    return kind  # type: ignore[return-value]


def read_relevance(place: Place, split: str, policy: ReadPolicy | None) -> frozenset[tuple[str, int]] | None:
    """The pairs of relevance.json, None without the file."""
    text = place.text(split, RELEVANCE, policy=policy)
    if text is None:
        return None
    try:
        pairs = loads(text, unique=True)["pairs"]
        return frozenset((str(key), int(index)) for key, indices in pairs.items() for index in indices)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise DamagedData(
            f'{split}/{RELEVANCE} at {place.source} is not {{"pairs": {{image key: [caption index, ...]}}}} '
            f"({type(error).__name__}: {error}): write it again"
        ) from error


def read_samples(reading: Reading, share: Share = WHOLE) -> Iterator[Sample]:
    """All samples in the order of the shards, `unique_keys` given. A share is whole shards, or where these are fewer
    than shares every so-many-th sample.
    """
    if len(reading.urls) >= share.of:
        yield from unique_keys(raw_samples(reading, share.take(reading.urls)))
        return
    if share.number and reading.damage is not None:  # every share reads everything; the first one counts
        reading = reading._replace(damage=FaultCounter())
    yield from (sample for _, sample in share.take(unique_keys(raw_samples(reading, enumerate(reading.urls)))))


def raw_samples(reading: Reading, urls: Iterable[tuple[int, str]]) -> Iterator[Sample]:
    """The samples of numbered shards, under the keys that they have there."""
    damage = reading.damage

    def count(url: str, fault: SampleFault) -> None:  # what does not end a shard; what costs no sample is not damage
        if damage is not None and fault.kind not in UNCHARGED:
            damage.add(fault, url=url)

    for number, url in urls:
        if damage is not None:
            damage.shards += 1
        try:
            on_fault = None if damage is None else partial(count, url)
            for inside, raw in enumerate(read_shard(url, on_fault, reading.policy)):
                if damage is not None:
                    damage.samples += 1
                try:
                    sample = parse(raw, reading)._replace(place=(number, inside))
                except SampleFault as fault:
                    note_fault(damage, fault, raw["__key__"], url)
                else:
                    yield sample
        except SampleFault as fault:
            note_fault(damage, fault, place=url)


def unique_keys(samples: Iterable[Sample]) -> Iterator[Sample]:
    """The same samples; a key that an earlier shard had too becomes KEY@SHARD."""
    seen: set[str] = set()
    for sample in samples:
        key = sample.key if sample.key not in seen else f"{sample.key}@{sample.place[0]}"
        seen.add(key)
        yield sample._replace(key=key)


def parse(raw: Raw, reading: Reading) -> Sample:
    """A raw sample with its label, groups or captions. SampleFault for what is missing or makes no sense."""
    if reading.read is not None:
        return reading.read(raw)
    key, image = raw["__key__"], image_bytes(raw)
    if reading.kind == "retrieval":
        if "txt" not in raw:
            raise SampleFault("missing text", f"members: {members_of(raw)}; wanted txt, a caption per line")
        try:
            lines = LINE_END.split(raw["txt"].decode())
        except UnicodeDecodeError as error:
            raise SampleFault("bad text", str(error)) from error
        return Sample(key, image, captions=tuple(line for line in lines if line.strip()))
    array = array_of(raw)
    if reading.kind == "multilabel":
        if array is None or array.shape != (reading.classes,) or not np.isin(array, (0, 1)).all():
            got = "no npy member" if array is None else f"an array {array.shape} of {array.dtype}"
            raise SampleFault("bad label", f"{got}; wanted zeros and ones ({reading.classes},), one per class")
        return Sample(key, image, array.astype(np.int64))
    if "cls" not in raw and array is None:
        raise SampleFault("missing label", f"members: {members_of(raw)}; wanted cls, the number of the class")
    return Sample(key, image, class_of(raw, reading.classes) if "cls" in raw else None, array)


def class_of(raw: Raw, classes: int) -> int:
    """The number in `.cls`."""
    text = raw["cls"].decode(errors="replace").strip()
    try:
        label = int(text)
    except ValueError:
        raise SampleFault("bad label", f"cls says {text[:40]!r}; wanted a number") from None
    if not 0 <= label < classes:
        raise SampleFault("bad label", f"class {label}; {CLASSNAMES} has the classes 0 to {classes - 1}")
    return label


def array_of(raw: Raw) -> np.ndarray | None:
    """The flat array in `.npy`, None without one."""
    if "npy" not in raw:
        return None
    try:
        return np.lib.format.read_array(io.BytesIO(raw["npy"]), allow_pickle=False).reshape(-1)
    except (ValueError, OSError, EOFError, MemoryError) as error:  # the latter for a shape that nothing holds
        raise SampleFault("bad array", f"npy cannot be read: {error}") from error


def class_files(classes: Sequence[str], templates: Sequence[str]) -> dict[str, str]:
    """Names and contents of the text files of a classification set."""
    lists = {CLASSNAMES: classes, TEMPLATES: templates, TYPE: ["classification"]}
    return {name: "\n".join(lines) + "\n" for name, lines in lists.items()}


def is_wds(source: str | os.PathLike, split: str = "test") -> bool:
    """Whether a local folder has this layout."""
    return is_local(str(source)) and os.path.isfile(join(local_path(str(source)), split, COUNT))
