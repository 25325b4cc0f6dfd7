"""The heads of variances: their features against plain formulas, and what a tower gets from them."""

from __future__ import annotations

import math

import torch
from ambiguous_pairs import points

from prolip.gaussian import Gaussian
from prolip.uncertainty.heads import (
    BANK_FEATURES,
    NEAREST,
    TEMPERATURES,
    TOKEN_FEATURES,
    Parts,
    VarianceHead,
    bank_features,
    token_features,
)


def test_a_banks_answer_is_that_of_a_categorical_distribution_and_empty_rows_are_not_there():
    mean, bank = points(4, 5, dtype=torch.float64), points(30, 5, seed=1, dtype=torch.float64)
    weight = torch.rand(30, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = bank_features(mean, bank, weight, 7.0)
    assert found.shape == (4, BANK_FEATURES)
    for place, q in enumerate(TEMPERATURES):
        logits = q * 7.0 * mean @ bank.T + weight.log()
        torch.testing.assert_close(found[:, 2 * place], torch.distributions.Categorical(logits=logits).entropy())
        torch.testing.assert_close(found[:, 2 * place + 1], logits.exp().sum(1).log())
    ordered = (mean @ bank.T).sort(1, descending=True).values
    torch.testing.assert_close(found[:, -len(NEAREST) :], ordered[:, [k - 1 for k in NEAREST]])
    padded = torch.cat([bank, torch.zeros(3, 5, dtype=torch.float64)]), torch.cat([weight, torch.zeros(3)])
    torch.testing.assert_close(bank_features(mean, *padded, 7.0), found)


def test_features_of_tokens_by_hand_and_without_what_stands_everywhere():
    start, pad, cat, rare, new = 9, 0, 3, 5, 7
    rarity = torch.tensor([0.0, 0, 0, 1.2, 0, 2.5, 0, 4.0, 0, 0.1])  # start and padding occur in nearly all texts
    ids = torch.tensor([[start, cat, rare, pad], [start, new, pad, pad], [start, pad, pad, pad]])
    found = token_features(ids, rarity[ids], rarity.amax())
    assert found.shape == (3, TOKEN_FEATURES)
    by_hand = [
        [2.5, (1.2 + 2.5) / 2, 1.2, 0.0, (math.log(4) + math.log(6)) / 2, math.log(6), math.log(2)],
        [4.0, 4.0, 4.0, 1.0, math.log(8), math.log(8), 0.0],
        [0.0] * TOKEN_FEATURES,
    ]
    torch.testing.assert_close(found, torch.tensor(by_hand))


def head_of(**parts) -> VarianceHead:
    head, g = VarianceHead(Parts(dim=6, **parts)), torch.Generator().manual_seed(0)
    for x in head.state_dict().values():
        x.copy_(torch.rand(x.shape, generator=g) + 0.1)
    return head


def test_a_towers_gaussian_keeps_its_mean_and_gets_one_variance_whose_trace_is_2_over_a_times_the_nats():
    head = head_of(bank=40, vocabulary=50, centres=8)
    z = Gaussian(3 * points(4, 6).requires_grad_(), torch.zeros(4, 6))
    ids = torch.randint(50, (4, 7), generator=torch.Generator().manual_seed(1))
    found = head(torch.zeros(4, 1, 6), z, ids)
    assert found.mean is z.mean and not found.log_var.requires_grad
    nats = head.ambiguity(points(4, 6), ids).exp()
    torch.testing.assert_close(found.trace, head.log_unit.exp() * nats)
    torch.testing.assert_close(head.trace(points(4, 6), ids), found.trace)
    torch.testing.assert_close(found.log_var, found.log_var[:, :1].expand(4, 6))
    a = head.ambiguity
    by_words = (a.signs(ids) @ a.words.T - a.words.square().sum(1)) / 0.5
    linear = (a.features(points(4, 6), ids) - a.feature_mean) / a.feature_std @ a.weight + a.offset
    kernel = ((points(4, 6) @ a.centres.T - 1) / a.kernel_width + by_words).exp() @ a.kernel_weight
    torch.testing.assert_close(nats.log(), a.gamma * (linear + kernel) + a.alpha)


def test_a_head_that_was_not_fitted_leaves_one_nat_open_and_its_state_is_what_is_kept():
    fresh = VarianceHead(Parts(dim=6, centres=8))
    torch.testing.assert_close(fresh.trace(points(3, 6)), torch.ones(3))
    filled, other = head_of(bank=40, centres=8), VarianceHead(Parts(dim=6, bank=40, centres=8))
    other.load_state_dict(filled.state_dict())
    assert torch.equal(other.trace(points(3, 6)), filled.trace(points(3, 6)))
    assert not list(filled.parameters())


def test_eta_is_at_most_that_of_all_rows_of_the_other_side_and_at_least_that_of_the_calibration():
    """A text that is true of all of 12 images leaves log 12 nats open; what is unknown sets no bound."""
    head = head_of(bank=40, centres=8)
    head.ambiguity.gamma.zero_()
    cases = [(5.0, 12, math.log(12)), (200.0, 12, math.log(12)), (5.0, 0, math.exp(5))]
    cases += [(0.0, 12, 1.0), (0.0, 1, math.exp(-20)), (-300.0, 12, math.exp(-20))]
    for alpha, rows, nats in cases:
        head.ambiguity.alpha.fill_(alpha)
        head.rows.fill_(rows)
        wanted = torch.full((4,), nats) * head.log_unit.exp()
        torch.testing.assert_close(head.trace(points(4, 6)), wanted)
        torch.testing.assert_close(head.log_var(points(4, 6)).exp().sum(1), wanted)
