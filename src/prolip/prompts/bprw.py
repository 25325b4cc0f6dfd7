"""Which images say how much a prompt counts, and how many points are drawn of each (ProLIP C.5)."""
from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Annotated, Literal

import torch
from pydantic import AllowInfNan, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor

from prolip.evaluation.datasets.base import fingerprint
from prolip.evaluation.metrics.blockwise import PairScores
from prolip.gaussian import Gaussian, check_embeddings, mixture
from prolip.prompts.em import TOLERANCE, Fit, fit_weights, inverse_traces
from prolip.scores import Score, largest
from prolip.utils.documents import check_unique

log = logging.getLogger(__name__)

#: Points of a class, shared out among its images.
POINTS = 100


@dataclass(frozen=True, config={"extra": "forbid"})
class Reweighing:
    """How prompts are re-weighted.

    shots: labelled images of each class, 0: none, but the `nearest` images of each class's even mixture, whatever they
    show. alpha: of the Dirichlet prior, default 5 without labels and 2 with them; a constant one, or with prior `trace`
    one in proportion to 1/trace, alpha on average. eps: added to variances. samples: points of each image, default 100
    shared out, which are 20 of each of 5 and 11 of each of 9 (the paper's text has 10 of 5, and 100 in all). seed: of
    the images that are drawn and of the points.
    """

    shots: NonNegativeInt = 0
    alpha: Annotated[PositiveFloat, AllowInfNan(False)] | None = None
    prior: Literal["constant", "trace"] = "constant"
    eps: Annotated[NonNegativeFloat, AllowInfNan(False)] = 0.02
    nearest: PositiveInt = 5
    samples: PositiveInt | None = None
    seed: NonNegativeInt = 0

    @classmethod
    def parse(cls, words: str) -> Reweighing:
        """`K`, `alpha=3,eps=0.01` or `K,alpha=3`, or nothing. ValueError for others."""
        given = [word for word in words.split(",") if word]
        if given and "=" not in given[0]:
            given[0] = f"shots={given[0]}"
        try:
            return cls(**check_unique([(key, text) for key, _, text in (word.partition("=") for word in given)]))
        except ValueError as error:
            raise ValueError(f"{words!r} is no setting of bprw: give bprw, or bprw:K with K labelled images of each"
                             " class, and settings such as bprw:K,alpha=2; they are shots, eps and seed of 0 or more,"
                             " nearest and samples of 1 or more, an alpha above 0, and the prior constant or trace"
                             ) from error  # fmt: skip

    def __str__(self) -> str:
        """What `parse` reads; what is as it is without saying is left out."""
        first = [str(self.shots)] if self.shots else []
        own = [f"{f.name}={getattr(self, f.name)}" for f in fields(self)[1:] if getattr(self, f.name) != f.default]
        return ",".join(first + own)

    @property
    def per_image(self) -> int:
        """Points that are drawn of each image."""
        if self.samples is not None:
            return self.samples
        return max(1, POINTS // (self.shots or self.nearest))

    def prior_of(self, prompts: Gaussian) -> Tensor:
        """alpha of every prompt: (C, N, D) -> (C, N)."""
        alpha = self.alpha if self.alpha is not None else (2.0 if self.shots else 5.0)
        even = torch.full(prompts.mean.shape[:2], alpha, dtype=torch.float64)
        return even if self.prior == "constant" else even * even.shape[1] * inverse_traces(prompts)


def rule_of(settings: Reweighing) -> str:
    """What --prompts takes: `bprw` or `bprw:SETTINGS`."""
    return f"bprw:{settings}".rstrip(":")


def reweigh(
    settings: Reweighing,
    image: Gaussian,
    keys: Sequence[str],
    prompts: Gaussian,
    score: Score,
    labels: Tensor | None = None,
) -> Fit:
    """The weights of the prompts (C, T, D) of every class by images (N, D), none of which may be scored by them.

    keys: of the images, by which `shots` of them are drawn; labels: (N,) classes or multi-hot (N, C), which shots need;
    score: what images are near by without shots. A class without an image keeps what the prior says.
    """
    check_embeddings(image, "image", prompts.mean.shape[-1])
    if not settings.shots:
        chosen = list(nearest_images(image, mixture(prompts), score, settings.nearest))
    elif labels is None:
        raise ValueError(f"{rule_of(settings)} wants labelled images, and these have no labels: give others, or bprw")
    else:
        chosen = drawn_images(keys, labels, len(prompts.mean), settings.shots, settings.seed)
    points = points_of(image, chosen, settings.per_image, settings.seed)
    fit = fit_weights(prompts, points, settings.prior_of(prompts), settings.eps)
    if fit.change > TOLERANCE:
        log.warning("weights of prompts still change by %.1e a step after %d steps", fit.change, int(fit.steps.max()))
    return fit


def nearest_images(image: Gaussian, classes: Gaussian, score: Score, count: int) -> Tensor:
    """The rows of the `count` images (N, D) nearest to each class (C, D), the nearest first: (C, count or N).

    Equal ones go by row, whatever the blocks.
    """
    best = torch.empty(len(classes.mean), 0)
    rows = torch.empty(len(classes.mean), 0, dtype=torch.long)
    for part, block in PairScores.from_gaussians(image, classes, score).blocks():
        own = torch.arange(len(image.mean))[part].expand(len(rows), -1)
        every = torch.cat([best, block.mT], 1)  # earlier images first
        kept = largest(every, count)
        best, rows = every.gather(1, kept), torch.cat([rows, own], 1).gather(1, kept)
    return rows


def drawn_images(keys: Sequence[str], labels: Tensor, classes: int, shots: int, seed: int) -> list[Tensor]:
    """The rows of `shots` images of each class, or of all where it has fewer, which keys and seed alone determine."""
    order = torch.tensor(sorted(range(len(keys)), key=lambda row: fingerprint("shots", seed, keys[row])))
    shuffled = labels[order]
    members = (shuffled == c if labels.dim() == 1 else shuffled[:, c] > 0 for c in range(classes))
    return [order[member][:shots] for member in members]


def points_of(image: Gaussian, chosen: Sequence[Tensor], samples: int, seed: int) -> Iterator[Tensor]:
    """`samples` points of each chosen image (N, D), class by class: (images * samples, D) each."""
    generator = torch.Generator().manual_seed(seed)
    for rows in chosen:
        yield image.select(rows).sample(samples, generator).flatten(0, 1)
