"""Few-shot tasks of any classification set: base to novel classes (Zhou et al. 2022), or all classes of a domain.

FOLDER/train.tar              `shots` images of every trained class, with the prompt of their class as caption
FOLDER/base, novel (or all)   test sets in clip_benchmark's layout, with these classes only
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from webdataset import TarWriter

from prolip.evaluation.datasets.base import Dataset, Sample, fingerprint
from prolip.evaluation.datasets.write import CONSTANT, image_member, write_wds
from prolip.utils.messages import first_few
from prolip.utils.outputs import check_output, replacing_folder

TEMPLATE = "a photo of a {c}"  # VACSR B.1
TRAIN = "train.tar"
SHOWN = 5


class LabelledImage(NamedTuple):
    """An image during a draw; content: of its file's bytes."""

    key: str
    label: int
    content: str


class FewShot(NamedTuple):
    """The images and classes of a draw."""

    classes: dict[str, range]  # of each part, base and novel or all, as labels
    train: dict[str, int]  # images to train on: key -> label
    test: dict[str, list[LabelledImage]]  # the images of each part's test set


def parts_of(number: int, together: bool = False) -> dict[str, range]:
    """Split classes 0 to number - 1: base (first half and an odd one) and novel; or all. ValueError if too few."""
    half = (number + 1) // 2
    parts = {"all": range(number)} if together else {"base": range(half), "novel": range(half, number)}
    if min(map(len, parts.values())) < 2:
        what = f"{number} class(es) leave a part with one class, which is always right"
        raise ValueError(f"{what}: give {2 if together else 4} or more classes")
    return parts


def draw(
    dataset: Dataset, test: Dataset | None = None, shots: int = 16, seed: int = 0, together: bool = False
) -> FewShot:
    """Draw `shots` images of each trained class, by seed and keys only, for any order of the files.

    From a class with fewer images, take all, without `test` half of them, rounded down; copies of drawn images are
    then removed from the test set. ValueError for unsuitable sets.
    """
    if test is not None and test.classnames != dataset.classnames:
        raise ValueError(f"{test.source} has other classes than {dataset.source}: give two splits of one set")
    pool = labelled(dataset)
    classes = parts_of(len(dataset.classnames), together)
    own: dict[int, list[LabelledImage]] = {label: [] for label in next(iter(classes.values()))}
    for row in sorted(pool, key=lambda row: fingerprint("few-shot", seed, row.key)):
        if row.label in own:
            own[row.label].append(row)
    wanted, what = (1, "image") if test is not None else (2, "second image, one to train on and one to test on")
    check_classes(dataset, [label for label, rows in own.items() if len(rows) < wanted], what)
    drawn = [row for rows in own.values() for row in rows[: min(shots, len(rows) // wanted)]]
    contents = {row.content for row in drawn}
    rest = [row for row in pool if row.content not in contents]
    if test is not None:
        rest = labelled(test)
        if shared := [row.key for row in rest if row.content in contents]:
            raise ValueError(
                f"{len(shared)} of {len(rest)} test images of {test.source} are among the training images"
                f" ({first_few(shared, SHOWN)}): give a split without them, or remove --test-data to test on the rest"
            )
    shown = {row.label for row in rest}
    check_classes(test or dataset, [x for part in classes.values() for x in part if x not in shown], "test image")
    tests = {name: [row for row in rest if row.label in part] for name, part in classes.items()}
    return FewShot(classes, {row.key: row.label for row in drawn}, tests)


def labelled(dataset: Dataset) -> list[LabelledImage]:
    """Return every image with its class. ValueError for other kinds of sets, and for an image without a class."""
    if dataset.kind != "classification":
        raise ValueError(f"{dataset.source} is a {dataset.kind} set: give a set with one class per image")
    found = []
    for sample in dataset.samples():
        if not isinstance(sample.label, int):
            raise ValueError(f"the image {sample.key} of {dataset.source} has no class: give a labelled set")
        found.append(LabelledImage(sample.key, sample.label, sample.content))
    return found


def check_classes(dataset: Dataset, missing: Sequence[int], what: str) -> None:
    """Raise ValueError if classes lack something."""
    if missing:
        names = ", ".join(repr(dataset.classnames[label]) for label in missing[:SHOWN])
        lacking = f"{len(missing)} of {len(dataset.classnames)} classes of {dataset.source} have no {what} ({names})"
        raise ValueError(f"{lacking}: remove them from the set, or give --test-data with images of all")


def write_few_shot(
    found: FewShot, dataset: Dataset, folder: Path, test: Dataset | None = None, template: str = TEMPLATE
) -> None:
    """Write a draw of these sets in one step; template: the caption of a class, {c} for the name."""
    check_new(folder, found.classes)
    with replacing_folder(folder, kept=lambda name: True) as place:
        with TarWriter(str(place / TRAIN), **CONSTANT) as train:
            for sample in dataset.samples():
                if (label := found.train.get(sample.key)) is not None:
                    name = dataset.classnames[label]
                    caption = template.replace("{c}", name).replace("{}", name)
                    record = {"class": name, "label": label, "key": sample.key}
                    texts = {"txt": caption.encode(), "json": json.dumps(record).encode()}
                    # paths and dots in keys would become folders and suffixes
                    key = f"{label:05d}-{fingerprint(sample.key)[:12]}"
                    train.write({"__key__": key, **image_member(sample.image), **texts})
        for name, rows in found.test.items():
            write_wds(part_of(test or dataset, rows, found.classes[name], template), place / name)


def part_of(dataset: Dataset, rows: Iterable[LabelledImage], classes: range, template: str) -> Dataset:
    """Return a set of these images and classes."""
    labels = {row.key: row.label - classes.start for row in rows}

    def samples() -> Iterator[Sample]:
        for sample in dataset.samples():
            if sample.key in labels:
                yield sample._replace(label=labels[sample.key])

    names = tuple(dataset.classnames[label] for label in classes)
    return replace(dataset, samples=samples, classnames=names, templates=(template,))


def check_new(folder: Path, parts: Iterable[str]) -> None:
    """Raise FileExistsError if a part of a draw exists already; other errors as `check_output`."""
    check_output(folder, folder=True)
    for path in (folder / TRAIN, *(folder / name for name in parts)):
        if path.exists():
            raise FileExistsError(f"{path} exists already: give another folder, or remove it")


def describe(found: FewShot, dataset: Dataset, folder: Path, shots: int) -> Iterator[str]:
    """Describe the written files, and the classes with fewer images than requested."""
    counts = Counter(found.train.values())
    yield f"{folder / TRAIN}: {len(found.train)} images of {len(counts)} classes"
    if few := [f"{dataset.classnames[label]} {count}" for label, count in counts.items() if count < shots]:
        yield f"  fewer than {shots} images of {len(few)} classes: {', '.join(few)}"
    for name, rows in found.test.items():
        yield f"{folder / name}: {len(rows)} images of {len(found.classes[name])} classes"
    yield f"evaluate with --data {' '.join(f'wds:{folder / name}' for name in found.test)}"
