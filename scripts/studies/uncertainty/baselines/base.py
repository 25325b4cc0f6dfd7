"""The interface of the baselines: an uncertainty, fitted to frozen pairs, with a number for every input."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from prolip.embeddings import Pairs
from prolip.gaussian import kind_of, upcast, without_autocast

ROWS = 1 << 13  # inputs scored at a time: a head then holds about ten megabytes at most


class Scorer(nn.Module):
    """The uncertainty of inputs of one side, (N, W) -> (N,). W is `width`, of hidden features if `takes_hidden`."""

    def __init__(self, features: Tensor, takes_hidden: bool = False) -> None:
        super().__init__()
        self.width, self.takes_hidden = features.shape[1], takes_hidden

    def forward(self, features: Tensor) -> Tensor:
        raise NotImplementedError


class Baseline(nn.Module):
    """An uncertainty by other authors on frozen embeddings: `fit` it, then call `image` or `text`.

    A subclass fits the scorer of texts (`fit_text`); the scorer of images is fitted the same way with exchanged sides.
    name: in the table; source: authors, venue, year, equation; sides: supported modalities. The state_dict holds the
    fit, in float32, or float64 for such pairs.
    """

    name: ClassVar[str]
    source: ClassVar[str]
    sides: ClassVar[tuple[str, ...]] = ("image", "text")

    def __init__(self, scorers: Mapping[str, Scorer]) -> None:
        super().__init__()
        self.scorers = nn.ModuleDict(scorers)
        self.requires_grad_(False)

    @classmethod
    def fit(cls, pairs: Pairs, seed: int = 0) -> Baseline:
        """Fit to the pairs, reproducibly by the seed, without changing torch's random state."""
        if not isinstance(pairs, Pairs):
            raise TypeError(f"expected prolip.embeddings.Pairs, got {kind_of(pairs)}. Use Pairs.in_rows(...)")
        with torch.enable_grad(), without_autocast(pairs.image.device):
            return cls(cls.fit_sides(pairs, seed))

    @classmethod
    def fit_sides(cls, pairs: Pairs, seed: int) -> dict[str, Scorer]:
        """Fit a scorer for each of `sides`."""
        scorers = {}
        for side in cls.sides:
            with seeded(seed, pairs.image.device):
                scorers[side] = cls.fit_text(pairs if side == "text" else pairs.swapped)
        return scorers

    @classmethod
    def fit_text(cls, pairs: Pairs) -> Scorer:
        """Fit the scorer of the texts of `pairs`."""
        raise NotImplementedError

    def image(self, mean: Tensor, hidden: Tensor | None = None) -> Tensor:
        """Return the uncertainty of images, unit means (N, D), hidden (N, W) -> (N,), larger if less certain, detached.

        Raises ValueError for an unsupported side and for features unlike those of the fit.
        """
        return self._score("image", mean, hidden)

    def text(self, mean: Tensor, hidden: Tensor | None = None) -> Tensor:
        """Return the uncertainty of texts, as `image` does."""
        return self._score("text", mean, hidden)

    @torch.no_grad()
    def _score(self, side: str, mean: Any, hidden: Any) -> Tensor:
        if side not in self.scorers:
            raise ValueError(f"{self.name} has no uncertainty of {side}s, only of {' and '.join(self.sides)}s")
        scorer, what = self.scorers[side], "means"
        if scorer.takes_hidden:
            mean, what = hidden, "hidden features"
            if hidden is None:
                raise ValueError(f"{self.name} was fitted to {what} of {side}s. Give hidden, (N, {scorer.width})")
        if not isinstance(mean, Tensor):
            raise TypeError(f"expected {what} of {side}s as a tensor (N, {scorer.width}), got {kind_of(mean)}")
        if mean.ndim != 2 or mean.shape[1] != scorer.width:
            raise ValueError(
                f"{what} of {side}s are {tuple(mean.shape)}, but {self.name} was fitted to (N, {scorer.width})."
                " Give features of the same model"
            )
        with without_autocast(mean.device):
            dtype = next(iter(scorer.state_dict().values())).dtype
            return torch.cat([scorer(rows.to(dtype)) for rows in mean.split(ROWS)])


def text_features(pairs: Pairs) -> tuple[Tensor, bool]:
    """Return the input of a head on texts, and whether it is hidden features (if stored) or the means."""
    if pairs.text_hidden is None:
        return upcast(pairs.text), False
    return upcast(pairs.text_hidden), True


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch within the block, and restore its random state afterwards."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
