"""Gaussians in a plane: the two directions of largest spread, and their ellipses."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from prolip.gaussian import Gaussian


class Plane(NamedTuple):
    """A plane: centre (D,) float64, axes (2, D), orthonormal, and the share of the variance along each axis."""

    centre: Tensor
    axes: Tensor
    share: tuple[float, float]


def fit_plane(z: Gaussian) -> Plane:
    """Find the two main directions of points drawn from all Gaussians (N, D), N and D at least 2.

    Eigenvectors of cov(means) + mean(variances), which ProLIP's figure 1 (A.1) estimates from ten samples of each.
    """
    if len(z.mean) < 2 or z.mean.shape[1] < 2:
        raise ValueError(f"a map needs two Gaussians of two dimensions or more, got {tuple(z.mean.shape)}: give more")
    mean, variance = z.mean.double(), z.var.double()
    centre = mean.mean(0)
    apart = mean - centre
    covariance = apart.mT @ apart / len(mean) + torch.diag(variance.mean(0))
    values, vectors = torch.linalg.eigh(covariance)
    axes = vectors[:, -2:].flip(1).mT
    largest = axes.gather(1, axes.abs().argmax(1, keepdim=True))  # the sign of an eigenvector is arbitrary
    first, second = (values[-2:].flip(0) / values.sum().clamp(min=torch.finfo(torch.float64).tiny)).tolist()
    return Plane(centre, axes * largest.sign(), (first, second))


def place(plane: Plane, z: Gaussian) -> Tensor:
    """Place Gaussians (N, D) in the plane, (N, 5): x, y, and the ellipse of one standard deviation as both radii, the
    longer one first, and its angle in radians.
    """
    places = (z.mean.double() - plane.centre) @ plane.axes.mT
    covariance = torch.einsum("id,nd,jd->nij", plane.axes, z.var.double(), plane.axes)
    values, vectors = torch.linalg.eigh(covariance)
    radii = values.flip(1).clamp(min=0).sqrt()
    angle = torch.atan2(vectors[:, 1, 1], vectors[:, 0, 1])
    return torch.cat([places, radii, angle.unsqueeze(1)], 1)
