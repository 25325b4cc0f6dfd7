"""Small networks on frozen features: they start at 0, and find what there is to find."""

from __future__ import annotations

import torch

from studies.uncertainty.baselines.heads import Head, bank_of, minimise


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
