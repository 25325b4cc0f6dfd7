"""Boxes as torchvision draws them, pixels as Pillow makes them."""

from pathlib import Path
from random import Random

import numpy as np
import pytest
import sklearn.datasets
import torch
from PIL import Image
from scipy.stats import ks_2samp
from tiny_tars import saved
from torchvision.transforms import InterpolationMode, RandomResizedCrop
from torchvision.transforms.functional import pil_to_tensor, resized_crop

from prolip.data.augment import crops
from prolip.data.augment.crops import RATIO, RandomCrop, draw_box
from prolip.data.images import decode_image

IMAGES = Path(sklearn.datasets.__file__).parent / "images"
PHOTOS = [(IMAGES / name).read_bytes() for name in ("china.jpg", "flower.jpg")]


def jpeg(width, height, seed=0):
    """Hard edges and noise: what overshoots most."""
    rng = np.random.default_rng(seed)
    blocks = np.kron(rng.integers(0, 2, (height // 7 + 1, width // 5 + 1, 3)) * 255, np.ones((7, 5, 1)))
    pixels = blocks[:height, :width] + rng.normal(scale=20, size=(height, width, 3))
    return saved(Image.fromarray(pixels.clip(0, 255).astype(np.uint8)), quality=90)


def pillow(image, box, size):
    """Return OpenCLIP's crop of a box."""
    return pil_to_tensor(resized_crop(image, *box, list(size), InterpolationMode.BICUBIC)).short()


@pytest.mark.parametrize(
    "height, width, scale",
    [(512, 512, (0.8, 1.0)), (480, 640, (0.1, 1.0)), (90, 31, (0.5, 1.0))],
)
def test_boxes_are_distributed_as_torchvisions(height, width, scale):
    torch.manual_seed(0)
    outline, rng = torch.empty(1).expand(3, height, width), Random(0)
    want = np.array([RandomResizedCrop.get_params(outline, list(scale), list(RATIO)) for _ in range(2000)], float)
    got = np.array([draw_box(height, width, scale, rng) for _ in range(2000)], float)
    assert (got >= 0).all() and (got[:, 2:] >= 1).all()
    assert (got[:, 0] + got[:, 2] <= height).all() and (got[:, 1] + got[:, 3] <= width).all()
    # the marginals, and what would differ if edges were drawn in another dependence: area, shape, middle
    for facts in (want, got):
        facts[:, 0] += facts[:, 2] / 2
        facts[:, 1] += facts[:, 3] / 2
    columns = [*range(4), lambda boxes: boxes[:, 2] * boxes[:, 3], lambda boxes: boxes[:, 2] / boxes[:, 3]]
    for column in columns:
        pair = [column(boxes) if callable(column) else boxes[:, column] for boxes in (want, got)]
        assert ks_2samp(*pair).pvalue > 1e-3, column


@pytest.mark.parametrize("height, width", [(20, 100), (100, 20), (1, 50), (50, 1), (1, 1)])
def test_images_too_long_for_any_box_give_torchvisions_middle(height, width):
    outline = torch.empty(1).expand(3, height, width)
    want = RandomResizedCrop.get_params(outline, [0.95, 1.0], list(RATIO))
    assert draw_box(height, width, (0.95, 1.0), Random(0)) == tuple(want)


CASES = [(0.8, PHOTOS[0]), (0.8, PHOTOS[1]), (0.8, jpeg(1024, 768)), (0.3, PHOTOS[0]), (0.3, jpeg(30, 200))]


@pytest.mark.parametrize("low, data", CASES)
@pytest.mark.parametrize("size", [(224, 224), (64, 48)])
def test_pixels_are_those_of_pillow_but_for_a_level_here_and_there(size, low, data):
    image, ours = decode_image(data), RandomCrop(size, (low, 1.0))
    for seed in range(3):
        got = ours.from_file(data, Random(seed))
        assert got.dtype == torch.uint8 and got.shape == (3, *size) and got.is_contiguous()
        box, factor = ours.draw(image.height, image.width, Random(seed))
        off = (got.short() - pillow(image, box, size)).abs()
        assert factor == 1 and off.float().mean() < 0.02
        # small or enlarged boxes: what is a level off after the rows may be two after the columns
        assert off.max() <= (1 if low == 0.8 else 2) and off.gt(1).float().mean() < 1e-4


def test_tall_boxes_are_shrunk_in_pillows_order(monkeypatch):
    data = jpeg(240, 500, seed=3)
    image, ours = decode_image(data), RandomCrop((200, 200), (0.9, 1.0))
    box, _ = ours.draw(image.height, image.width, Random(1))
    want = pillow(image, box, (200, 200))
    assert (ours.from_file(data, Random(1)).short() - want).abs().max() <= 1
    monkeypatch.setattr(crops, "PILLOW", 12 if crops.PILLOW >= 13 else 13)
    assert (ours.from_file(data, Random(1)).short() - want).abs().max() > 3


def test_scaled_decoding_is_close_and_off_by_default():
    assert not RandomCrop((64, 64)).dct_scaled
    for data in PHOTOS:  # 640 x 427
        image = decode_image(data)
        for size, want in (((64, 64), 4), ((120, 120), 2), ((224, 224), 1)):
            scaled = RandomCrop(size, (0.8, 1.0), dct_scaled=True)
            for seed in range(4):
                box, factor = scaled.draw(image.height, image.width, Random(seed))
                assert factor == want
                off = (scaled.from_file(data, Random(seed)).short() - pillow(image, box, size)).abs().float()
                assert 10 * torch.log10(255**2 / off.square().mean().clamp(min=1e-9)) > 32
                if factor == 1:
                    assert off.max() <= 1


def test_boxes_of_scaled_files_fall_on_whole_pixels_and_move_by_less_than_one():
    plain, scaled = (RandomCrop((16, 16), (0.2, 1.0), dct_scaled=flag) for flag in (False, True))
    factors = set()
    for seed in range(300):
        height, width = Random(seed).randrange(64, 400), Random(seed + 1000).randrange(64, 400)
        box, _ = plain.draw(height, width, Random(seed))
        (top, left, rows, columns), factor = scaled.draw(height, width, Random(seed))
        factors.add(factor)
        assert top % factor == left % factor == 0
        assert (top + rows) % factor == 0 or top + rows == height
        assert (left + columns) % factor == 0 or left + columns == width
        moved = np.subtract((top, left, top + rows, left + columns), (*box[:2], box[0] + box[2], box[1] + box[3]))
        assert np.abs(moved).max() <= factor / 2
    assert factors >= {2, 4, 8}
