"""Folders of class folders, as ImageNet's validation set is unpacked: FOLDER/CLASS/IMAGE."""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path

from open_clip.zero_shot_metadata import IMAGENET_CLASSNAMES, OPENAI_IMAGENET_TEMPLATES
from timm.data import ImageNetInfo

from prolip.data.faults import DamagedData, FaultCounter
from prolip.data.reading.folders import rows_of
from prolip.data.reading.tar import printable
from prolip.data.samples import IMAGE_SUFFIXES
from prolip.data.sets.base import check_files
from prolip.evaluation.datasets.base import Dataset, Sample, fingerprint, read_images
from prolip.evaluation.datasets.webdataset import CLASSNAMES, TEMPLATES, check_templates
from prolip.utils.documents import entries
from prolip.utils.links import check_inside, walk
from prolip.utils.messages import explain_missing, listing

WNID = re.compile(r"n\d{8}")
#: For folders that are no ImageNet classes: the name, as in a model's training on the folder, and CLIP's prompt.
PLAIN_TEMPLATES = ("{c}", "a photo of a {c}.")
SPLITS = ("val", "validation", "test", "train", "training")


def open_folder(root: str | os.PathLike, damage: FaultCounter | None = None) -> Dataset:
    """Images in class folders; a class is its folder's rank in alphabetical order, as torchvision's ImageFolder has it.

    Names and prompts are those of classnames.txt and zeroshot_classification_templates.txt in the root or next to it,
    else of ImageNet where folders are WordNet ids, else the folders' names. FileNotFoundError, ValueError, DamagedData.
    """
    root = Path(root)
    if not root.is_dir():
        raise FileNotFoundError(f"no image folder {root}: {explain_missing(str(root))}")
    folders = sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith("."))
    if not folders:
        itself = WNID.fullmatch(root.resolve().name)
        remedy = f"it is a class itself, give {root.parent}" if itself else "give the folder above the classes"
        raise ValueError(f"{root} holds no class folder but {listing(str(root))}: {remedy}")
    for split in SPLITS:  # whose class folders would all be read as one class
        if split in folders and any(entry.is_dir() for entry in os.scandir(root / split)):
            raise ValueError(f"{root} is one level too high: it holds {', '.join(folders[:5])}: give {root / split}")
    paths: list[str] = []
    samples: list[Sample] = []
    for label, folder in enumerate(folders):
        found = images_in(root, folder)
        paths += found
        samples += [Sample(printable(os.path.relpath(x, root).replace(os.sep, "/")), b"", label) for x in found]
    sizes = check_files(paths, f"images of {root}")
    return Dataset(
        name=root.resolve().name,
        kind="classification",
        samples=partial(read_images, rows_of(paths), samples, damage),
        fingerprint=fingerprint("folder", [(sample.key, size) for sample, size in zip(samples, sizes)]),
        source=str(root),
        classnames=names_of(root, folders),
        templates=templates_of(root, folders),
        size=len(samples),
        info={"folders": [printable(folder) for folder in folders]},
        damage=damage,
    )


def images_in(root: Path, folder: str) -> list[str]:
    """The image files of one class in alphabetical order, subfolders too.

    DamagedData where there is none, ValueError for a link that leaves the root.
    """
    found = [
        os.path.join(here, name)
        for here, names in walk(root, folder)
        for name in names
        if os.path.splitext(name)[1][1:].lower() in IMAGE_SUFFIXES and not name.startswith(".")
    ]
    for path in found:
        check_inside(root, path)
    if not found:
        what = f"the class folder {root / folder} holds no image ({', '.join(IMAGE_SUFFIXES)})"
        raise DamagedData(f"{what}: unpack it, or remove it")
    return found


def names_of(root: Path, folders: list[str]) -> tuple[str, ...]:
    """The class names: of a file, of ImageNet, or of the folders."""
    lines = lines_beside(root, CLASSNAMES)
    if lines is not None and len(lines) != len(folders):
        raise ValueError(
            f"{len(lines)} class names for {len(folders)} classes of {root} ({folders[0]}, ...): give one name "
            "per class, in alphabetical order of their folders or labels"
        )
    if lines is not None:
        return lines
    if not all(WNID.fullmatch(folder) for folder in folders):
        return tuple(printable(folder.replace("_", " ")) for folder in folders)
    known = dict(zip(ImageNetInfo("imagenet-1k").label_names(), IMAGENET_CLASSNAMES))
    if strange := [folder for folder in folders if folder not in known]:
        what = f"{len(strange)} folders of {root} are no classes of ImageNet-1k ({', '.join(strange[:3])})"
        raise ValueError(f"{what}: give their names with a {CLASSNAMES} in the folder")
    return tuple(known[folder] for folder in folders)


def templates_of(root: Path, folders: list[str]) -> tuple[str, ...]:
    """The prompts: of a file, OpenCLIP's 80 for ImageNet, or the plain one."""
    lines = lines_beside(root, TEMPLATES)
    if lines is not None:
        return check_templates(lines, root)
    if all(WNID.fullmatch(folder) for folder in folders):
        return tuple(template("{c}") for template in OPENAI_IMAGENET_TEMPLATES)
    return PLAIN_TEMPLATES


def lines_beside(root: Path, name: str) -> tuple[str, ...] | None:
    """The lines of the file `name` in the root or its parent; None without one."""
    place = next((x for x in (root / name, root.resolve().parent / name) if x.is_file()), None)
    if place is None:
        return None
    lines = entries(place.read_text(encoding="utf-8-sig"), place)
    if not lines:
        raise ValueError(f"{place} is empty: write a line per entry, or remove it")
    return lines
