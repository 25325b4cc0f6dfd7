"""Masked views and mixed images as functions of noise: rates, pixels, shares and labels by hand."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from prolip.views import NOISE, Mix, boxes, count_masked_rows, keep_patches, mask_text, mix_images

PAD, MASK, START, END = 0, 99, 1, 2


def uniform(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def texts(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    """[start, words of random number, end, padding...]."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(10, 50, (rows, length), generator=generator)
    count = torch.randint(0, length - 1, (rows, 1), generator=generator)
    column = torch.arange(length)
    text = torch.where(column <= count, words, torch.tensor(PAD))
    text[:, 0] = START
    return text.masked_fill(column == count + 1, END)


def mask_by_hand(text, noise, ratio):
    """The definition, token by token."""
    out = text.clone()
    for row in range(len(text)):
        places = [i for i in range(text.shape[1]) if text[row, i].item() not in (PAD, START, END)]
        chosen = [i for i in places if noise[row, i] < ratio]
        if places and not chosen:
            chosen = [min(places, key=lambda i, row=row: noise[row, i].item())]
        for i in chosen:
            out[row, i] = MASK
    return out


@pytest.mark.parametrize("keep", [1, 3, 7, 8])
def test_kept_patches_are_the_smallest_draws_in_ascending_places(keep):
    noise = uniform(20, 8)
    expected = [sorted(sorted(range(8), key=lambda i, row=row: row[i].item())[:keep]) for row in noise]
    assert keep_patches(noise, keep).tolist() == expected


def test_an_eighth_of_the_rows_is_masked_and_never_none():
    assert [count_masked_rows(b, 0.125) for b in (512, 15, 8, 3)] == [64, 1, 1, 1]
    assert count_masked_rows(100, 0.29) == 29


@pytest.mark.parametrize("ratio", [0.02, 0.3, 0.75, 1.0])
def test_text_masking_equals_the_token_by_token_definition(ratio):
    text, noise = texts(200, 9, seed=3), uniform(200, 9, seed=4)
    assert torch.equal(mask_text(text, noise, MASK, PAD, (START, END), ratio), mask_by_hand(text, noise, ratio))


def test_tokens_are_masked_at_the_ratio_apart_from_the_forced_ones():
    """The rate for n words is p + (1 - p)^n / n: the forced token is one of the n untouched ones."""
    rows, p = 40_000, 0.75
    for words in (1, 2, 10):
        text = torch.full((rows, words + 2), 20)
        text[:, 0], text[:, -1] = START, END
        masked = mask_text(text, uniform(rows, words + 2, seed=words), MASK, PAD, (START, END), p) == MASK
        rates = masked[:, 1:-1].double().mean(0)
        expected = p + (1 - p) ** words / words
        assert not masked[:, 0].any() and not masked[:, -1].any()
        assert (rates - expected).abs().max() < 4.5 * (0.25 / rows) ** 0.5
        if words > 1:
            covariance = torch.cov(masked[:, 1:3].double().T)[0, 1]
            assert abs(covariance - (p**2 - expected**2)) < 0.006  # independent, but never two forced


def test_a_padding_token_that_is_also_the_end_token_stays():
    text = torch.tensor([[20, 21, 1, 1], [1, 1, 1, 1]])  # SigLIP's tokenizers: end = padding = 1
    masked = mask_text(text, torch.full((2, 4), 0.1), MASK, pad_id=1)
    assert masked.tolist() == [[MASK, MASK, 1, 1], [1, 1, 1, 1]]


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


def test_labels_by_hand_with_a_text_that_is_true_of_both():
    positive = torch.tensor([[True, False, False], [False, True, True], [False, True, True]])
    mix = Mix(torch.tensor([0.7, 1.0, 0.4]), torch.tensor([1, 2, 1]))
    expected = torch.tensor([[0.7, 0.3, 0.3], [0.0, 1.0, 1.0], [0.0, 1.0, 1.0]])
    torch.testing.assert_close(mix.labels(positive), expected)
