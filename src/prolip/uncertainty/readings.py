"""Stored parts of the training data, for the ambiguity of images, intervals of shares, and doubt."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from prolip.gaussian import upcast, without_autocast
from prolip.uncertainty.doubt import NUMBERS, Doubt, Evidence
from prolip.uncertainty.heads import AmbiguityHead, in_blocks
from prolip.uncertainty.novelty import Novelty

#: Stored general texts; the shares of the images that they match; fewest for ambiguity.
GENERAL, SHARES, FEWEST = 256, (0.01, 0.3), 4
#: Inverse temperature of the softmax over texts, as a multiple of a; nearest images, sharpness of their weights.
TEMPERATURE, NEAREST, SHARPNESS = 0.5, 60, 8.0
SAME = 0.01  # a text counts as known within this fraction of its kernel's width
ERRORS = 1.645  # standard errors to each end of a 90% interval


class Readings(nn.Module):
    """Buffers of training data; older models have not `fitted` ones."""

    general: Tensor  # texts (G, D)
    images: Tensor  # training images (K, D)
    true: Tensor  # which texts match which images, (K, G) bool
    bounds: Tensor  # (4,), true nats of a text minus its eta: lower and upper of known texts, then of unknown ones
    doubt_numbers: Tensor  # `Doubt.numbers`

    def __init__(self, dim: int, images: int):
        super().__init__()
        self.sizes = {"dim": dim, "images": images}
        for name, shape in {"general": (GENERAL, dim), "images": (images, dim), "bounds": (4,)}.items():
            self.register_buffer(name, torch.zeros(shape))
        self.register_buffer("true", torch.zeros(images, GENERAL, dtype=torch.bool))
        self.register_buffer("doubt_numbers", torch.zeros(NUMBERS, dtype=torch.float64))

    @property
    def fitted(self) -> bool:
        return bool(self.bounds.any())

    @property
    def doubt(self) -> Doubt | None:
        """The fitted doubt, or None."""
        return Doubt.from_numbers(self.doubt_numbers.tolist())

    def forward(self, mean: Tensor, scale: float) -> Tensor:
        """Return nats of ambiguity of images, unit means (B, D) -> (B,); NaN with fewer than FEWEST general texts.

        The mean of two entropies: of softmax(TEMPERATURE a cosine) over the general texts, and of how often these match
        the NEAREST images, weighted by exp(SHARPNESS cosine).
        """
        texts, images = self.general[self.general.any(1)], self.images[self.images.any(1)]
        if len(texts) < FEWEST or not len(images):
            return mean.new_full((len(mean),), math.nan)
        log_p = (TEMPERATURE * scale * mean @ texts.T).log_softmax(1)
        near = (mean @ images.T).topk(min(NEAREST, len(images)), 1)
        weight = (SHARPNESS * (near.values - near.values[:, :1])).exp()
        share = torch.einsum("bn,bng->bg", weight, self.true[near.indices, : len(texts)].to(weight.dtype))
        total = share.sum(1, keepdim=True)
        share = torch.where(total > 0, share / total.clamp(min=1e-30), 1 / len(texts))  # unknown: equal shares
        return -((log_p.exp() * log_p).sum(1) + torch.xlogy(share, share).sum(1)) / 2

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Accept the state of an older model without readings."""
        for name, x in self.named_buffers():
            state_dict.setdefault(prefix + name, x)
        super()._load_from_state_dict(state_dict, prefix, *args)


class FittedReader(NamedTuple):
    """Computes numbers from a fitted model's means on any device; returns them there in float32."""

    readings: Readings
    text: AmbiguityHead
    novelty: Novelty | None
    unit: float
    images: int

    def evidence(self, mean: Tensor) -> Evidence | None:
        """Return the input of `Doubt` for images, unit means (N, D); None for a model without novelty."""
        if self.novelty is None:
            return None
        placed = self._placed(mean)
        nats = self.novelty.references["mean"](self.novelty.distances["mean"](placed))
        return Evidence(nats.to(mean.device), (2 / self.unit * self.text.nearest(placed)).to(mean.device))

    def ambiguity(self, mean: Tensor) -> Tensor:
        """Return nats of ambiguity of images, unit means (N, D) -> (N,); NaN where they are unknown."""
        with without_autocast(mean.device):
            return in_blocks(lambda x, _: self.readings(x, 2 / self.unit), self._placed(mean), None).to(mean.device)

    def shares(self, trace: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
        """Return the 90% interval of the share of matched images: texts' traces (N,), unit means (N, D) -> (N,), (N,).

        Combines the error of the nats (`Readings.bounds`) and, for known texts, the error 1 / sqrt(n) of log n.
        """
        nats, most = trace.float().to(mean.device) / self.unit, math.log(self.images)
        known = self.text.nearest(self._placed(mean)) > 1 - SAME * self.text.kernel_width
        low, high = self.readings.bounds.view(2, 2)[(~known).long()].to(mean.device).unbind(1)
        drawn = known.to(nats) * ERRORS * (-nats / 2).exp()
        low, high = nats - torch.hypot(low.clamp(max=0), drawn), nats + torch.hypot(high.clamp(min=0), drawn)
        return (low.clamp(max=most) - most).exp(), (high.clamp(max=most) - most).exp()

    def _placed(self, mean: Tensor) -> Tensor:
        return upcast(mean.detach()).to(self.readings.bounds.device)


def reader_of(model: Any) -> FittedReader | None:
    """Return the reader of a model with fitted variances, ours or one of OpenCLIP's; None without readings."""
    readings, novelty = getattr(model, "readings", None), getattr(model, "novelty", None)
    if not isinstance(readings, Readings) or not readings.fitted:
        return None
    head: Any = getattr(model.text, "head", model.text)
    known = novelty if isinstance(novelty, Novelty) and novelty.fitted else None
    return FittedReader(readings, head.ambiguity, known, head.log_unit.exp().item(), int(head.total()))


def ambiguity_of(model: Any, image: Tensor) -> Tensor:
    """Return nats of ambiguity of pixels (B, 3, H, W), (B,) float32, by `Readings`. ValueError without them."""
    reader = reader_of(model)
    if reader is None:
        raise ValueError("this model has no ambiguity of images: fit it with prolip uncertainty")
    with torch.no_grad():
        return reader.ambiguity(model.encode_image(image).mean)
