"""Bayesian prompt re-weighting: points drawn from images (ProLIP C.5), and EM for the weights of prompts (A.5).

The weights pi of prompts N(mu_n, v_n) maximise sum_j log sum_n pi_n N(x_j; mu_n, v_n + eps) + sum_n (alpha_n - 1) log
pi_n over points x_j, in float64, as products of matrices cancel where variances are small.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from itertools import islice
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field, FiniteFloat, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor

from prolip.evaluation.metrics.streaming import PairScores
from prolip.gaussian import Gaussian, check_embeddings, check_gaussian, mixture
from prolip.scores import Score, largest
from prolip.utils.documents import check_unique, fingerprint

log = logging.getLogger(__name__)

#: Points per class, split among its images; the paper's text has 10 from 5 images, and 100 in all.
POINTS = 100
#: Classes fitted together, so that their likelihoods, (CLASSES, P, N), stay in the processor's cache.
CLASSES = 32
#: Most steps, and the change of a weight at which they stop.
STEPS, TOLERANCE = 1000, 1e-6


@dataclass(frozen=True, config={"extra": "forbid"})
class Reweighing:
    """Settings of re-weighting."""

    shots: NonNegativeInt = 0  # labelled images of each class; 0: the images nearest to each class's even mixture
    alpha: Annotated[FiniteFloat, Field(gt=0)] | None = None  # of the Dirichlet prior, default 5, or 2 with labels
    prior: Literal["constant", "trace"] = "constant"  # trace: alpha in proportion to 1/trace, with this mean
    eps: Annotated[FiniteFloat, Field(ge=0)] = 0.02  # added to variances
    nearest: PositiveInt = 5
    samples: PositiveInt | None = None  # points of each image, default POINTS of a class shared out
    seed: NonNegativeInt = 0  # of the drawn images and points

    @classmethod
    def parse(cls, words: str) -> Reweighing:
        """Parse `K`, `alpha=3,eps=0.01` or `K,alpha=3`, or nothing. ValueError for other words."""
        given = [word for word in words.split(",") if word]
        if given and "=" not in given[0]:
            given[0] = f"shots={given[0]}"
        try:
            return cls(**check_unique([(key, text) for key, _, text in (word.partition("=") for word in given)]))
        except ValueError as error:
            ranges = "shots, eps, seed >= 0, nearest, samples >= 1, alpha > 0, prior constant or trace"
            wanted = f"bprw, or bprw:K with K labelled images of each class, and settings as bprw:K,alpha=2 ({ranges})"
            raise ValueError(f"{words!r} is not a setting of bprw: use {wanted}") from error

    def __str__(self) -> str:
        """Return the words that `parse` reads, without defaults."""
        first = [str(self.shots)] if self.shots else []
        own = [f"{f.name}={getattr(self, f.name)}" for f in fields(self)[1:] if getattr(self, f.name) != f.default]
        return ",".join(first + own)


def rule_of(settings: Reweighing) -> str:
    """Return the rule for --prompts: `bprw` or `bprw:SETTINGS`."""
    return f"bprw:{settings}".rstrip(":")


def reweigh(  # noqa: PLR0913 (what decides the weights)
    settings: Reweighing,
    image: Gaussian,
    keys: Sequence[str],
    prompts: Gaussian,
    score: Score,
    labels: Tensor | None = None,
) -> Fit:
    """Fit the prompt weights of every class, prompts (C, T, D), to images (N, D); do not score these images with them.

    keys: of the images, which decide the drawn shots; labels: (N,) or multi-hot (N, C), for shots; score: ranks the
    nearest images.
    """
    check_embeddings(image, "image", prompts.mean.shape[-1])
    if not settings.shots:
        chosen = list(nearest_images(image, mixture(prompts), score, settings.nearest))
    elif labels is None:
        raise ValueError(f"{rule_of(settings)} needs labelled images, and these have no labels: give others, or bprw")
    else:
        chosen = drawn_images(keys, labels, len(prompts.mean), settings.shots, settings.seed)
    samples = settings.samples or max(1, POINTS // (settings.shots or settings.nearest))
    alpha = settings.alpha if settings.alpha is not None else (2.0 if settings.shots else 5.0)
    count = prompts.mean.shape[1]
    prior = alpha if settings.prior == "constant" else alpha * count * inverse_traces(prompts)
    fit = fit_weights(prompts, points_of(image, chosen, samples, settings.seed), prior, settings.eps)
    if fit.change > TOLERANCE:
        log.warning("prompt weights still change by %.1e a step after %d steps", fit.change, int(fit.steps.max()))
    return fit


def nearest_images(image: Gaussian, classes: Gaussian, score: Score, count: int) -> Tensor:
    """Return the rows of the `count` images (N, D) nearest to each class (C, D), ties by row: (C, count)."""
    best = torch.empty(len(classes.mean), 0)
    rows = torch.empty(len(classes.mean), 0, dtype=torch.long)
    for part, block in PairScores.from_gaussians(image, classes, score).blocks():
        own = torch.arange(len(image.mean))[part].expand(len(rows), -1)
        every = torch.cat([best, block.mT], 1)  # earlier images first
        kept = largest(every, count)
        best, rows = every.gather(1, kept), torch.cat([rows, own], 1).gather(1, kept)
    return rows


def drawn_images(keys: Sequence[str], labels: Tensor, classes: int, shots: int, seed: int) -> list[Tensor]:
    """Return the rows of `shots` images of each class, or of all if it has fewer, by keys and seed alone."""
    order = torch.tensor(sorted(range(len(keys)), key=lambda row: fingerprint("shots", seed, keys[row])))
    shuffled = labels[order]
    members = (shuffled == c if labels.dim() == 1 else shuffled[:, c] > 0 for c in range(classes))
    return [order[member][:shots] for member in members]


def points_of(image: Gaussian, chosen: Sequence[Tensor], samples: int, seed: int) -> Iterator[Tensor]:
    """Yield `samples` points of each chosen image (N, D), class by class: (images * samples, D) each."""
    generator = torch.Generator().manual_seed(seed)
    for rows in chosen:
        yield image.select(rows).sample(samples, generator).flatten(0, 1)


class Fit(NamedTuple):
    """Weights of classes, with their objective and steps."""

    weights: Tensor  # (C, N), rows of sum 1
    objective: Tensor  # (C,), of the prompts that remain
    steps: Tensor  # (C,)
    change: float  # the largest change of a weight in the last step


def fit_weights(
    prompts: Gaussian,
    points: Iterable[Tensor],
    alpha: float | Tensor,
    eps: float = 0.0,
    start: Tensor | None = None,
    tolerance: float = TOLERANCE,
) -> Fit:
    """Fit the weights of every class.

    prompts: (C, N, D); points: of each class (P_c, D); alpha: a number or (C, N); start: (C, N), positive, default
    `inverse_traces`. A class without points gets the mode of its prior, or even weights. ValueError for variances of 0
    without eps, another number of classes, and an alpha below 1 that could remove every prompt.
    """
    check_gaussian(prompts, "prompts")
    if prompts.mean.dim() != 3 or not prompts.mean.numel():
        raise ValueError(f"the prompts are {tuple(prompts.mean.shape)}: give (classes, prompts, D), all above 0")
    check_embeddings(Gaussian(*(x.flatten(0, 1) for x in prompts)), "prompts")
    start = inverse_traces(prompts) if start is None else start.double()
    prior = torch.as_tensor(alpha, dtype=torch.float64).expand(start.shape)
    given, done, parts = iter(points), 0, []
    while batch := list(islice(given, CLASSES)):
        rows = slice(done, done + len(batch))
        done += len(batch)
        if done > len(start):
            break
        parts.append(_fit(prompts.select(rows).to(torch.float64), batch, prior[rows], eps, start[rows], tolerance))
    if done != len(start):
        more = "more than" if done > len(start) else str(done)
        raise ValueError(f"points of {more} classes for prompts of {len(start)}: give (P, D) for each, P may be 0")
    weights, objective, steps, changes = zip(*parts)
    return Fit(torch.cat(weights), torch.cat(objective), torch.cat(steps), max(changes))


def _fit(
    z: Gaussian, points: list[Tensor], alpha: Tensor, eps: float, start: Tensor, tolerance: float
) -> tuple[Tensor, Tensor, Tensor, float]:
    """Fit some classes together, until no weight changes."""
    counts = torch.tensor([len(x) for x in points])
    least = (1 - alpha).clamp_min(0).sum(1)  # the points that the prior removes from prompts
    if ((counts > 0) & (counts <= least)).any():
        what = f"alpha {alpha.min():g} of {alpha.shape[1]} prompts with {counts[counts > 0].min()} points"
        raise ValueError(f"{what} could remove every prompt: give an alpha of 1 or more, or more points")
    x = torch.nn.utils.rnn.pad_sequence([x.to(z.mean) for x in points], batch_first=True)
    observed = torch.arange(x.shape[1]) < counts.unsqueeze(1)
    last, reached, steps = start, start.new_zeros(len(start)), torch.zeros(len(points), dtype=torch.long)
    for number, (weights, objective) in enumerate(em_steps(log_likelihoods(x, z, eps), alpha, start, observed)):
        changes = (weights - last).abs().amax(1)
        change, last, reached = float(changes.max()), weights, objective
        steps[changes > tolerance] = number
        if number and (change <= tolerance or number == STEPS):
            break
    return last, reached, steps, change


def em_steps(log_likelihood: Tensor, alpha: Tensor, start: Tensor, observed: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield weights (C, N) and their objective (C,), which never falls, beginning with `start`.

    log_likelihood: (C, P, N); alpha, start: (C, N); observed: (C, P), False where a class has fewer points. E: gamma_jn
    = pi_n f_n(x_j) / sum_i pi_i f_i(x_j), N_n = sum_j gamma_jn. M: pi_n in proportion to N_n + alpha_n - 1, or 0 where
    that is negative; even weights if no prompt remains.
    """
    weights = start
    while True:
        joint = log_likelihood + weights.log().unsqueeze(1)  # a prompt that is removed has -inf
        top = joint.amax(2, keepdim=True)
        shares = joint.sub_(top).exp_()
        total = shares.sum(2)  # one exponential for logsumexp and gamma: it takes most of the time
        penalty = torch.where(weights > 0, torch.xlogy(alpha - 1, weights), 0.0).sum(1)
        yield weights, ((total.log() + top.squeeze(2)) * observed).sum(1) + penalty
        found = (((observed / total).unsqueeze(1) @ shares).squeeze(1) + alpha - 1).clamp_min(0)
        mass = found.sum(1, keepdim=True)
        weights = torch.where(mass > 0, found / mass, 1 / found.shape[1])


def log_likelihoods(points: Tensor, prompts: Gaussian, eps: float = 0.0) -> Tensor:
    """Return log N(x; mean, var + eps) of points under their class's prompts: (C, P, D), (C, N, D) -> (C, P, N).

    -1/2 [x^2 . 1/v - 2 x . m/v + sum(m^2/v + log 2 pi v)], both relative to the mean of the prompts.
    """
    var = prompts.var + eps
    if not bool((var > 0).all()):
        raise ValueError("a prompt has a variance of 0, so its likelihood is undefined: give eps, such as 0.02")
    middle = prompts.mean.mean(1, keepdim=True)
    x, mean = points - middle, prompts.mean - middle
    constant = (mean.square() / var + (2 * math.pi * var).log()).sum(2)
    square = x.square() @ (1 / var).mT - 2 * x @ (mean / var).mT
    return -0.5 * (square + constant.unsqueeze(1))


def inverse_traces(prompts: Gaussian) -> Tensor:
    """Return 1/trace of each prompt, of sum one in each class: (C, N, D) -> (C, N). ValueError for a trace of 0."""
    trace = prompts.trace.double()
    if not bool((trace > 0).all()):
        raise ValueError("a prompt has a trace of 0, so 1/trace is infinite: give start, such as even weights")
    return (1 / trace) / (1 / trace).sum(1, keepdim=True)
