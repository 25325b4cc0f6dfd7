"""One variance per input by the likelihood of the distance of matched pairs: the plain form of our method."""

from __future__ import annotations

import torch
from torch import Tensor

from prolip.embeddings import Pairs
from prolip.gaussian import upcast
from studies.uncertainty.baselines.base import Baseline, Scorer, seeded, text_features
from studies.uncertainty.baselines.heads import Head, minimise


class PairLikelihood(Baseline):
    """The trace of N(m_i - m_j; 0, (t_i + t_j) / D) for both sides, by heads on the frozen features.

    Only t_i + t_j is identified: a constant can move from one side to the other.
    """

    name = "pair likelihood"
    source = "Shi and Jain, Probabilistic Face Embeddings, ICCV 2019, (3), with one variance per input"

    @classmethod
    def fit_sides(cls, pairs: Pairs, seed: int) -> dict[str, Scorer]:
        with seeded(seed, pairs.image.device):
            sides = {"image": pairs.swapped, "text": pairs}
            scorers = {side: _Trace(*text_features(of)) for side, of in sides.items()}
            inputs = {side: (text_features(of)[0], of.text_of) for side, of in sides.items()}
            parameters = [p for scorer in scorers.values() for p in scorer.parameters()]

            def loss(some: Tensor) -> Tensor:
                traces = (scorers[side].log_trace(x[rows[some]]) for side, (x, rows) in inputs.items())
                difference = upcast(pairs.image[pairs.image_of[some]]) - upcast(pairs.text[pairs.text_of[some]])
                return pair_loss(difference.square().sum(1), *traces).mean()

            minimise(loss, parameters, len(pairs))
        return dict(scorers)


def pair_loss(distance: Tensor, log_trace: Tensor, other: Tensor) -> Tensor:
    """Compute the negative log likelihood of squared distances (B,) over D/2, up to a constant: d / t + log t.

    t is the sum of the traces, given as logarithms, (B,), (B,) -> (B,).
    """
    log_sum = torch.logaddexp(log_trace, other)
    return distance * (-log_sum).exp() + log_sum


class _Trace(Scorer):
    def __init__(self, features: Tensor, takes_hidden: bool) -> None:
        super().__init__(features, takes_hidden)
        self.head = Head(features)

    def log_trace(self, features: Tensor) -> Tensor:
        return self.head(features).squeeze(1)

    def forward(self, features: Tensor) -> Tensor:
        return self.log_trace(features).exp()
