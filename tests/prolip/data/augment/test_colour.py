"""Colours changed on the device, against torchvision image by image, and the distribution of OpenCLIP's transform."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.stats import chisquare, ks_2samp
from torchvision.transforms import ColorJitter
from torchvision.transforms import functional as TF

from prolip.data.augment.colour import (
    DRAWS,
    HUE,
    ColourConfig,
    ColourJitter,
    ColourPlan,
    draw_plan,
    recolour,
    turn_hue,
)
from prolip.random import Draws

MEAN, STD = (0.48, 0.45, 0.40), (0.26, 0.26, 0.27)
PAPER = ColourConfig(jitter=(0.32, 0.32, 0.32, 0.08), jitter_prob=0.8, greyscale_prob=0.2)
STRONG = ColourConfig(jitter=(1.5, 1.5, 1.5, 0.5), jitter_prob=0.9, greyscale_prob=0.3)
CHANGES = (TF.adjust_brightness, TF.adjust_contrast, TF.adjust_saturation, TF.adjust_hue)


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
        if plan.jittered[row]:
            for change in plan.order[row].tolist():
                x = CHANGES[change](x, plan.factors[row, change].item())
        out.append(TF.rgb_to_grayscale(x, 3) if plan.greyed[row] else x)
    return torch.stack(out)


@pytest.mark.parametrize("config", [PAPER, STRONG])
def test_every_image_comes_out_as_from_torchvisions_functions(config):
    images = pictures()
    plan = draw_plan(noise(len(images)), config)
    assert plan.jittered.any() and not plan.jittered.all() and plan.greyed.any()
    torch.testing.assert_close(recolour(images, plan), one_by_one(images, plan), rtol=0, atol=2e-5)


def test_all_24_orders_are_kept():
    orders = torch.tensor(list(itertools.permutations(range(4))))
    images = pictures(1).expand(24, -1, -1, -1)
    factors = torch.tensor([1.4, 0.6, 1.5, 0.2]).expand(24, -1)
    plan = ColourPlan(factors, orders, torch.ones(24, dtype=torch.bool), torch.zeros(24, dtype=torch.bool))
    out = recolour(images, plan)
    torch.testing.assert_close(out, one_by_one(images, plan), rtol=0, atol=2e-5)
    assert len({tuple(image.flatten().tolist()) for image in out}) > 12  # the order does matter here


@pytest.mark.parametrize("jittered, greyed", [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize("place", range(4))
def test_batches_of_one_kind_leave_no_group_out(jittered, greyed, place):
    images = pictures(3)
    order = [0, 1, 2]
    order.insert(place, HUE)
    flags = [torch.full((3,), flag) for flag in (jittered, greyed)]
    plan = ColourPlan(torch.tensor([1.2, 0.7, 1.3, -0.1]).expand(3, -1), torch.tensor(order).expand(3, -1), *flags)
    torch.testing.assert_close(recolour(images, plan), one_by_one(images, plan), rtol=0, atol=2e-5)


@pytest.mark.parametrize("turn", [-0.5, -0.31, 0.0, 0.08, 1 / 3, 0.5])
def test_hue_is_turned_as_in_hsv_for_all_colours(turn):
    grid = torch.stack(torch.meshgrid(*[torch.linspace(0, 1, 21)] * 3, indexing="ij")).reshape(1, 3, 21, -1)
    torch.testing.assert_close(turn_hue(grid, torch.tensor([turn])), TF.adjust_hue(grid, turn), rtol=0, atol=2e-5)


def test_factors_and_orders_are_distributed_as_torchvisions():
    count = 4000
    plan = draw_plan(noise(count), PAPER)
    torch.manual_seed(0)
    jitter = ColorJitter(*PAPER.jitter)
    drawn = [
        ColorJitter.get_params(jitter.brightness, jitter.contrast, jitter.saturation, jitter.hue) for _ in range(count)
    ]
    for change in range(4):
        theirs = np.array([factors[change] for _, *factors in drawn])
        assert ks_2samp(plan.factors[:, change].numpy(), theirs).pvalue > 1e-3
    _, counts = np.unique(plan.order.numpy(), axis=0, return_counts=True)
    assert len(counts) == 24 and chisquare(counts).pvalue > 1e-3
    for got, want in ((plan.jittered, 0.8), (plan.greyed, 0.2)):
        assert abs(got.float().mean().item() - want) < 4 * math.sqrt(want * (1 - want) / count)
    facts = torch.cat([plan.factors, plan.order[:, :1], plan.jittered[:, None], plan.greyed[:, None]], 1).double()
    between = torch.corrcoef(facts.T) - torch.eye(7)
    assert between.abs().max() < 4.5 / math.sqrt(count)  # independent of each other


def test_default_config_only_normalises():
    images = pictures(4)
    want = TF.normalize(images.float() / 255, MEAN, STD)
    torch.testing.assert_close(ColourJitter(ColourConfig(), MEAN, STD)(images, step=3), want)
    half = ColourJitter(ColourConfig(), MEAN, STD, dtype=torch.bfloat16)(images, step=3)
    assert half.dtype == torch.bfloat16 and torch.equal(half, want.bfloat16())


def test_the_module_normalises_what_the_plan_of_its_step_makes():
    images = pictures(16)
    augment = ColourJitter(PAPER, MEAN, STD, draws=Draws(seed=5))
    out = augment(images, step=7)
    before = images.clone()
    plan = draw_plan(augment.noise(images, DRAWS, 7, "cpu"), PAPER)
    torch.testing.assert_close(out, TF.normalize(one_by_one(images, plan), MEAN, STD), rtol=0, atol=3e-5)
    assert torch.equal(images, before)
    assert torch.equal(out, augment(images, step=7))
    assert not torch.allclose(out, augment(images, step=8))
    assert not torch.allclose(out, ColourJitter(PAPER, MEAN, STD, draws=Draws(seed=6))(images, step=7))


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_make_the_images_of_one_process(ranks):
    images = pictures(12)
    whole = ColourJitter(PAPER, MEAN, STD, draws=Draws(seed=5))(images, step=7)
    for rank in range(ranks):
        draws = Draws(seed=5, rank=rank, world_size=ranks)
        part = ColourJitter(PAPER, MEAN, STD, draws=draws)(images[rank::ranks], step=7)
        torch.testing.assert_close(part, whole[rank::ranks], rtol=0, atol=1e-5)


def test_no_value_of_an_image_is_read_by_the_host():
    """On the meta device there are no values: reading one would raise."""
    augment = ColourJitter(PAPER, MEAN, STD).to("meta")
    assert augment(pictures(16).to("meta"), step=0).shape == (16, 3, 24, 24)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_makes_the_same_images_and_the_host_never_waits():
    images = pictures(64)
    want = ColourJitter(PAPER, MEAN, STD, draws=Draws(seed=5))(images, step=7)
    augment = ColourJitter(PAPER, MEAN, STD, draws=Draws(seed=5)).cuda()
    there = images.cuda()
    augment(there, step=0)  # makes the constants
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = augment(there, step=7)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(out.cpu(), want, rtol=0, atol=5e-5)


@pytest.mark.parametrize(
    "wrong",
    [
        {"jitter": (0.1, 0.1, 0.1)},
        {"jitter": (0.1, 0.1, 0.1, 0.6)},
        {"jitter": (-0.1, 0.1, 0.1, 0.1)},
        {"jitter_prob": 1.1},
        {"greyscale_prob": -0.1},
    ],
)
def test_impossible_values_are_refused(wrong):
    with pytest.raises(ValueError, match="give"):
        ColourConfig(**wrong)
