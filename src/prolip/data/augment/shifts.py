"""Strong image changes, far from training's augmentation: errors on changed images predict errors on new data."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as F

from prolip.data.augment.affine import LUMA

FILTER = F.InterpolationMode.BILINEAR


def between(low: float, high: float, random: torch.Generator) -> float:
    """Draw a number uniformly between `low` and `high`."""
    return low + (high - low) * torch.rand((), generator=random).item()


def blur(x: Tensor, random: torch.Generator) -> Tensor:
    """Blur with a Gaussian of sigma 1/30 to 1/15 of the longer side."""
    sigma = max(x.shape[-2:]) * between(1 / 30, 1 / 15, random)
    return F.gaussian_blur(x, [2 * int(2 * sigma) + 1] * 2, [sigma] * 2)


def pixelate(x: Tensor, random: torch.Generator) -> Tensor:
    """Reduce to 10 to 16 pixels a side."""
    small = F.resize(x, [int(between(10, 17, random))] * 2, FILTER, antialias=True)
    return F.resize(small, list(x.shape[-2:]), F.InterpolationMode.NEAREST)


def grey(x: Tensor, random: torch.Generator) -> Tensor:
    """Remove the colours."""
    return F.rgb_to_grayscale(x, 3)


def edges(x: Tensor, random: torch.Generator) -> Tensor:
    """Draw the outlines, dark on white."""
    light = torch.einsum("chw,c->hw", x, x.new_tensor(LUMA))
    slope = sum(torch.gradient(light, dim=dim)[0].square() for dim in (0, 1))
    line = torch.as_tensor(slope).sqrt()
    return (1 - line / line.amax().clamp(min=1e-6)).expand_as(x)


def hue(x: Tensor, random: torch.Generator) -> Tensor:
    """Shift the hue by a quarter to three quarters of the circle."""
    return F.adjust_hue(x, (between(0.25, 0.75, random) + 0.5) % 1 - 0.5)


def warp(x: Tensor, random: torch.Generator, knots: int, strength: float) -> Tensor:
    """Bend: displace a grid of `knots` x `knots` points by N(0, strength^2) sides each, and interpolate."""
    moved = strength * torch.randn(1, 2, knots, knots, generator=random)
    field = torch.nn.functional.interpolate(moved, list(x.shape[-2:]), mode="bicubic", align_corners=True)
    return F.elastic(x, 2 * field.movedim(1, -1), FILTER, fill=background(x).flatten().tolist())


def cut(x: Tensor, random: torch.Generator) -> Tensor:
    """Cover one half with the background."""
    out, dim = x.clone(), 1 + int(torch.randint(2, (), generator=random))
    half = x.shape[dim] // 2
    out.narrow(dim, int(torch.randint(2, (), generator=random)) * half, half).copy_(background(x))
    return out


def rotate(x: Tensor, random: torch.Generator) -> Tensor:
    """Rotate by 45 to 60 degrees in either direction."""
    sign = 1 if torch.rand((), generator=random) < 0.5 else -1
    return F.rotate(x, sign * between(45, 60, random), FILTER, fill=background(x).flatten().tolist())


def stretch(x: Tensor, random: torch.Generator) -> Tensor:
    """Squeeze to 40 to 60% of the height or the width."""
    height, width = x.shape[-2:]
    share, upright = between(0.4, 0.6, random), torch.rand((), generator=random) < 0.5
    small = [height, max(1, int(share * width))] if upright else [max(1, int(share * height)), width]
    pressed = F.resize(x, small, FILTER, antialias=True)
    left, top = (width - small[1]) // 2, (height - small[0]) // 2
    out = background(x).expand_as(x).clone()
    out[:, top : top + small[0], left : left + small[1]] = pressed
    return out


def posterise(x: Tensor, random: torch.Generator) -> Tensor:
    """Keep three levels of each colour."""
    return (2 * x).round() / 2


def background(x: Tensor) -> Tensor:
    """Return the median colour of the four edges, (3, 1, 1)."""
    edge = torch.cat([x[:, 0], x[:, -1], x[:, :, 0], x[:, :, -1]], 1)
    return edge.median(1).values.view(3, 1, 1)


CHANGES: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "blur": blur,
    "pixelate": pixelate,
    "grey": grey,
    "edges": edges,
    "hue": hue,
    "bend": partial(warp, knots=4, strength=0.12),
    "crumple": partial(warp, knots=10, strength=0.05),
    "cut": cut,
    "rotate": rotate,
    "stretch": stretch,
    "posterise": posterise,
}


def changed(x: Tensor, seed: int) -> Tensor:
    """Apply each of the CHANGES to an image (3, H, W) in [0, 1] -> (11, 3, H, W). Equal seeds give equal bits."""
    numbered = enumerate(CHANGES.values(), seed)
    return torch.stack([change(x, torch.Generator().manual_seed(n)).clamp(0, 1) for n, change in numbered])
