"""Batches, labels and sums over all pairs one at a time, which the losses are compared with."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from prolip.gaussian import Gaussian
from prolip.losses import Matches

DOUBLE = torch.float64


def gaussian(rows: int, dim: int, seed: int, dtype=DOUBLE, log_var: float = -2.0, grad: bool = True) -> Gaussian:
    generator = torch.Generator().manual_seed(seed)
    mean = F.normalize(torch.randn(rows, dim, generator=generator, dtype=DOUBLE), dim=-1)
    spread = torch.randn(rows, dim, generator=generator, dtype=DOUBLE)
    return Gaussian(mean.to(dtype).requires_grad_(grad), (spread + log_var).to(dtype).requires_grad_(grad))


def scalars(dtype=DOUBLE, scale: float = 7.0, bias: float = -4.0) -> tuple[Tensor, Tensor]:
    return torch.tensor(scale, dtype=dtype, requires_grad=True), torch.tensor(bias, dtype=dtype, requires_grad=True)


def brute_mask(labels: Matches | None, rows: int) -> Tensor:
    """Positives one pair at a time, in Python's sets."""
    mask = torch.eye(rows, dtype=torch.bool)
    if labels is not None:
        for i, true in enumerate(labels.image.tolist()):
            for j, drawn in enumerate(labels.text.tolist()):
                mask[i, j] |= drawn != -1 and drawn in set(true)
    return mask


def brute_logits(image: Gaussian, text: Gaussian, scale: Tensor, bias: Tensor) -> Tensor:
    """scale csd_similarity + bias over B x B x D: products of means minus half of both variances, summed over D."""
    per_dim = image.mean[:, None] * text.mean[None] - (image.var[:, None] + text.var[None]) / 2
    return scale * per_dim.sum(-1) + bias


def brute_ppcl(image: Gaussian, text: Gaussian, scale: Tensor, bias: Tensor, labels: Matches | None = None) -> Tensor:
    y = brute_mask(labels, len(image.mean)).to(image.mean.dtype) * 2 - 1
    return -F.logsigmoid(y * brute_logits(image, text, scale, bias)).sum() / len(image.mean)


def some_matches(rows: int, seed: int = 0, width: int = 4) -> Matches:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randint(-1, 9, shape, generator=generator)  # noqa: E731
    return Matches(draw(rows, width), draw(rows))


def leaves_of(*parts: Gaussian | Tensor) -> list[Tensor]:
    return [x for part in parts for x in (part if isinstance(part, Gaussian) else (part,))]


def assert_same_value_and_gradients(got: Tensor, want: Tensor, leaves: list[Tensor], rtol=1e-10, atol=1e-12):
    torch.testing.assert_close(got, want, rtol=rtol, atol=atol)
    for a, b in zip(torch.autograd.grad(got, leaves), torch.autograd.grad(want, leaves)):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)
