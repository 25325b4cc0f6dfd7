"""HierarImgs, ProLIP B.3: images at four levels, made of COCO's segments; built once, read as a folder.

FOLDER/000000000139/level0.png   the largest segment on a blank canvas
                    level1.png   with the second largest pasted, and so on
                    level3.jpg   the original
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from pycocotools import mask

from prolip.data.images import open_image
from prolip.hierarchy.choices import LEAST
from prolip.utils.documents import loads
from prolip.utils.messages import first_few
from prolip.utils.outputs import check_output, replacing_folder

#: Segments that are pasted.
SEGMENTS = 3
#: The file that says that a folder is a build.
MARK = "hierarimgs.json"
BLANK = (255, 255, 255)
WANTED = "give COCO's annotations/instances_val2017.json and the folder of its images, val2017"


class Chosen(NamedTuple):
    """An image and the segmentations of its largest segments, largest first; size: (height, width)."""

    file: str
    size: tuple[int, int]
    segments: tuple[Any, ...]


def choose(instances: str | Path, least: int = LEAST, segments: int = SEGMENTS) -> list[Chosen]:
    """The images of which every segment is larger than `least` pixels and that have `segments` of them.

    Sizes are the annotations' `area`, which COCO counts in pixels. FileNotFoundError, and ValueError for what is no
    file of instances.
    """
    path = Path(instances)
    if not path.is_file():
        raise FileNotFoundError(f"no file at {path}: {WANTED}")
    try:
        content = loads(path.read_text(encoding="utf-8"))
        images = {image["id"]: image for image in content["images"]}
        of_image: dict[Any, list[Mapping]] = {}
        for annotation in content["annotations"]:
            of_image.setdefault(annotation["image_id"], []).append(annotation)
        found = []
        for key, annotations in of_image.items():
            if len(annotations) < segments or min(a["area"] for a in annotations) <= least:
                continue
            largest = sorted(annotations, key=lambda a: -a["area"])[:segments]
            image = images[key]
            if not isinstance(image["file_name"], str):
                raise TypeError(f"file_name {image['file_name']!r} is no text")
            found.append(
                Chosen(image["file_name"], (image["height"], image["width"]), tuple(a["segmentation"] for a in largest))
            )
    except (ValueError, KeyError, TypeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} is no file of COCO's instances ({what}): {WANTED}") from error
    return sorted(found, key=lambda one: one.file)


def mask_of(segmentation: Any, size: tuple[int, int]) -> np.ndarray:
    """A segmentation of COCO as pixels, (height, width) bool, by pycocotools, which the annotations were made with.

    A list of polygons [x0, y0, x1, y1, ...], or run lengths {"counts", "size"} in columns, background first, as a list
    or as COCO's text of them. ValueError for anything else: pycocotools reads and writes beyond its memory for some.
    """
    height, width = size
    if isinstance(segmentation, Mapping) and "counts" in segmentation:
        counts = segmentation["counts"]
        runs = decode_counts(counts) if isinstance(counts, (str, bytes)) else [_number(n, int) for n in counts]
        if min(runs, default=0) < 0 or sum(runs) != height * width:
            raise ValueError(f"run lengths of {sum(runs)} pixels for an image of {width} x {height}")
        if (given := list(segmentation.get("size", size))) != list(size):
            raise ValueError(f"run lengths of size {given} for an image of [height, width] {list(size)}")
        encoded = mask.frPyObjects({"counts": runs, "size": list(size)}, height, width)
    elif isinstance(segmentation, Sequence) and not isinstance(segmentation, str) and segmentation:
        encoded = mask.merge(mask.frPyObjects([polygon_of(one, size) for one in segmentation], height, width))
    else:
        raise ValueError(f"a segmentation is a list of polygons or run lengths, got {type(segmentation).__name__}")
    return mask.decode(encoded).astype(bool)


def polygon_of(numbers: Any, size: tuple[int, int]) -> list[float]:
    """One polygon's x and y of three points or more. ValueError for others, and for points far from the image."""
    if not isinstance(numbers, Sequence) or isinstance(numbers, str):
        raise ValueError(
            f"a polygon is a list [x0, y0, x1, y1, ...], got {numbers!r}: write one polygon as [[x0, y0, ...]]"
        )
    if len(numbers) < 6 or len(numbers) % 2:
        raise ValueError(f"a polygon of {len(numbers)} numbers: want x and y of three points or more")
    found, most = [_number(x, float) for x in numbers], 2 * max(size)
    if not all(abs(x) <= most for x in found):  # NaN neither
        raise ValueError(f"a polygon with a point beyond {most} pixels of an image of {size[1]} x {size[0]}")
    return found


def _number(value: Any, kind: type) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, kind)):
        raise ValueError(f"{value!r} stands where a number is expected")
    return kind(value)


def decode_counts(text: str | bytes) -> list[int]:
    """COCO's run lengths from their text: 5 bits a character, low bits first, 32 for "more", from the fourth on the
    difference to the run before the last.
    """
    data = text.encode() if isinstance(text, str) else text
    runs: list[int] = []
    place = 0
    while place < len(data):
        value, shift, more = 0, 0, True
        while more:
            if place >= len(data):
                raise ValueError("run lengths break off in the middle of a number")
            bits = data[place] - 48
            if not 0 <= bits < 64:
                raise ValueError(f"run lengths hold the character {chr(data[place])!r}")
            value |= (bits & 31) << shift
            shift, more, place = shift + 5, bool(bits & 32), place + 1
            if not more and bits & 16:
                value -= 1 << shift
        runs.append(value + (runs[-2] if len(runs) > 2 else 0))
    return runs


def levels_of(image: Image.Image, masks: Sequence[np.ndarray]) -> list[Image.Image]:
    """Levels of an RGB image but the last, which it is itself: segments pasted on white one by one, largest first."""
    pixels = np.asarray(image)
    canvas = np.empty_like(pixels)
    canvas[...] = BLANK
    out = []
    for shown in masks:
        canvas[shown] = pixels[shown]
        out.append(Image.fromarray(canvas.copy()))
    return out


def build(
    instances: str | Path, images: str | Path, out: str | Path, least: int = LEAST, most: int | None = None
) -> int:
    """Write the levels of all chosen images below a folder, in the place of a former build; how many images there are.

    most: only so many. FileNotFoundError for an image that is not there, ValueError where none can be chosen, and for a
    folder with anything else.
    """
    check_output(out, folder=True, mark=MARK)
    chosen = choose(instances, least)[:most]
    if not chosen:
        raise ValueError(f"no image of {instances} has {SEGMENTS} segments, all larger than {least} pixels: {WANTED}")
    folder = Path(images)
    places = [Path(c.file).stem for c in chosen]
    if twice := [c.file for c, place in zip(chosen, places) if places.count(place) > 1]:
        raise ValueError(f"{first_few(twice, 4)} have one name, and an image's folder is called by it: rename them")
    if missing := [c.file for c in chosen if not (folder / c.file).is_file()]:
        some = f"{len(missing)} of {len(chosen)} images are not in {folder}, such as {missing[0]}"
        raise FileNotFoundError(f"{some}: {WANTED}")
    with replacing_folder(Path(out)) as place:
        for one in chosen:
            source = folder / one.file
            image = open_image(source)
            if (image.height, image.width) != one.size:
                raise ValueError(
                    f"{source} is {image.width} x {image.height} and {one.size[1]} x {one.size[0]} in"
                    f" {instances}: {WANTED}"
                )
            try:
                pictures = levels_of(image, [mask_of(s, one.size) for s in one.segments])
            except ValueError as error:
                raise ValueError(f"{instances}: {one.file}: {error}") from error
            (place / source.stem).mkdir()
            for level, picture in enumerate(pictures):
                picture.save(place / source.stem / f"level{level}.png")
            shutil.copyfile(source, place / source.stem / f"level{len(pictures)}{source.suffix}")
        (place / MARK).write_text(json.dumps({"images": len(chosen), "levels": SEGMENTS + 1, "least": least}))
    return len(chosen)


def read_levels(folder: str | Path) -> list[list[Path]]:
    """The files of each image of a folder that `build` wrote, level 0 first; all have the same number of levels.

    ValueError for a folder that holds none.
    """
    found = [
        sorted(place.glob("level*"), key=lambda path: int(path.stem.removeprefix("level")))
        for place in sorted(Path(folder).glob("*"))
        if place.is_dir()
    ]
    found = [files for files in found if files]
    if not found or len({len(files) for files in found}) > 1:
        raise ValueError(
            f"{folder} holds no images at levels, or not as many of each: write it with prolip"
            " hierarchy hierarimgs --instances FILE --images FOLDER --output FOLDER"
        )
    return found
