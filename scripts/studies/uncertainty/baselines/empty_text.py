"""Nearness to the embedding of the text that says nothing."""

from __future__ import annotations

from torch import Tensor

from prolip.embeddings import Pairs
from prolip.gaussian import upcast
from studies.uncertainty.baselines.base import Baseline, Scorer


class EmptyText(Baseline):
    """-|m - r|, r the mean of the text "": nearer to it is more general. ValueError for pairs without `empty`."""

    name = "empty text"
    source = 'Alper and Averbuch-Elor, ECCV 2024 (HierarCaps): the embedding of "" is the root of the hierarchy'

    @classmethod
    def fit_sides(cls, pairs: Pairs, seed: int) -> dict[str, Scorer]:
        if pairs.empty is None:
            raise ValueError('the pairs have no embedding of the empty text: give Pairs empty=, the mean of "", (D,)')
        if pairs.empty.shape != pairs.text.shape[1:]:
            raise ValueError(f'empty is {tuple(pairs.empty.shape)}, want the mean of "", ({pairs.text.shape[1]},)')
        return {side: _Root(pairs.text, pairs.empty) for side in cls.sides}


class _Root(Scorer):
    root: Tensor

    def __init__(self, means: Tensor, empty: Tensor) -> None:
        super().__init__(means)
        self.register_buffer("root", upcast(empty))

    def forward(self, features: Tensor) -> Tensor:
        return -(features - self.root).norm(dim=1)
