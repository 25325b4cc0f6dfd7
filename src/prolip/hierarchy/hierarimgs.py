"""HierarImgs, ProLIP B.3: FOLDER/ID/level0.png to level2.png, segments pasted one by one, and the original image."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from pycocotools import mask

from prolip.data.images import open_image
from prolip.hierarchy import LEAST
from prolip.utils.documents import loads, shown
from prolip.utils.messages import first_few
from prolip.utils.outputs import check_output, replacing_folder

#: Segments to paste.
SEGMENTS = 3
#: The file that marks a folder as a build.
MARK = "hierarimgs.json"
BLANK = (255, 255, 255)
WANTED = "give COCO's annotations/instances_val2017.json and the folder of its images, val2017"


class Segmented(NamedTuple):
    """An image and the segmentations of its largest segments, largest first."""

    file: str
    size: tuple[int, int]  # (height, width)
    segments: tuple[Any, ...]


def choose(instances: str | Path, least: int = LEAST, segments: int = SEGMENTS) -> list[Segmented]:
    """Return the images with at least `segments` segments, all larger than `least` pixels (COCO's `area`)."""
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
            file, *size = (images[key][name] for name in ("file_name", "height", "width"))
            if not isinstance(file, str):
                raise TypeError(f"file_name {file!r} is not a text")
            found.append(Segmented(file, (size[0], size[1]), tuple(a["segmentation"] for a in largest)))
    except (ValueError, KeyError, TypeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} is not a file of COCO's instances ({what}): {WANTED}") from error
    return sorted(found, key=lambda one: one.file)


def mask_of(segmentation: Any, size: tuple[int, int]) -> np.ndarray:
    """Decode COCO polygons or run lengths {"counts", "size"} as pixels, (H, W) bool. ValueError for others."""
    height, width = size
    if isinstance(segmentation, Mapping) and "counts" in segmentation:
        counts, given = segmentation["counts"], list(segmentation.get("size", size))
        encoded = {"counts": counts, "size": [height, width]}
        if isinstance(counts, str):
            fits = mask.encode(mask.decode(encoded))["counts"] == counts.encode()  # pycocotools accepts too few pixels
        else:
            runs = np.array(counts)
            fits = runs.dtype.kind in "iu" and runs.min() >= 0 and runs.sum() == height * width
        if not fits or given != encoded["size"]:
            raise ValueError(f"run lengths {shown(counts)} of size {given} do not cover an image of {encoded['size']}")
        encoded = encoded if isinstance(counts, str) else mask.frPyObjects(encoded, height, width)
    elif isinstance(segmentation, list) and segmentation:
        polygons = [np.array(one) for one in segmentation]
        for x in polygons:  # pycocotools writes beyond its memory for points far from the image
            fits = x.ndim == 1 and x.dtype.kind in "iuf" and len(x) > 5 and len(x) % 2 == 0
            if not fits or not (np.abs(x) <= 2 * max(size)).all():
                wanted = "a list [x0, y0, ...] of three points or more near the image"
                raise ValueError(f"a polygon must be {wanted}, got {shown(x.tolist())}")
        encoded = mask.merge(mask.frPyObjects([x.astype(float).tolist() for x in polygons], height, width))
    else:
        raise ValueError(f"a segmentation must be a list of polygons or run lengths, got {type(segmentation).__name__}")
    return mask.decode(encoded).astype(bool)


def build(
    instances: str | Path, images: str | Path, out: str | Path, least: int = LEAST, most: int | None = None
) -> int:
    """Write the levels of at most `most` chosen images over a former build; return their number."""
    check_output(out, folder=True, mark=MARK)
    chosen = choose(instances, least)[:most]
    if not chosen:
        raise ValueError(f"no image of {instances} has {SEGMENTS} segments, all larger than {least} pixels: {WANTED}")
    folder = Path(images)
    places = [Path(c.file).stem for c in chosen]
    if twice := [c.file for c, place in zip(chosen, places) if places.count(place) > 1]:
        raise ValueError(f"{first_few(twice, 4)} have the same name, which names the folder of an image: rename them")
    if missing := [c.file for c in chosen if not (folder / c.file).is_file()]:
        some = f"{len(missing)} of {len(chosen)} images are not in {folder}, such as {missing[0]}"
        raise FileNotFoundError(f"{some}: {WANTED}")
    with replacing_folder(Path(out)) as place:
        for one in chosen:
            source = folder / one.file
            image = open_image(source)
            if (image.height, image.width) != one.size:
                sizes = f"{image.width} x {image.height} and {one.size[1]} x {one.size[0]} in {instances}"
                raise ValueError(f"{source} is {sizes}: {WANTED}")
            (place / source.stem).mkdir()
            pixels = np.asarray(image)
            canvas = np.full_like(pixels, BLANK)
            for level, segmentation in enumerate(one.segments):
                try:
                    segment = mask_of(segmentation, one.size)
                except ValueError as error:
                    raise ValueError(f"{instances}: {one.file}: {error}") from error
                canvas[segment] = pixels[segment]
                Image.fromarray(canvas).save(place / source.stem / f"level{level}.png")
            shutil.copyfile(source, place / source.stem / f"level{len(one.segments)}{source.suffix}")
        (place / MARK).write_text(json.dumps({"images": len(chosen), "levels": SEGMENTS + 1, "least": least}))
    return len(chosen)


def read_levels(folder: str | Path) -> list[list[Path]]:
    """Return the files of each image in a folder of `build`, level 0 first. ValueError for another folder."""
    places = (place for place in sorted(Path(folder).glob("*")) if place.is_dir())
    found = [sorted(place.glob("level*"), key=lambda path: int(path.stem[5:])) for place in places]
    found = [files for files in found if files]
    if len({len(files) for files in found}) != 1:
        again = "write it with prolip hierarchy hierarimgs --instances FILE --images FOLDER --output FOLDER"
        raise ValueError(f"{folder} has no images at levels, or unequal numbers of levels: {again}")
    return found
