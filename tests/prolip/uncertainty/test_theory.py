"""The effect of contrastive losses on ambiguity, with free points: the slope 2/a, code lengths of log n."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from prolip.embeddings import Pairs
from prolip.uncertainty.targets import match_probabilities

Loss = tuple[Callable[[torch.Tensor], torch.Tensor], list[torch.Tensor]]
IMAGES, COUNTS = 32, torch.tensor([1] * 32 + [2] * 16 + [4] * 8 + [8] * 4 + [16] * 2 + [32])


@pytest.fixture(scope="module")
def joint() -> torch.Tensor:
    """p(image, text): an image is drawn, then one of its six texts, each true of n images."""
    p, start = torch.zeros(IMAGES, len(COUNTS), dtype=torch.float64), 0
    for text, n in enumerate(COUNTS.tolist()):
        p[(start + torch.arange(n)) % IMAGES, text] = 1.0
        start += n
    return p / p.sum()


def sigmoid(joint: torch.Tensor, batch: int) -> Loss:
    """The expected sigmoid loss of a batch, its bias included, of logits (images, texts)."""
    bias = torch.tensor(-math.log(batch), dtype=torch.float64, requires_grad=True)
    apart = (batch - 1) * joint.sum(1, keepdim=True) * joint.sum(0)
    return lambda x: (joint * F.softplus(-x - bias)).sum() + (apart * F.softplus(x + bias)).sum(), [bias]


def softmax(joint: torch.Tensor, batch: int) -> Loss:
    """The expected softmax loss of a large batch, both ways."""
    image, text = joint.sum(1, keepdim=True).log(), joint.sum(0).log()
    return lambda x: -(joint * ((x + image).log_softmax(0) + (x + text).log_softmax(1))).sum() / 2, []


def optimum(joint: torch.Tensor, a: float, loss: Loss, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Unit points at the minimum of a loss."""
    g = torch.Generator().manual_seed(0)
    image, text = (torch.randn(n, dim, generator=g, dtype=torch.float64, requires_grad=True) for n in joint.shape)
    function, further = loss
    settings = {"max_iter": 200, "line_search_fn": "strong_wolfe", "history_size": 20}
    solver = torch.optim.LBFGS([image, text, *further], **settings)

    def evaluate() -> torch.Tensor:
        solver.zero_grad()
        value = function(a * F.normalize(image, dim=1) @ F.normalize(text, dim=1).T)
        value.backward()
        return value

    solver.step(evaluate)
    return F.normalize(image.detach(), dim=1), F.normalize(text.detach(), dim=1)


@pytest.mark.parametrize(
    ("loss", "a", "batch", "close"),
    [(sigmoid, 20.0, 64, 0.02), (sigmoid, 30.0, 512, 0.02), (softmax, 20.0, 64, 1e-3), (softmax, 30.0, 512, 1e-3)],
)
def test_the_distance_of_matched_pairs_rises_by_2_over_a_with_each_nat_of_ambiguity(joint, loss, a, batch, close):
    image, text = optimum(joint, a, loss(joint, batch), dim=64)
    distance = ((2 - 2 * image @ text.T) * joint).sum(0) / joint.sum(0)
    x, y = COUNTS.double().log(), distance
    slope = ((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum()
    assert float(slope) == pytest.approx(2 / a, rel=close)
    image_of, text_of = joint.nonzero(as_tuple=True)
    found = match_probabilities(Pairs(image=image, text=text, image_of=image_of, text_of=text_of, scale=a))
    torch.testing.assert_close(found, 1 / COUNTS.double(), atol=close, rtol=0)
