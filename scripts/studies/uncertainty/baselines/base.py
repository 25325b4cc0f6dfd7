"""The interface of the uncertainties that ours is compared with: fitted to frozen pairs, a number for every input."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from prolip.embeddings import Pairs
from prolip.gaussian import kind_of, upcast, without_autocast

ROWS = 1 << 13  # inputs scored at a time: what a head keeps of them stays below some ten megabytes


class Scorer(nn.Module):
    """The uncertainty of the inputs of one side, (N, W) -> (N,): W is `width`, of hidden features if `takes_hidden`."""

    def __init__(self, features: Tensor, takes_hidden: bool = False) -> None:
        super().__init__()
        self.width, self.takes_hidden = features.shape[1], takes_hidden

    def forward(self, features: Tensor) -> Tensor:
        raise NotImplementedError


class Baseline(nn.Module):
    """An uncertainty by other authors, on frozen embeddings: `fit` it, then ask for that of images or of texts.

    A subclass says how texts are scored (`fit_text`); images are scored by what the same finds for exchanged sides.
    name: in the table; source: authors, venue, year, equation; sides: which it knows. What is fitted is its state_dict,
    in float32, or float64 for pairs in it.
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
        """Fitted to the pairs, the same for the same seed; torch's own random numbers go on as if it had not been."""
        if not isinstance(pairs, Pairs):
            raise TypeError(f"pairs are {kind_of(pairs)}, want prolip.embeddings.Pairs: Pairs.in_rows(...)")
        with torch.enable_grad(), without_autocast(pairs.image.device):
            return cls(cls.fit_sides(pairs, seed))

    @classmethod
    def fit_sides(cls, pairs: Pairs, seed: int) -> dict[str, Scorer]:
        """A scorer for each of `sides`."""
        scorers = {}
        for side in cls.sides:
            with seeded(seed, pairs.image.device):
                scorers[side] = cls.fit_text(pairs if side == "text" else pairs.swapped)
        return scorers

    @classmethod
    def fit_text(cls, pairs: Pairs) -> Scorer:
        """The scorer of the texts of `pairs`."""
        raise NotImplementedError

    def image(self, mean: Tensor, hidden: Tensor | None = None) -> Tensor:
        """The uncertainty of images, unit means (N, D), hidden (N, W) -> (N,), larger where less certain, no gradient.

        Raises ValueError for a side that the method does not know and for features unlike those it was fitted to.
        """
        return self._score("image", mean, hidden)

    def text(self, mean: Tensor, hidden: Tensor | None = None) -> Tensor:
        """The same of texts."""
        return self._score("text", mean, hidden)

    @torch.no_grad()
    def _score(self, side: str, mean: Any, hidden: Any) -> Tensor:
        if side not in self.scorers:
            raise ValueError(f"{self.name} knows no uncertainty of {side}s, only of {' and '.join(self.sides)}s")
        scorer, what = self.scorers[side], "means"
        if scorer.takes_hidden:
            mean, what = hidden, "hidden features"
            if hidden is None:
                raise ValueError(f"{self.name} was fitted to {what} of {side}s: give hidden, (N, {scorer.width})")
        if not isinstance(mean, Tensor):
            raise TypeError(f"{what} of {side}s are {kind_of(mean)}, want a tensor (N, {scorer.width})")
        if mean.ndim != 2 or mean.shape[1] != scorer.width:
            raise ValueError(
                f"{what} of {side}s are {tuple(mean.shape)} and {self.name} was fitted to (N, {scorer.width}):"
                " give features of the same model"
            )
        with without_autocast(mean.device):
            dtype = next(iter(scorer.state_dict().values())).dtype
            return torch.cat([scorer(rows.to(dtype)) for rows in mean.split(ROWS)])


def text_features(pairs: Pairs) -> tuple[Tensor, bool]:
    """What a head on texts is given, and whether it is hidden features: those where they were kept, else the means."""
    if pairs.text_hidden is None:
        return upcast(pairs.text), False
    return upcast(pairs.text_hidden), True


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """A region in which torch draws what `seed` gives, and after which it goes on as before."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
