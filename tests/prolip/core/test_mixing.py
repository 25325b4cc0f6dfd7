"""Mixup and CutMix as functions of noise: pixels, shares and labels by hand."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from prolip.views import NOISE, Mix, boxes, mix_images

MIXUP, CUTMIX = torch.tensor(False), torch.tensor(True)


def noise_of(rows, seed=0):
    return torch.rand(rows, NOISE, generator=torch.Generator().manual_seed(seed))


def images_of(rows, size=8, seed=1):
    return torch.randn(rows, 3, size, size, generator=torch.Generator().manual_seed(seed))


def test_about_the_share_is_mixed_each_with_another_and_shares_are_of_beta_2_2():
    _, mix = mix_images(images_of(4000, 2), noise_of(4000), 0.25, MIXUP)
    mixed = mix.share < 1
    assert abs(mixed.float().mean() - 0.25) < 0.03
    assert (mix.partner != torch.arange(4000)).all() and mix.partner.min() >= 0 and mix.partner.max() < 4000
    assert stats.kstest(mix.share[mixed].numpy(), "beta", args=(2, 2)).pvalue > 0.01
    assert stats.kstest(mix.partner.numpy(), "uniform", args=(0, 4000)).pvalue > 0.01


def test_mixup_is_the_weighted_mean_and_leaves_the_others_bit_for_bit():
    images = images_of(40)
    found, mix = mix_images(images, noise_of(40), 0.5, MIXUP)
    for i in range(40):
        share = mix.share[i]
        expected = images[i] if share == 1 else share * images[i] + (1 - share) * images[mix.partner[i]]
        assert torch.equal(found[i], images[i]) if share == 1 else torch.allclose(found[i], expected)
    assert 5 < (mix.share < 1).sum() < 35


def test_cutmix_pastes_one_box_and_the_share_is_what_it_leaves():
    images = images_of(60, 16)
    found, mix = mix_images(images, noise_of(60), 0.5, CUTMIX)
    for i in range(60):
        own, other = (found[i] == images[i]).all(0), (found[i] == images[mix.partner[i]]).all(0)
        assert (own ^ other).all()
        assert mix.share[i] == pytest.approx(own.float().mean().item())
        rows, columns = other.any(1), other.any(0)
        assert torch.equal(other, rows[:, None] & columns)  # a box
        assert all((line.int().diff() != 0).sum() <= 2 for line in (rows, columns))
    assert (mix.share < 1).sum() > 10


def test_a_box_has_the_area_that_was_drawn_where_no_border_cuts_it():
    share = torch.tensor([0.75, 0.36, 1.0])
    inside = boxes(share, torch.full((3,), 0.5), torch.full((3,), 0.5), 20, 40)
    assert inside.flatten(1).sum(1).tolist() == [10 * 20, 16 * 32, 0]
    corner = boxes(share[:1], torch.tensor([0.0]), torch.tensor([0.99]), 20, 40)
    assert corner[0, :5, 29:].all() and corner.sum() == 5 * 11


def test_pixels_of_bytes_stay_bytes():
    images = (images_of(8).sigmoid() * 255).byte()
    found, mix = mix_images(images, noise_of(8), 0.9, MIXUP)
    i = int((mix.share < 1).nonzero()[0])
    expected = mix.share[i] * images[i] + (1 - mix.share[i]) * images[mix.partner[i]]
    assert found.dtype == torch.uint8 and (found[i] - expected).abs().max() <= 0.5 + 1e-4


def test_labels_by_hand_with_a_text_that_is_true_of_both():
    positive = torch.tensor([[True, False, False], [False, True, True], [False, True, True]])
    mix = Mix(torch.tensor([0.7, 1.0, 0.4]), torch.tensor([1, 2, 1]))
    expected = torch.tensor([[0.7, 0.3, 0.3], [0.0, 1.0, 1.0], [0.0, 1.0, 1.0]])
    torch.testing.assert_close(mix.labels(positive), expected)


def test_one_image_alone_is_left_alone_and_noise_must_fit():
    images = images_of(1)
    found, mix = mix_images(images, torch.zeros(1, NOISE), 0.9, MIXUP)
    assert torch.equal(found, images) and mix.share.item() == 1
    with pytest.raises(ValueError, match=r"noise is \(2, 7\), want \(1, 7\)"):
        mix_images(images, noise_of(2), 0.5, MIXUP)
