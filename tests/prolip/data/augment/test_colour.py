"""Colours changed on the device, against torchvision image by image, and the distribution of OpenCLIP's transform."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.stats import chisquare, ks_2samp
from torchvision.transforms import ColorJitter
from torchvision.transforms import functional as TF

from prolip.data.augment.colour import DRAWS, ColourConfig, ColourJitter, ColourPlan, draw_plan, recolour, turn_hue
from prolip.data.augment.colour import split_augmentation as split
from prolip.data.augment.crops import RandomCrop
from prolip.random import Draws

MEAN, STD = (0.48, 0.45, 0.40), (0.26, 0.26, 0.27)
PAPER = ColourConfig(jitter=(0.32, 0.32, 0.32, 0.08), jitter_prob=0.8, greyscale_prob=0.2)
STRONG = ColourConfig(jitter=(1.5, 1.5, 1.5, 0.5), jitter_prob=0.9, greyscale_prob=0.3)
CHANGES = (TF.adjust_brightness, TF.adjust_contrast, TF.adjust_saturation, TF.adjust_hue)
#: OpenCLIP's settings of PAPER.
AUG_CFG = {"scale": (0.8, 1.0), "color_jitter": PAPER.jitter, "color_jitter_prob": 0.8, "gray_scale_prob": 0.2}


def pictures(count=48, size=24):
    """Noise, with grey, black, white and pure colours among it: the corners of HSV."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, 3, size, size), generator=generator, dtype=torch.uint8)
    images[:, :, :3] = images[:, :1, :3]
    images[:, :, 3], images[:, :, 4] = 0, 255
    images[:, :, 5:8] = (images[:, :, 5:8] > 127) * 255
    return images


def noise(count, seed=1):
    return torch.rand(count, DRAWS, generator=torch.Generator().manual_seed(seed))


def one_by_one(images, plan):
    """The plan carried out by torchvision's functions."""
    out = []
    for row, image in enumerate(images):
        x = image.float() / 255
        for change in plan.order[row].tolist() if plan.jittered[row] else ():
            x = CHANGES[change](x, plan.factors[row, change].item())
        out.append(TF.rgb_to_grayscale(x, 3) if plan.greyed[row] else x)
    return torch.stack(out)


@pytest.mark.parametrize("config", [PAPER, STRONG])
def test_every_image_comes_out_as_from_torchvisions_functions(config):
    images = pictures()
    plan = draw_plan(noise(len(images)), config)
    assert plan.jittered.any() and not plan.jittered.all() and plan.greyed.any()
    torch.testing.assert_close(recolour(images, plan), one_by_one(images, plan), rtol=0, atol=2e-5)


def test_all_24_orders_are_kept_and_batches_of_one_kind_leave_no_group_out():
    def check(orders, jittered, greyed):
        images = pictures(1).expand(len(orders), -1, -1, -1)
        factors = torch.tensor([1.4, 0.6, 1.5, 0.2]).expand(len(orders), -1)
        plan = ColourPlan(factors, orders, *(torch.full((len(orders),), flag) for flag in (jittered, greyed)))
        out = recolour(images, plan)
        torch.testing.assert_close(out, one_by_one(images, plan), rtol=0, atol=2e-5)
        return len({tuple(image.flatten().tolist()) for image in out})

    every = torch.tensor(list(itertools.permutations(range(4))))
    assert check(every, True, False) > 12  # the order does matter here
    for order in ((3, 0, 1, 2), (0, 3, 1, 2), (0, 1, 3, 2), (0, 1, 2, 3)):
        for jittered, greyed in ((False, False), (False, True), (True, True)):
            assert check(torch.tensor([order] * 3), jittered, greyed) == 1


@pytest.mark.parametrize("turn", [-0.5, -0.31, 0.0, 0.08, 1 / 3, 0.5])
def test_hue_is_turned_as_in_hsv_for_all_colours(turn):
    grid = torch.stack(torch.meshgrid(*[torch.linspace(0, 1, 21)] * 3, indexing="ij")).reshape(1, 3, 21, -1)
    torch.testing.assert_close(turn_hue(grid, torch.tensor([turn])), TF.adjust_hue(grid, turn), rtol=0, atol=2e-5)


def test_factors_and_orders_are_distributed_as_torchvisions():
    count = 4000
    plan = draw_plan(noise(count), PAPER)
    torch.manual_seed(0)
    jitter = ColorJitter(*PAPER.jitter)
    ranges = (jitter.brightness, jitter.contrast, jitter.saturation, jitter.hue)
    drawn = np.array([ColorJitter.get_params(*ranges)[1:] for _ in range(count)])
    for change in range(4):
        assert ks_2samp(plan.factors[:, change].numpy(), drawn[:, change]).pvalue > 1e-3
    _, counts = np.unique(plan.order.numpy(), axis=0, return_counts=True)
    assert len(counts) == 24 and chisquare(counts).pvalue > 1e-3
    for got, want in ((plan.jittered, 0.8), (plan.greyed, 0.2)):
        assert abs(got.float().mean().item() - want) < 4 * math.sqrt(want * (1 - want) / count)
    facts = torch.cat([plan.factors, plan.order[:, :1], plan.jittered[:, None], plan.greyed[:, None]], 1).double()
    between = torch.corrcoef(facts.T) - torch.eye(7)
    assert between.abs().max() < 4.5 / math.sqrt(count)  # independent of each other


def test_the_module_normalises_what_the_plan_of_its_step_makes():
    images = pictures(16)
    augment, before = ColourJitter(PAPER, MEAN, STD, draws=Draws(seed=5)), images.clone()
    plan = draw_plan(augment.noise(images, DRAWS, 7, "cpu"), PAPER)
    out = augment(images, step=7)
    torch.testing.assert_close(out, TF.normalize(one_by_one(images, plan), MEAN, STD), rtol=0, atol=3e-5)
    assert torch.equal(images, before) and torch.equal(out, augment(images, step=7))
    for rank in range(3):
        draws = Draws(seed=5, rank=rank, world_size=3)
        part = ColourJitter(PAPER, MEAN, STD, draws=draws)(images[rank::3], step=7)
        rows = torch.arange(16)[rank::3]
        torch.testing.assert_close(part, out[rows], rtol=0, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_makes_the_same_images_and_the_host_never_waits():
    images = pictures(64)
    want = ColourJitter(PAPER, MEAN, STD, draws=Draws(seed=5))(images, step=7)
    augment, there = ColourJitter(PAPER, MEAN, STD, draws=Draws(seed=5)).cuda(), images.cuda()
    augment(there, step=0)  # makes the constants
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = augment(there, step=7)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(out.cpu(), want, rtol=0, atol=5e-5)


# --- OpenCLIP's settings, shared out to the host and the device ------------------------------------------------------
def test_settings_are_shared_out_as_openclip_means_them():
    saved = {name: list(value) if isinstance(value, tuple) else value for name, value in AUG_CFG.items()}
    assert split(AUG_CFG, 224) == (RandomCrop((224, 224), (0.8, 1.0), dct_scaled=False), PAPER)
    assert split(saved, (128, 256), dct_scaled=True) == (RandomCrop((128, 256), (0.8, 1.0), dct_scaled=True), PAPER)
    assert split({}, 32) == (RandomCrop((32, 32), (0.9, 1.0)), ColourConfig())
    assert not split({"color_jitter": 0.4}, 32)[1].changes  # without its probability
    assert split({"use_timm": True, "color_jitter": 0.4}, 32) is None
    for jitter in (0.4, (0.4, 0.4, 0.4)):
        with pytest.raises(ValueError, match="give four numbers"):
            split({"color_jitter": jitter, "color_jitter_prob": 0.5}, 32)
    with pytest.raises(TypeError, match="blur"):
        split({"blur": 1}, 32)
