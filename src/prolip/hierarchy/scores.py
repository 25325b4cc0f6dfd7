"""Scores of "A is a kind of B", larger if true; ours is `seen_trace`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from prolip import measures
from prolip.embedder import Embedder, ModelCard
from prolip.gaussian import Gaussian, without_autocast
from prolip.scores import Score

#: Nats, and distance to "", within which two inputs are about equally general; chosen on the emoji corpus.
NATS, RADIUS = 0.1, 0.05
#: Rows of texts compared with all images at a time.
ROWS = 1024


class Items(NamedTuple):
    """Inputs of one side."""

    z: Gaussian  # (N, D)
    seen: Tensor  # (N, D), a times the mean of the images that an input describes; an image describes itself
    nats: Tensor  # (N,), ambiguity
    radius: Tensor  # (N,), the distance of its mean from that of ""
    score: Score

    def select(self, rows: np.ndarray | Tensor) -> Items:
        """Return some rows."""
        rows = torch.as_tensor(rows)
        return Items(self.z.select(rows), self.seen[rows], self.nats[rows], self.radius[rows], self.score)


class KindScore(NamedTuple):
    """A score of pairs of rows: (N,), (N,) -> (N,)."""

    pairs: Callable[[Items, Items], Tensor]
    words: str
    needs_variance: bool


def cosine(a: Items, b: Items) -> Tensor:
    """Return the similarity of the means, equal in both directions."""
    return (a.z.mean * b.z.mean).sum(1)


def root(a: Items, b: Items) -> Tensor:
    """Return |m_A - r| - |m_B - r|, r the mean of "": the more general is nearer to it (HierarCaps, ECCV 2024)."""
    return a.radius - b.radius


def trace(a: Items, b: Items) -> Tensor:
    """Return trace_B - trace_A: the more general is more uncertain (ProLIP 4.3)."""
    return b.z.trace - a.z.trace


def own(a: Items, b: Items) -> Tensor:
    """Return the model's own score of A, in place of an image, with the text B."""
    (u, first), (v, second) = a.score.factors(a.z, "image"), b.score.factors(b.z, "text")  # type: ignore[misc]
    return (u * v).sum(1) + first + second


def seen(a: Items, b: Items) -> Tensor:
    """Return a E[m_i . m_B], i drawn from the images that A describes."""
    return (a.seen * b.z.mean).sum(1)


def seen_trace(a: Items, b: Items) -> Tensor:
    """Return our score a E[m_i . m_B | i of A] + log sigmoid((eta_B - eta_A) / NATS), eta = trace / unit in nats.

    B must match A's images and be more ambiguous: a narrower B scores low, a far wider one gains nothing.
    """
    return seen(a, b) + F.logsigmoid((b.nats - a.nats) / NATS)


def seen_root(a: Items, b: Items) -> Tensor:
    """Return `seen_trace` with nearness to "" instead of the nats."""
    return seen(a, b) + F.logsigmoid((a.radius - b.radius) / RADIUS)


def _measure(name: str) -> Callable[[Items, Items], Tensor]:
    measure = measures.get_measure(name)
    sign = 1.0 if measure.is_similarity else -1.0
    return lambda a, b: sign * measure.paired(a.z, b.z)


SCORES: dict[str, KindScore] = {
    "cosine": KindScore(cosine, "similarity of the means", False),
    "root": KindScore(root, 'distance to ""', False),
    "seen": KindScore(seen, "B matches A's images", False),
    "seen_root": KindScore(seen_root, 'the same, and B nearer to ""', False),
    "own": KindScore(own, "the model's score, A as an image", False),
    "elk": KindScore(_measure("elk"), "elk", True),
    "log_inclusion": KindScore(_measure("log_inclusion"), "log inclusion of A in B", True),
    "inclusion_test": KindScore(_measure("inclusion_test"), "inclusion test H", True),
    "trace": KindScore(trace, "difference of traces", True),
    "seen_trace": KindScore(seen_trace, "ours: B matches A's images and is more ambiguous", True),
}


def scores_of(card: ModelCard | Embedder) -> dict[str, KindScore]:
    """Return the scores of a model: some need variances, and `own` needs factors."""
    score = card.scored_by()
    nothing = Gaussian(torch.zeros(1, 1), torch.zeros(1, 1))
    has_own = type(score).factors is not Score.factors and score.factors(nothing) is not None
    kept = {name: one for name, one in SCORES.items() if card.probabilistic or not one.needs_variance}
    return kept if has_own else {name: one for name, one in kept.items() if name != "own"}


def items_of(card: ModelCard | Embedder, z: Gaussian, empty: Gaussian, images: Gaussian | None = None) -> Items:
    """Prepare inputs (N, D), with the embedding of "" (1, D): texts with `images` (M, D) that they may describe.

    A text describes image i with p(i|A) = softmax_i(a m_i . m_A), a the logit scale, in (N, D) memory; without `images`
    the inputs are images and describe themselves. A unit of trace is a nat if the model's method has units, else 2/a.
    ValueError for a model without a logit scale.
    """
    scale = card.logit_scale
    if scale is None:
        raise ValueError(f"{card.name} has no logit_scale, which converts a cosine to nats: use a contrastive model")
    score = card.scored_by()
    nats = z.trace / (score.units.unit if score.units is not None else 2 / scale)
    radius = (z.mean - empty.mean).norm(dim=1)
    if images is None:
        return Items(z, scale * z.mean, nats, radius, score)
    with without_autocast(z.mean.device):
        found = [(scale * part @ images.mean.mT).softmax(1) @ images.mean for part in z.mean.split(ROWS)]
    return Items(z, scale * torch.cat(found), nats, radius, score)
