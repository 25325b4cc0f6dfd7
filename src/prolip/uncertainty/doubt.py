"""Doubt: the share of a match probability that comes from the base rate instead of the model."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from prolip.gaussian import upcast

VERSION, NUMBERS = 1, 12  # version and count of the stored numbers of a doubt
LOW, ONE_IN = -5.0, 20  # non-matches with a logit below LOW are sampled, one in ONE_IN
RIDGE = 1.0  # weight of the prior N(0, 1) of the standardised coefficients, in matches
GALLERY = 8  # fewest images of a gallery with a mean


class Evidence(NamedTuple):
    """Evidence on images: nats of novelty at the mean (N,), and a * cosine of the nearest known text (N,)."""

    novelty: Tensor
    nearest: Tensor

    @property
    def columns(self) -> Tensor:
        """log(1 + novelty) and nearest, (N, 2) float64."""
        return torch.stack([self.novelty.double().log1p(), self.nearest.double()], 1)


class Doubt(NamedTuple):
    """Doubt d = sigmoid(b + b_h log(1 + novelty) + b_m nearest + b_g gallery mean of nearest)."""

    alone: tuple[float, ...]  # b, b_h, b_m
    among: tuple[float, ...]  # b, b_h, b_m, b_g, for images in a gallery
    least: tuple[float, ...]  # smallest `Evidence` columns in the fit
    most: tuple[float, ...]
    version: int = VERSION

    def of(self, evidence: Evidence, gallery: Evidence | None = None) -> Tensor:
        """Return d of images, (N,) float32. gallery: images of the same kind; used if there are GALLERY or more."""
        columns, weights = evidence.columns, self.alone
        if gallery is not None and len(gallery.nearest) >= GALLERY:
            mean = gallery.nearest.double().mean().expand(len(columns), 1)
            columns, weights = torch.cat([columns, mean], 1), self.among
        return (columns @ columns.new_tensor(weights[1:]) + weights[0]).sigmoid().float()

    def extrapolates(self, evidence: Evidence) -> Tensor:
        """Return True for images outside of the fitted range, (N,) bool."""
        columns = evidence.columns
        return (columns[:, 0] > self.most[0]) | (columns[:, 1] < self.least[1])

    @property
    def numbers(self) -> list[float]:
        """The version and all numbers, for `from_numbers`."""
        return [self.version, *self.alone, *self.among, *self.least, *self.most]

    @classmethod
    def from_numbers(cls, x: list[float]) -> Doubt | None:
        """Read `numbers`; None for zeros, which mean none. Raises ValueError for another version."""
        if not x[0]:
            return None
        if int(x[0]) != VERSION:
            remedy = "fit it again with prolip uncertainty, or use the prolip that wrote it"
            raise ValueError(f"the model's doubt has version {x[0]:g}, expected {VERSION}: {remedy}")
        return cls(tuple(x[1:4]), tuple(x[4:8]), tuple(x[8:10]), tuple(x[10:12]))


class Cases(NamedTuple):
    """Pairs for the fit, (P,) each."""

    logit: Tensor
    share: Tensor
    match: Tensor
    weight: Tensor
    image: Tensor  # int64, rows of the columns
    columns: Tensor  # (I, 3): the `Evidence` and the gallery mean of nearest


def with_doubt(probability: Tensor, doubt: Tensor, without: Tensor | float) -> Tensor:
    """Return (1 - d) p + d q, q: the probability without the image."""
    d = upcast(doubt)
    return (1 - d) * probability + d * without


def pick_cases(
    logit: Tensor, share: Tensor, match: Tensor, evidence: list[Evidence], weight: Tensor, seed: int = 0
) -> Cases:
    """Choose pairs of K images, each in E kinds, with T texts: all matches and likely pairs, a sample of the others.

    logit: (E, K, T); share: (T,), of the images that a text matches; match: (K, T) bool; evidence: of each kind, which
    is a gallery; weight: (T,), the number of texts that each represents.
    """
    random = torch.Generator().manual_seed(seed)
    likely = (logit > LOW) | match
    drawn = torch.randint(ONE_IN, logit.shape, generator=random) == 0
    kind, image, text = (likely | drawn).nonzero(as_tuple=True)
    times = torch.where(likely[kind, image, text], 1.0, float(ONE_IN)).double() * weight[text].double()
    means = [one.nearest.double().mean().expand(len(one.nearest), 1) for one in evidence]
    rows = torch.cat([torch.cat([one.columns, mean], 1) for one, mean in zip(evidence, means)])
    chosen = logit[kind, image, text].double(), share[text].double(), match[image, text].double()
    return Cases(*chosen, times, kind * logit.shape[1] + image, rows)


def fit_doubt(cases: Cases) -> Doubt:
    """Fit the weights of `Doubt` by the log loss of (1 - d) sigmoid(z) + d share, in float64."""
    from scipy.optimize import minimize

    columns = cases.columns
    middle, width = columns.mean(0), columns.std(0, correction=0).clamp(min=1e-6)
    model, matches = cases.logit.sigmoid(), (cases.weight * cases.match).sum().clamp(min=1)

    def weights(count: int) -> tuple[float, ...]:
        standard = (columns[:, :count] - middle[:count]) / width[:count]

        def loss(x: np.ndarray) -> tuple[float, np.ndarray]:
            theta = torch.from_numpy(x).requires_grad_()
            p = with_doubt(model, (theta[0] + standard @ theta[1:]).sigmoid()[cases.image], cases.share)
            p = p.clamp(1e-12, 1 - 1e-12)
            nats = -(cases.match * p.log() + (1 - cases.match) * (-p).log1p())
            total = (cases.weight @ nats + RIDGE / 2 * theta[1:].square().sum()) / matches
            total.backward()
            assert theta.grad is not None
            return total.item(), theta.grad.numpy()

        start = np.array([-2.0, *[0.0] * count])
        found = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=[(-20, 20)] * (1 + count)).x
        slopes = found[1:] / width[:count].numpy()
        return (float(found[0] - slopes @ middle[:count].numpy()), *map(float, slopes))

    least, most = columns.amin(0).tolist(), columns.amax(0).tolist()
    return Doubt(weights(2), weights(3), tuple(least[:2]), tuple(most[:2]))


def hedge(log_p: Tensor, doubt: Tensor) -> Tensor:
    """Return log((1 - d) p + d / K) of K candidate answers: log probabilities (N, K), doubts (N,) -> (N, K)."""
    d = upcast(doubt).unsqueeze(1).to(log_p.dtype)
    return torch.logaddexp(log_p + (-d).log1p(), d.log() - math.log(log_p.shape[1]))
