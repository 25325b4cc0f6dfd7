"""Common properties: one interface, the same numbers for the same seed, errors, heads."""

from __future__ import annotations

import pytest
import torch
from ambiguous_pairs import few, points

from studies.uncertainty.baselines import BASELINES
from studies.uncertainty.baselines.heads import Head, bank_of, minimise

ALL = sorted(BASELINES)
#: Spearman of new texts with log n that each must reach, well below what it does.
SEES = {"top score": 0.6, "ProbVLM": 0.3, "MCInfoNCE": 0.4}
SEES |= dict.fromkeys(("empty text", "information gain", "loss prediction", "AsymVLM"), 0.8)


def equal(x: torch.Tensor, y: torch.Tensor) -> None:
    torch.testing.assert_close(x, y, rtol=0, atol=0)


@pytest.mark.parametrize("name", SEES)
def test_uncertainty_of_new_texts_grows_with_the_number_of_images_they_are_true_of(name, world, small):
    assert world.correlation(BASELINES[name].fit(world.pairs).text(world.pairs.text)) > SEES[name]


@pytest.mark.parametrize("name", ALL)
def test_one_seed_gives_equal_bits_another_none_and_torch_draws_on_as_before(name, short):
    pairs, asked = few(), points(5, 6, seed=2)
    torch.manual_seed(7)
    state = torch.random.get_rng_state()
    first, again, other = (BASELINES[name].fit(pairs, seed) for seed in (0, 0, 1))
    equal(torch.random.get_rng_state(), state)
    for side in BASELINES[name].sides:
        score = getattr(first, side)(asked)
        assert score.shape == (5,) and score.isfinite().all() and not score.requires_grad
        equal(score, getattr(again, side)(asked))
    draws = {"loss prediction", "AsymVLM", "ProbVLM", "BayesVLM", "MCInfoNCE", "pair likelihood"}
    assert torch.equal(first.text(asked), other.text(asked)) == (name not in draws)


def test_what_cannot_be_scored_is_named(short):
    pairs = few()
    with pytest.raises(ValueError, match="AsymVLM has no uncertainty of images, only of texts"):
        BASELINES["AsymVLM"].fit(pairs).image(pairs.image)
    fitted = BASELINES["information gain"].fit(pairs)
    with pytest.raises(ValueError, match=r"means of texts are \(3, 5\), but information gain was fitted to \(N, 6\)"):
        fitted.text(points(3, 5))
    with pytest.raises(TypeError, match=r"expected means of images as a tensor \(N, 6\), got a list"):
        fitted.image([[1.0] * 6])
    hidden = BASELINES["BayesVLM"].fit(few(text_hidden=torch.randn(30, 9)))
    with pytest.raises(ValueError, match=r"BayesVLM was fitted to hidden features of texts. Give hidden, \(N, 9\)"):
        hidden.text(pairs.text)
    assert hidden.image(pairs.image).shape == hidden.text(pairs.text, torch.randn(30, 9)).shape


def test_a_head_starts_at_zero_whatever_the_features_and_does_not_divide_by_nothing():
    torch.manual_seed(0)
    features = torch.cat([1e3 + 50 * torch.randn(40, 3), torch.full((40, 1), 2.0)], 1)
    head = Head(features, 2)
    assert not head(features).any()
    minimise(lambda some: (head(features[some])[:, 0] - 1).square().mean(), head.parameters(), 40)
    torch.testing.assert_close(head(features)[:, 0], torch.ones(40), rtol=0, atol=0.05)


def test_a_bank_has_the_inputs_of_the_pairs_as_often_as_they_occur():
    means, rows = torch.eye(4), torch.tensor([1, 1, 3])
    assert sorted(bank_of(means, rows).argmax(1).tolist()) == [1, 1, 3]
    assert len(bank_of(means, rows, most=2)) == 2
