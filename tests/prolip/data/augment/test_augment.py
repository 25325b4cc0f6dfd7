"""Augmentation on the device against plain operations, one property at a time."""

import colorsys
import math

import pytest
import torch
from torchvision.transforms.v2 import functional as TF

from prolip.data.augment import affine
from prolip.data.augment.affine import PARAMETERS, AugmentConfig, DeviceAugment, affine_matrices, recolour
from prolip.data.augment.colour import ColourConfig, ColourJitter
from prolip.random import Draws

MEAN, STD = (0.48, 0.45, 0.40), (0.26, 0.26, 0.27)
KINDS = pytest.mark.parametrize("kind", [DeviceAugment, ColourJitter])


@pytest.fixture
def images():
    return torch.randint(0, 256, (6, 3, 16, 16), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def augmented(images, step=0, kind=DeviceAugment, holes=None, mean=MEAN, std=STD, draws=None, **settings):
    """Images after the transform of a kind, with squares and rectangles of these settings."""
    config = AugmentConfig(**settings) if kind is DeviceAugment else ColourConfig(**settings)
    transform = kind(config, mean, std, draws=Draws(**draws or {}))
    transform.cutout = AugmentConfig(**holes or {})
    return transform(images, step)


def draws(rows=6, **values):
    """Every uniform number at 0.5 (no change), some set otherwise."""
    return {name: torch.full((rows,), values.get(name, 0.5)) for name in PARAMETERS}


def near(found, share, count):
    return abs(found - share) < 4 * math.sqrt(share * (1 - share) / count)


@KINDS
def test_default_config_only_normalises_uint8_images(images, kind):
    want = TF.normalize(TF.to_dtype(images, torch.float32, scale=True), MEAN, STD)
    torch.testing.assert_close(augmented(images, 3, kind), want)
    with pytest.raises(TypeError, match="uint8 images, got torch.float32"):
        augmented(images.float(), kind=kind)


def test_a_quarter_turn_is_exact_shrinking_fills_the_border_and_stretch_keeps_the_area(images):
    x = images.float() / 255
    turned = affine.warp(x, affine_matrices(draws(rotate=1.0), AugmentConfig(rotate=90.0)), fill=1.0)
    assert any(torch.allclose(turned, torch.rot90(x, k, (2, 3)), atol=1e-5) for k in (1, 3))
    matrices = affine_matrices(draws(1, zoom=0.0), AugmentConfig(zoom=(0.5, 0.5)))
    out = affine.warp(torch.zeros(1, 3, 8, 8), matrices, fill=1.0)
    assert out[0, :, 2:6, 2:6].eq(0).all()
    assert out[0, :, 0].eq(1).all() and out[0, :, :, -1].eq(1).all()
    generator = torch.Generator().manual_seed(1)
    noise = {name: torch.rand(50, generator=generator) for name in PARAMETERS}
    config = AugmentConfig(aspect=0.4, zoom=(0.8, 1.2), rotate=30)
    zoom = 0.8 + 0.4 * noise["zoom"].double()
    torch.testing.assert_close(affine_matrices(noise, config)[:, :, :2].double().det(), zoom**-2, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", ["brightness", "contrast", "saturation"])
def test_each_colour_factor_equals_torchvision(images, name):
    x, adjust = images.float() / 255, getattr(TF, f"adjust_{name}")
    for uniform, factor in ((0.0, 0.6), (1.0, 1.4)):
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


def test_greyscale_jitter_and_cutout_hit_their_share_of_the_images():
    images = torch.randint(0, 256, (2000, 3, 8, 8), generator=torch.Generator().manual_seed(2), dtype=torch.uint8)
    plain, grey = augmented(images), augmented(images, mean=(0, 0, 0), std=(1, 1, 1), greyscale_prob=0.2)
    assert near((grey.amax(1) - grey.amin(1)).amax((1, 2)).lt(1e-5).float().mean().item(), 0.2, 2000)
    bright = augmented(images, brightness=0.5, jitter_prob=0.8)
    assert near(((bright - plain).abs().amax((1, 2, 3)) > 1e-6).float().mean().item(), 0.8, 2000)
    gone = augmented(images, holes={"cutout": 0.25, "cutout_prob": 0.3}).eq(0).all(1)
    assert near(gone.any((1, 2)).float().mean().item(), 0.3, 2000)
    middle = gone.float().mean(0)[2:6, 2:6]
    assert (middle - 0.3 * 4 / 64).abs().max() < 5 * math.sqrt(0.3 * 4 / 64 / 2000)


@KINDS
def test_two_ranks_make_and_cut_the_images_of_one_process(images, kind):
    settings = {"greyscale_prob": 0.3}
    if kind is DeviceAugment:
        settings |= {"rotate": 20, "zoom": (0.7, 1.1), "shift": 0.1, "hue": 0.1, "saturation": 0.5}
    settings |= {"kind": kind, "holes": {"cutout": 0.3, "cutout_prob": 0.7, "erase_prob": 0.6}}
    whole = augmented(images, 7, draws={"seed": 5}, **settings)
    for rank in range(2):
        part = augmented(images[rank::2], 7, draws={"seed": 5, "rank": rank, "world_size": 2}, **settings)
        torch.testing.assert_close(part, whole[rank::2], rtol=0, atol=1e-6)
    for step, seed in ((8, 5), (7, 6)):
        assert not torch.allclose(whole, augmented(images, step, draws={"seed": seed}, **settings))


@pytest.mark.parametrize("size", [(10, 10), (6, 9)])
def test_a_square_lies_around_its_middle_pixel_by_hand(size):
    height, width = size
    side, middles = round(0.5 * min(size)), [(y, x) for y in range(height) for x in range(width)]
    noise = torch.tensor([[0.0, (y + 0.5) / height, (x + 0.5) / width] for y, x in middles])
    for square, (y, x) in zip(affine.squares(noise, AugmentConfig(cutout=0.5), size), middles):
        wanted = torch.zeros(size, dtype=torch.bool)
        top, left = y - side // 2, x - side // 2
        wanted[max(top, 0) : top + side, max(left, 0) : left + side] = True
        assert square[0].equal(wanted)


@KINDS
def test_cut_and_erased_pixels_are_the_mean_and_the_rest_is_as_it_was(images, kind):
    def holes(**settings):
        out = augmented(images, 5, kind, settings)
        gone = out.eq(0).all(1, keepdim=True)
        torch.testing.assert_close(out, augmented(images, 5, kind).masked_fill(gone, 0), rtol=0, atol=0)
        return gone

    cut, erased = holes(cutout=0.3), holes(erase_prob=0.9)
    assert cut.sum((1, 2, 3)).gt(0).all() and cut.sum((1, 2, 3)).le(25).all()
    assert holes(cutout=0.3, erase_prob=0.9).equal(cut | erased) and not cut.equal(erased)


def test_rectangles_have_the_areas_and_ratios_of_random_erasing_and_lie_anywhere_inside():
    noise, (low, high) = torch.rand(4000, 5, generator=torch.Generator().manual_seed(0)), (0.02, 1 / 3)
    found = affine.rectangles(noise, 0.2, (90, 90))[:, 0]
    on = found.any((1, 2))
    assert on.equal(noise[:, 0] < 0.2)
    found = found[on]
    height, width = (found.any(axis).sum(1).double() for axis in (2, 1))
    assert found.sum((1, 2)).equal((height * width).long())  # rectangles, none of them cut off
    area, clipped = height * width / 90**2, (height == 89) | (width == 89)
    assert clipped.float().mean() < 0.02 and low - 0.005 < area.min() and area.max() < high + 0.015
    assert abs(area.mean() - (low + high) / 2) < 5 * (high - low) / math.sqrt(12 * len(area))
    ratio = (height / width).log()[~clipped]
    assert ratio.abs().max() < math.log(1 / 0.3) + 0.1 and abs(ratio.mean()) < 5 * ratio.std() / math.sqrt(len(ratio))
    somewhere = found.any(0)
    assert somewhere[5:-5, 5:-5].all() and all(edge.any() for edge in (*somewhere[[0, -1]], *somewhere.T[[0, -1]]))


def test_impossible_values_are_refused():
    zooms = [{"zoom": (0.0, 1.0)}, {"zoom": (1.2, 1.0)}]
    for wrong in (*zooms, {"text_mask": 0.5, "text_delete": 0.6}, {"hue": 0.7}, {"cutout": 1.5}, {"erase_prob": -0.1}):
        with pytest.raises(ValueError, match="give"):
            AugmentConfig(**wrong)
    three, far = {"jitter": (0.1, 0.1, 0.1)}, {"jitter": (0.1, 0.1, 0.1, 0.6)}
    for wrong in (three, far, {"jitter": (-0.1, 0.1, 0.1, 0.1)}, {"jitter_prob": 1.1}, {"greyscale_prob": -0.1}):
        with pytest.raises(ValueError, match="give"):
            ColourConfig(**wrong)
