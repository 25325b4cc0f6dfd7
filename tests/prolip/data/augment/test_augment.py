"""Augmentation on the device against plain operations, one property at a time."""

import colorsys
import math

import pytest
import torch
from torchvision.transforms.v2 import functional as TF

from prolip.data.augment.affine import (
    PARAMETERS,
    AugmentConfig,
    Cutout,
    DeviceAugment,
    affine_matrices,
    recolour,
    rectangles,
    squares,
    warp,
)
from prolip.data.augment.colour import ColourConfig, ColourJitter
from prolip.random import Draws

MEAN, STD = (0.48, 0.45, 0.40), (0.26, 0.26, 0.27)


@pytest.fixture
def images():
    return torch.randint(0, 256, (6, 3, 16, 16), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def draws(rows=6, **values):
    """Every uniform number at 0.5 (no change), some set otherwise."""
    return {name: torch.full((rows,), values.get(name, 0.5)) for name in PARAMETERS}


def test_default_config_only_normalises(images):
    out = DeviceAugment(AugmentConfig(), MEAN, STD)(images, step=3)
    want = TF.normalize(TF.to_dtype(images, torch.float32, scale=True), MEAN, STD)
    torch.testing.assert_close(out, want)


def test_quarter_turn_is_an_exact_rotation(images):
    x = images.float() / 255
    matrices = affine_matrices(draws(rotate=1.0), AugmentConfig(rotate=90.0))
    turned = warp(x, matrices, fill=1.0)
    assert any(torch.allclose(turned, torch.rot90(x, k, (2, 3)), atol=1e-5) for k in (1, 3))


def test_shrinking_by_two_averages_the_middle_and_fills_the_border():
    x = torch.zeros(1, 3, 8, 8)
    out = warp(x, affine_matrices(draws(1, zoom=0.0), AugmentConfig(zoom=(0.5, 0.5))), fill=1.0)
    assert out[0, :, 2:6, 2:6].eq(0).all()
    assert out[0, :, 0].eq(1).all() and out[0, :, :, -1].eq(1).all()


def test_stretch_keeps_the_area():
    config = AugmentConfig(aspect=0.4, zoom=(0.8, 1.2), rotate=30)
    generator = torch.Generator().manual_seed(1)
    noise = {name: torch.rand(50, generator=generator) for name in PARAMETERS}
    areas = affine_matrices(noise, config)[:, :, :2].double().det()
    zoom = 0.8 + 0.4 * noise["zoom"].double()
    torch.testing.assert_close(areas, zoom**-2, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    "name, adjust",
    [("brightness", TF.adjust_brightness), ("contrast", TF.adjust_contrast), ("saturation", TF.adjust_saturation)],
)
@pytest.mark.parametrize("uniform, factor", [(0.0, 0.6), (1.0, 1.4)])
def test_each_colour_factor_equals_torchvision(images, name, adjust, uniform, factor):
    x = images.float() / 255
    out = recolour(x, draws(**{name: uniform}), AugmentConfig(**{name: 0.4}))
    # torchvision's luma weights differ in the fourth digit
    torch.testing.assert_close(out, adjust(x, factor), atol=2e-3, rtol=0)


def test_hue_turns_the_colour_and_keeps_the_luma():
    x = torch.tensor([0.6, 0.3, 0.3]).view(1, 3, 1, 1).expand(1, 3, 4, 4)
    out = recolour(x, draws(1, hue=1.0), AugmentConfig(hue=1 / 3))
    luma = torch.tensor([0.299, 0.587, 0.114])
    torch.testing.assert_close(out[0, :, 0, 0] @ luma, x[0, :, 0, 0] @ luma, atol=1e-5, rtol=0)
    hue, *_ = colorsys.rgb_to_hsv(*out[0, :, 0, 0].tolist())
    assert min(hue, 1 - hue) > 0.2  # red went a long way round


def test_greyscale_and_jitter_hit_their_share_of_the_images():
    images = torch.randint(0, 256, (2000, 3, 2, 2), generator=torch.Generator().manual_seed(2), dtype=torch.uint8)
    plain = DeviceAugment(AugmentConfig(), MEAN, STD)(images, 0)
    grey = DeviceAugment(AugmentConfig(greyscale_prob=0.2), (0, 0, 0), (1, 1, 1))(images, 0)
    is_grey = (grey.amax(1) - grey.amin(1)).amax((1, 2)) < 1e-5
    assert abs(is_grey.float().mean().item() - 0.2) < 4 * math.sqrt(0.2 * 0.8 / 2000)
    bright = DeviceAugment(AugmentConfig(brightness=0.5, jitter_prob=0.8), MEAN, STD)(images, 0)
    changed = (bright - plain).abs().amax((1, 2, 3)) > 1e-6
    assert abs(changed.float().mean().item() - 0.8) < 4 * math.sqrt(0.2 * 0.8 / 2000)


def test_two_ranks_make_the_images_of_one_process(images):
    config = AugmentConfig(rotate=20, zoom=(0.7, 1.1), shift=0.1, hue=0.1, saturation=0.5, greyscale_prob=0.3)
    whole = DeviceAugment(config, MEAN, STD, draws=Draws(seed=5))(images, step=7)
    for rank in range(2):
        part = DeviceAugment(config, MEAN, STD, draws=Draws(seed=5, rank=rank, world_size=2))(images[rank::2], step=7)
        torch.testing.assert_close(part, whole[rank::2], rtol=0, atol=1e-6)
    assert not torch.allclose(whole, DeviceAugment(config, MEAN, STD, draws=Draws(seed=5))(images, step=8))
    assert not torch.allclose(whole, DeviceAugment(config, MEAN, STD, draws=Draws(seed=6))(images, step=7))


def test_float_images_are_refused(images):
    with pytest.raises(TypeError, match="uint8 images, got torch.float32"):
        DeviceAugment(AugmentConfig(), MEAN, STD)(images.float(), 0)


def cut(kind, images, cutout, step=0, **settings):
    transform = kind(AugmentConfig() if kind is DeviceAugment else ColourConfig(), MEAN, STD, draws=Draws(**settings))
    transform.cutout = cutout
    return transform(images, step)


@pytest.mark.parametrize("size", [(10, 10), (6, 9)])
def test_a_square_lies_around_its_middle_pixel_by_hand(size):
    height, width = size
    side, middles = round(0.5 * min(size)), [(y, x) for y in range(height) for x in range(width)]
    noise = torch.tensor([[0.0, (y + 0.5) / height, (x + 0.5) / width] for y, x in middles])
    found = squares(noise, Cutout(0.5), size)
    for square, (y, x) in zip(found, middles):
        wanted = torch.zeros(size, dtype=torch.bool)
        top, left = y - side // 2, x - side // 2
        wanted[max(top, 0) : top + side, max(left, 0) : left + side] = True
        assert square[0].equal(wanted)


@pytest.mark.parametrize("kind", [DeviceAugment, ColourJitter])
def test_cut_pixels_are_the_mean_and_the_rest_is_as_it_was(images, kind):
    plain, out = cut(kind, images, Cutout()), cut(kind, images, Cutout(0.4))
    gone = out.eq(0).all(1, keepdim=True)
    assert gone.sum((1, 2, 3)).gt(0).all() and gone.sum((1, 2, 3)).le(36).all()
    torch.testing.assert_close(out, plain.masked_fill(gone, 0), rtol=0, atol=0)


def test_cutout_hits_its_share_of_the_images_everywhere():
    images = torch.full((4000, 3, 8, 8), 200, dtype=torch.uint8)
    gone = cut(DeviceAugment, images, Cutout(0.25, 0.3)).eq(0).all(1)
    assert abs(gone.any((1, 2)).float().mean().item() - 0.3) < 4 * math.sqrt(0.3 * 0.7 / 4000)
    middle = gone.float().mean(0)[2:6, 2:6]
    assert (middle - 0.3 * 4 / 64).abs().max() < 5 * math.sqrt(0.3 * 4 / 64 / 4000)


@pytest.mark.parametrize("kind", [DeviceAugment, ColourJitter])
def test_two_ranks_cut_what_one_process_cuts(images, kind):
    whole = cut(kind, images, Cutout(0.5, 0.7), step=5, seed=2)
    for rank in range(2):
        part = cut(kind, images[rank::2], Cutout(0.5, 0.7), step=5, seed=2, rank=rank, world_size=2)
        torch.testing.assert_close(part, whole[rank::2], rtol=0, atol=1e-6)
    assert not torch.allclose(whole, cut(kind, images, Cutout(0.5, 0.7), step=6, seed=2))


def test_rectangles_have_the_areas_and_ratios_of_random_erasing_and_lie_anywhere_inside():
    rows, size, (low, high) = 4000, (90, 90), (0.02, 1 / 3)
    noise = torch.rand(rows, 5, generator=torch.Generator().manual_seed(0))
    found = rectangles(noise, 0.2, size)[:, 0]
    on = found.any((1, 2))
    assert on.equal(noise[:, 0] < 0.2)
    found = found[on]
    height, width = (found.any(axis).sum(1).double() for axis in (2, 1))
    assert found.sum((1, 2)).equal((height * width).long())  # rectangles, none of them cut off
    area = height * width / 90**2
    clipped = (height == 89) | (width == 89)
    assert clipped.float().mean() < 0.02 and low - 0.005 < area.min() and area.max() < high + 0.015
    assert abs(area.mean() - (low + high) / 2) < 5 * (high - low) / math.sqrt(12 * len(area))
    ratio = (height / width).log()[~clipped]
    assert ratio.abs().max() < math.log(1 / 0.3) + 0.1 and abs(ratio.mean()) < 5 * ratio.std() / math.sqrt(len(ratio))
    somewhere = found.any(0)
    assert somewhere[5:-5, 5:-5].all() and all(edge.any() for edge in (*somewhere[[0, -1]], *somewhere.T[[0, -1]]))


@pytest.mark.parametrize("kind", [DeviceAugment, ColourJitter])
def test_erasing_adds_to_cutout_and_does_not_depend_on_ranks(images, kind):
    whole = cut(kind, images, Cutout(0.3, 1.0, 0.9), step=5, seed=2)
    alone = [cut(kind, images, cutout, step=5, seed=2).eq(0).all(1) for cutout in (Cutout(0.3), Cutout(0, 1.0, 0.9))]
    assert whole.eq(0).all(1).equal(alone[0] | alone[1]) and not alone[0].equal(alone[1])
    for rank in range(2):
        part = cut(kind, images[rank::2], Cutout(0.3, 1.0, 0.9), step=5, seed=2, rank=rank, world_size=2)
        torch.testing.assert_close(part, whole[rank::2], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "wrong",
    [
        {"cutout": 1.5},
        {"text_mask": 0.5, "text_delete": 0.6},
        {"zoom": (0.0, 1.0)},
        {"zoom": (1.2, 1.0)},
        {"hue": 0.7},
        {"greyscale_prob": 2.0},
        {"erase_prob": -0.1},
    ],
)
def test_impossible_values_are_refused(wrong):
    with pytest.raises(ValueError, match="give"):
        AugmentConfig(**wrong)
