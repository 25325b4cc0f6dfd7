"""HierarImgs from a miniature of COCO's instances, with polygons and run lengths."""

import json

import numpy as np
import pytest
from PIL import Image
from pycocotools import mask
from pycocotools.coco import COCO

from prolip.hierarchy.hierarimgs import build, choose, mask_of, read_levels


def box(x0, y0, x1, y1):
    """A polygon that covers the pixels x0 ... x1, y0 ... y1: COCO's lie on the edges of pixels."""
    return [[x0, y0, x1 + 1, y0, x1 + 1, y1 + 1, x0, y1 + 1]]


def runs_of(mask):
    """Run lengths in columns, background first."""
    flat, runs, value, length = mask.T.ravel(), [], False, 0
    for pixel in flat.tolist():
        if pixel != value:
            runs.append(length)
            value, length = pixel, 0
        length += 1
    return [*runs, length]


def polygons(seed):
    """Blobs, stars whose edges cross, and several polygons that overlap or leave the image."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(rng.integers(1, 4)):
        points, turns = rng.integers(3, 20), rng.integers(1, 4)
        angle = np.linspace(0, 2 * np.pi * turns, points, endpoint=False)
        radius = rng.uniform(3, 25) * rng.uniform(0.5, 1.5, points)
        x, y = rng.uniform(0, 60) + radius * np.cos(angle), rng.uniform(0, 40) + radius * np.sin(angle)
        found.append(np.stack([x, y], 1).round(2).ravel().tolist())
    return found


def test_masks_are_those_of_pycocotools():
    for seed in range(30):
        given = polygons(seed)
        api = COCO.__new__(COCO)
        api.imgs = {1: {"height": 40, "width": 60}}
        want = api.annToMask({"image_id": 1, "segmentation": given}).astype(bool)
        assert np.array_equal(mask_of(given, (40, 60)), want)
        crowd = {"counts": runs_of(want), "size": [40, 60]}
        text = mask.frPyObjects(crowd, 40, 60)["counts"]
        for counts in (crowd["counts"], text.decode()):
            assert np.array_equal(mask_of({"counts": counts, "size": [40, 60]}, (40, 60)), want)
        for size in ((40, 59), (41, 60)):
            with pytest.raises(ValueError, match="RLE|do not cover"):
                mask_of({"counts": text.decode(), "size": list(size)}, size)


@pytest.mark.parametrize(
    "segmentation, words",
    [
        ([], "list of polygons"),
        ("x", "list of polygons"),
        ({"counts": "P"}, "RLE"),
        ({"counts": "\x7f"}, "RLE"),
        *(([one], "a polygon must be a list") for one in (1, "123456", [1, 2, 3, 4], [1, 2, 3, 4, 5, None])),
        *(([[1, 2, far, 4, 5, 6]], "three points or more near") for far in (float("nan"), 1e9)),
        *(({"counts": runs}, "do not cover an image of") for runs in ([3, 4], [3, 9.5], [3, -1, 10], [])),
        ({"counts": [6, 6], "size": [4, 3]}, r"of size \[4, 3\]"),
    ],
)
def test_what_is_no_segmentation_is_refused(segmentation, words):
    with pytest.raises(ValueError, match=words):
        mask_of(segmentation, (3, 4))


def annotation(image, area, segmentation):
    return {"image_id": image, "area": area, "segmentation": segmentation}


@pytest.fixture
def coco(tmp_path):
    """Image 1 is kept; 2 has a small segment, 3 has two segments alone, 4 has none."""
    folder = tmp_path / "val2017"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for i in range(1, 5):
        Image.fromarray(rng.integers(0, 200, (100, 120, 3), dtype=np.uint8)).save(folder / f"{i:012d}.png")
    ring = np.zeros((100, 120), bool)
    ring[60:, 80:] = True
    whole = [
        annotation(1, 70, box(0, 0, 9, 6)),
        annotation(1, 1600, {"counts": runs_of(ring), "size": [100, 120]}),
        annotation(1, 4000, box(0, 20, 79, 69)),
        annotation(1, 60, box(30, 0, 34, 11)),
    ]
    small = [annotation(2, area, box(0, 0, 20, 20)) for area in (400, 50, 400)]
    content = {
        "images": [{"id": i, "file_name": f"{i:012d}.png", "height": 100, "width": 120} for i in range(1, 5)],
        "annotations": [*whole, *small, annotation(3, 400, box(0, 0, 9, 9)), annotation(3, 400, box(0, 0, 9, 9))],
    }
    (tmp_path / "instances.json").write_text(json.dumps(content))
    return tmp_path


def test_images_whose_smallest_segment_is_large_enough_give_their_three_largest(coco):
    (one,) = choose(coco / "instances.json", least=50)
    assert one.file == "000000000001.png" and one.size == (100, 120)
    assert one.segments[0] == box(0, 20, 79, 69) and isinstance(one.segments[1], dict)
    assert one.segments[2] == box(0, 0, 9, 6)
    assert choose(coco / "instances.json", least=60) == []
    assert len(choose(coco / "instances.json", least=49)) == 2


def test_what_is_built_is_read_ends_in_the_original_and_replaces_a_former_build_alone(coco):
    out = coco / "out"
    assert build(coco / "instances.json", coco / "val2017", out, least=50) == 1
    (files,) = read_levels(out)
    assert [path.name for path in files] == ["level0.png", "level1.png", "level2.png", "level3.png"]
    original = coco / "val2017/000000000001.png"
    assert files[3].read_bytes() == original.read_bytes()
    levels = [np.asarray(Image.open(path)) for path in files]
    shown = [int((level != 255).any(2).sum()) for level in levels]
    assert shown == [80 * 50, 80 * 50 + 40 * 40, 80 * 50 + 40 * 40 + 10 * 7, 100 * 120]
    assert all((a[(a != 255).any(2)] == levels[3][(a != 255).any(2)]).all() for a in levels)
    out = coco / "out"
    assert build(coco / "instances.json", coco / "val2017", out, least=49) == 2
    assert build(coco / "instances.json", coco / "val2017", out, least=50) == 1
    assert len(read_levels(out)) == 1
    with pytest.raises(ValueError, match="val2017 has no hierarimgs.json, so '0000"):
        build(coco / "instances.json", coco / "val2017", coco / "val2017", least=50)
    assert len(list((coco / "val2017").iterdir())) == 4


def test_what_cannot_be_built_is_said_before_anything_is_written(coco):
    out, bad, first = coco / "out", coco / "bad.json", coco / "val2017/000000000001.png"

    def refused(instances, words, error=ValueError, least=49):
        with pytest.raises(error, match=words):
            build(instances, coco / "val2017", out, least=least)

    refused(coco / "none.json", "instances_val2017.json", FileNotFoundError)
    refused(coco / "instances.json", "no image of .* all larger than 5000 pixels", least=5000)
    content = json.loads((coco / "instances.json").read_text())
    for text in ("{", '{"images": []}', '{"images": [], "annotations": [{"image_id": 1}]}'):
        bad.write_text(text)
        refused(bad, "not a file of COCO's instances|no image of")
    content["images"][1]["file_name"] = "a/000000000001.png"
    bad.write_text(json.dumps(content))
    refused(bad, "(000000000001.png, a/000000000001.png) have the same name")
    Image.new("RGB", (5, 5)).save(first)
    refused(coco / "instances.json", "is 5 x 5 and 120 x 100")
    first.unlink()
    refused(coco / "instances.json", "1 of 2 images are not in .* such as 000000000001.png", FileNotFoundError)
    assert not out.exists()
    with pytest.raises(ValueError, match="has no images at levels"):
        read_levels(out)
