"""Uncertainty in intuitive units: nats and bits of information, and expected matches of an input."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from prolip.uncertainty.doubt import hedge


class Units(NamedTuple):
    """The units of a model's traces, fitted to matched pairs (`prolip.uncertainty.fit`).

    An input with trace `unit` * eta has eta nats of uncertainty: a text matches exp(eta) of `images` images, so it has
    log(images) - eta nats of information about its image; an image likewise among `texts` texts.
    """

    unit: float  # 2/a, the squared distance of one nat
    images: int  # number in the fitted pairs
    texts: int

    def nats(self, trace: Tensor) -> Tensor:
        """Return the uncertainty of inputs in nats, eta, from their traces in any shape."""
        return trace / self.unit

    def share(self, trace: Tensor, of: str = "images") -> Tensor:
        """Return the expected share of images that a text matches (of="texts": of texts that an image matches)."""
        return (self.nats(trace).exp() / self._total(of)).clamp(max=1.0)

    def matches(self, trace: Tensor, among: int, of: str = "images") -> Tensor:
        """Return the expected matches among `among` such images (texts)."""
        return self.share(trace, of) * among

    def information(self, trace: Tensor, of: str = "images", bits: bool = False) -> Tensor:
        """Return the nats, or bits, of information about the right image (text): log(total) - eta, at least 0."""
        nats = (math.log(self._total(of)) - self.nats(trace)).clamp(min=0.0)
        return nats / math.log(2) if bits else nats

    def code_length(self, cosine: Tensor, doubt: Tensor | None = None) -> Tensor:
        """Return the nats of K candidates as answers to N queries, -log p(k|n), p(k|n) = softmax_k (2/unit) cosine_nk.

        cosine: of the unit means, (N, K). The second argument, d (N,), turns p(k|n) into (1 - d) p(k|n) + d / K.
        """
        logits = cosine * (2 / self.unit)
        nats = logits.logsumexp(1, keepdim=True) - logits
        return nats if doubt is None else -hedge(-nats, doubt)

    def trace(self, share: Tensor, of: str = "images") -> Tensor:
        """Return the trace of an input that matches this share: the inverse of `share`."""
        return self.unit * (torch.as_tensor(share) * self._total(of)).log()

    def _total(self, of: str) -> int:
        if of not in ("images", "texts"):
            raise ValueError(f"of={of!r}: give images or texts")
        return self.images if of == "images" else self.texts


def in_words(share: float) -> str:
    """Return a share in words: "about 1 in 12", "about 2 in 3", "nearly all"."""
    if not 0 <= share <= 1:
        raise ValueError(f"share {share} is outside of [0, 1]")
    if share > 0.9:
        return "nearly all"
    if share >= 0.3:
        few = min(((abs(share - k / n), n, k) for n in (2, 3, 4, 5) for k in range(1, n)), key=lambda x: (x[0], x[1]))
        return f"about {few[2]} in {few[1]}"
    if share == 0:
        return "none"
    one_in = 1 / share
    digits = 10 ** max(0, math.floor(math.log10(one_in)) - 1)  # two digits say enough
    return f"about 1 in {round(one_in / digits) * digits:,}"


def range_in_words(low: float, high: float) -> str:
    """Return an interval of shares in words: "about 1 in 900 to 1 in 60"."""
    ends = in_words(low), in_words(high)
    return ends[0] if ends[0] == ends[1] else f"{ends[0]} to {ends[1].removeprefix('about ')}"
