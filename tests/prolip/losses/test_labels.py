"""Losses of a matrix of logits and labels against loops over their definitions."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck

from prolip.losses import matching_loss, pseudo_labels, softmax_loss, triplet_loss

DOUBLE = torch.float64


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def test_matching_loss_is_the_cross_entropy_of_soft_labels():
    x, y = draw(4, 6) * 5, draw(4, 6, seed=1).sigmoid()
    p = x.sigmoid()
    expected = -(y * p.log() + (1 - y) * (1 - p).log()).mean()
    torch.testing.assert_close(matching_loss(x, y), expected)
    assert matching_loss(torch.tensor([[80.0, -80.0]]), torch.tensor([[1, 0]])) < 1e-30
    assert gradcheck(lambda z: matching_loss(z, y), x.requires_grad_())


def test_softmax_loss_is_the_cross_entropy_of_every_positive_of_a_row():
    x, positive = draw(5, 8) * 3, draw(5, 8, seed=1) > 0.3
    positive.diagonal(1).fill_(True)
    rows = []
    for i in range(5):
        whole = math.log(math.fsum(math.exp(v) for v in x[i].tolist()))
        rows.append([whole - x[i, j].item() for j in range(8) if positive[i, j]])
    expected = math.fsum(math.fsum(row) / len(row) for row in rows) / 5
    assert {len(row) for row in rows} != {1} and softmax_loss(x, positive).item() == pytest.approx(expected, rel=1e-12)
    assert gradcheck(lambda z: softmax_loss(z, positive), x.clone().requires_grad_())
    one = torch.eye(5, 8, dtype=torch.bool)
    torch.testing.assert_close(softmax_loss(x, one), F.cross_entropy(x, torch.arange(5)))
    assert softmax_loss(torch.tensor([[200.0, -200.0]]), torch.tensor([[True, False]])) == 0


def brute_pseudo_labels(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The definition: every pair of a row looks for the matches that are no nearer."""
    out = torch.empty_like(y)
    for i in range(len(x)):
        for j in range(x.shape[1]):
            out[i, j] = max(y[i, k].item() for k in range(x.shape[1]) if x[i, k] <= x[i, j])
    return out


@pytest.mark.parametrize("ties", [False, True])
def test_pseudo_labels_are_those_of_the_definition(ties):
    x, y = draw(30, 40), (draw(30, 40, seed=1).sigmoid() * (draw(30, 40, seed=2) > 1.5)).float()
    x = (x * 2).round() if ties else x
    assert torch.equal(pseudo_labels(x, y), brute_pseudo_labels(x, y))
    assert torch.equal(pseudo_labels(x.T, y.T), brute_pseudo_labels(x.T, y.T))  # not contiguous


@pytest.mark.parametrize("ties", [False, True])
def test_first_is_what_the_paper_prints_and_all_gives_no_less(ties):
    x, y = draw(30, 40), (draw(30, 40, seed=1).sigmoid() * (draw(30, 40, seed=2) > 1.0)).float()
    if ties:
        x, y = (x * 2).round(), (y * 2).ceil() / 2  # equal distances, and equal largest labels
        assert (y == y.amax(1, keepdim=True)).sum(1).max() > 1
    expected = torch.empty_like(y)
    for i, row in enumerate(y.tolist()):
        first = row.index(max(row))
        expected[i] = torch.tensor([max(row) if x[i, j] >= x[i, first] else row[j] for j in range(40)])
    assert torch.equal(pseudo_labels(x, y, "first"), expected)
    assert (pseudo_labels(x, y, "all") >= expected).all() and not torch.equal(pseudo_labels(x, y), expected)


@pytest.mark.parametrize("negatives", ["hardest", "all"])
def test_weights_stand_inside_the_hinge(negatives):
    s, positive, w = draw(5, 7) * 0.3, draw(5, 7, seed=1) > 1, draw(5, seed=2).exp()
    positive.diagonal().fill_(True)
    own = s.diagonal()
    rows = []
    for i in range(5):
        hinges = [max(0.0, 0.2 + (w[i] * (s[i, j] - own[i])).item()) for j in range(7) if not positive[i, j]]
        rows.append(max(hinges) if negatives == "hardest" else math.fsum(hinges))
    expected = torch.tensor(sum(rows) / 5, dtype=DOUBLE)
    torch.testing.assert_close(triplet_loss(s, positive, own, 0.2, negatives, w), expected)
    ones = triplet_loss(s, positive, own, 0.2, negatives, torch.ones(5, dtype=DOUBLE))
    assert ones == triplet_loss(s, positive, own, 0.2, negatives)


def test_the_hardest_negative_alone_gets_a_gradient():
    s = torch.tensor([[0.5, 0.6, 0.4], [0.0, 0.9, 0.1], [0.2, 0.3, 0.8]], requires_grad=True)
    own = s.diagonal()
    triplet_loss(s, torch.eye(3, dtype=torch.bool), own, 0.2).backward()
    assert torch.equal(s.grad, F.pad(torch.tensor([[-1.0, 1.0, 0.0]]) / 3, (0, 0, 0, 2)))
