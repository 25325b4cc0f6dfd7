"""Ambiguity of an embedding: a closed formula of its mean and its tokens, with few numbers that `fit` computes.

A text that matches n of N equally likely images has log n nats of ambiguity. A head computes these nats, and a variance
in the units of squared distances, 2/a times the nats (`prolip.uncertainty.units`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from prolip.gaussian import Gaussian, upcast, without_autocast

#: Inverse temperatures, as multiples of a, of the softmax over a bank, and ranks of the cosines that are features.
TEMPERATURES, NEAREST = (0.5, 1.0, 2.0), (1, 5, 20)
BANK_FEATURES, TOKEN_FEATURES = 2 * len(TEMPERATURES) + len(NEAREST), 7
COMMON = 0.5  # tokens in more of the texts than this are ignored: start, end, padding, articles
NOTHING = 1e-18  # smaller values of a kernel are 0: denormal numbers slow matrix products down a hundred times
ROWS = 1024  # rows that a head reads at once: their kernel is (ROWS, C)
LEAST = -20.0  # least log eta of a head
SIGNS, WORDS_WIDTH = 64, 0.5  # random signs of a word; width of the kernel on the words of two texts


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Sizes of a head's inputs; 0: not used."""

    dim: int  # width of the means
    bank: int = 0  # embeddings of the other side
    vocabulary: int = 0  # of the texts' tokens
    centres: int = 0  # of a kernel, which also compares words if there is a vocabulary

    @property
    def signs(self) -> int:
        return SIGNS if self.vocabulary else 0

    @property
    def features(self) -> int:
        return (BANK_FEATURES if self.bank else 0) + (TOKEN_FEATURES if self.vocabulary else 0)


class AmbiguityHead(nn.Module):
    """log eta = gamma (w . f + sum_c u_c k_c + b) + alpha, with eta the nats of ambiguity of an embedding.

    k_c = exp((m . m_c - 1) / tau + (s . s_c - 1) / WORDS_WIDTH); f: standardised `bank_features` and `token_features`;
    m_c: centres of the kernel, means of the same side; s: `word_signs`, for texts only. `prolip.uncertainty.fit` fills
    all buffers; before, eta is 1. gamma and alpha are 1 and 0, except in older heads without words.
    """

    if TYPE_CHECKING:  # buffers are tensors

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, parts: Parts):
        super().__init__()
        self.parts = parts
        sizes = {"bank": (parts.bank, parts.dim), "bank_weight": (parts.bank,), "rarity": (parts.vocabulary,)}
        sizes |= {"centres": (parts.centres, parts.dim), "words": (parts.centres, parts.signs)}
        sizes |= {"kernel_weight": (parts.centres,), "feature_mean": (parts.features,), "weight": (parts.features,)}
        for name, shape in (sizes | {"offset": (), "alpha": ()}).items():
            self.register_buffer(name, torch.zeros(shape))
        ones = {"bank_scale": (), "kernel_width": (), "gamma": (), "feature_std": (parts.features,)}
        for name, shape in ones.items():
            self.register_buffer(name, torch.ones(shape))
        random = torch.Generator().manual_seed(0)  # equal signs of tokens (V, SIGNS) in every process
        shape = parts.vocabulary, SIGNS
        signs = 2 * torch.randint(2, shape, generator=random, dtype=torch.int8, device="cpu") - 1
        self.register_buffer("token_signs", signs.to(torch.get_default_device()), persistent=False)

    def features(self, mean: Tensor, ids: Tensor | None = None) -> Tensor:
        found = []
        if self.parts.bank:
            found.append(bank_features(mean, self.bank, self.bank_weight, self.bank_scale))
        if self.parts.vocabulary:
            if ids is None:
                raise ValueError("this head reads tokens: give the ids of the texts")
            found.append(token_features(ids, self.rarity[ids], self.rarity.amax(0)))
        return torch.cat(found, 1) if found else mean.new_zeros(len(mean), 0)

    def linear(self, features: Tensor) -> Tensor:
        """Return w . f + b of features (B, F) -> (B,)."""
        return (features - self.feature_mean) / self.feature_std @ self.weight + self.offset

    def kernel(self, mean: Tensor, ids: Tensor | None = None) -> Tensor:
        """Return k_c, 0 where it is below NOTHING: (B, D), (B, L) -> (B, C)."""
        exponent = (mean @ self.centres.T - 1) / self.kernel_width
        if self.parts.signs:  # zeros in an older head without words, which add nothing
            exponent = exponent + (self.signs(ids) @ self.words.T - self.words.square().sum(1)) / WORDS_WIDTH
        return torch.nn.functional.threshold(exponent.exp(), NOTHING, 0.0)

    def signs(self, ids: Tensor | None) -> Tensor:
        """Return unit vectors whose inner product estimates the overlap of words, (B, L) -> (B, SIGNS).

        Each is the sum of its tokens' signs, weighted by rarity, without COMMON ones: a random projection (Achlioptas
        2003) of the tf-idf vector, with an error of about 1 / sqrt(SIGNS).
        """
        if ids is None:
            raise ValueError("this head reads tokens: give the ids of the texts")
        weight = self.rarity * (self.rarity > -math.log(COMMON))
        signs = self.token_signs[ids].to(weight.dtype)
        return nn.functional.normalize(torch.einsum("bl,bls->bs", weight[ids], signs), dim=1)

    def nearest(self, mean: Tensor) -> Tensor:
        """Return the largest cosine to a centre, (B, D) -> (B,); 0 without centres."""
        if not self.parts.centres:
            return mean.new_zeros(len(mean))
        with without_autocast(mean.device):
            return in_blocks(lambda x, _: (x @ self.centres.T).amax(1), upcast(mean), None)

    def forward(self, mean: Tensor, ids: Tensor | None = None) -> Tensor:
        """Return log eta, the logarithm of the nats of ambiguity: unit means (B, D), ids (B, L) -> (B,) float32."""
        mean = upcast(mean.detach())
        with without_autocast(mean.device):
            found = self.linear(self.features(mean, ids))  # logarithm of the expected code length
            found = found + self.kernel(mean, ids) @ self.kernel_weight if self.parts.centres else found
            return self.gamma * found + self.alpha

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Accept the state of an older head without words."""
        state_dict.setdefault(f"{prefix}words", torch.zeros_like(self.words))
        super()._load_from_state_dict(state_dict, prefix, *args)


class VarianceHead(nn.Module):
    """A tower's `head`: gives a mean the trace (2/a) eta, with the same variance in every dimension."""

    log_unit: Tensor
    rows: Tensor

    def __init__(self, parts: Parts):
        super().__init__()
        self.ambiguity = AmbiguityHead(parts)
        #: log(2/a), with a as in the fit.
        self.register_buffer("log_unit", torch.tensor(0.0))
        #: Rows of the other side in the fit; a saved score stores their number.
        self.register_buffer("rows", torch.tensor(0.0), persistent=False)

    def total(self) -> Tensor:
        """Return the rows of the other side, (); 0: unknown, and eta has no bound."""
        return self.rows

    def log_trace(self, mean: Tensor, ids: Tensor | None = None) -> Tensor:
        """Return log((2/a) eta), LEAST <= log eta <= log log of the rows: (B, D) -> (B,)."""
        total = self.total().to(self.log_unit.dtype)
        most = torch.where(total > 0, total, torch.inf).log().log()
        return torch.minimum(self.ambiguity(mean, ids), most).clamp(min=LEAST) + self.log_unit

    def trace(self, mean: Tensor, ids: Tensor | None = None) -> Tensor:
        """Return (2/a) eta of unit means (B, D), some at a time -> (B,)."""
        return in_blocks(lambda x, y: self.log_trace(x, y).exp(), mean, ids)

    def log_var(self, mean: Tensor, ids: Tensor | None = None) -> Tensor:
        """Return log of the variance of each dimension, (B, D) -> (B, D), without a gradient to the means."""
        log_trace = self.log_trace(mean, ids)
        return (log_trace - math.log(mean.shape[1])).unsqueeze(1).expand(-1, mean.shape[1])

    def forward(self, tokens: Tensor, z: Gaussian, ids: Tensor | None = None) -> Gaussian:
        unit = nn.functional.normalize(z.mean, dim=-1)  # a caller may request unnormalised means
        return Gaussian(z.mean, self.log_var(unit, ids).contiguous())


def bank_features(mean: Tensor, bank: Tensor, weight: Tensor, scale: Tensor | float) -> Tensor:
    """Compute entropies and log sums of the softmax p_k ~ weight_k exp(q a m.m_k) over a bank (K, D) at several inverse
    temperatures q, and some of the largest cosines, of means (B, D): (B, BANK_FEATURES). weight: (K,), 0: no row.
    """
    cosines, log_weight, empty = mean @ bank.T, weight.log(), weight == 0
    found = []
    for q in TEMPERATURES:
        logits = q * scale * cosines + log_weight
        total = logits.logsumexp(1, keepdim=True)
        p = (logits - total).exp()
        # sum -p log p, where an empty row has p = 0 and a logit of -inf
        entropy = total.squeeze(1) - (p * logits.masked_fill(empty, 0.0)).sum(1)
        found += [entropy, total.squeeze(1)]
    present = cosines.masked_fill(empty, -1.0)
    nearest = present.topk(min(max(NEAREST), bank.shape[0]), dim=1).values
    found += [nearest[:, min(k, nearest.shape[1]) - 1] for k in NEAREST]
    return torch.stack(found, 1).masked_fill(empty.all(), 0.0)  # zeros for an empty bank


def token_features(ids: Tensor, rarity: Tensor, never: Tensor) -> Tensor:
    """Compute features of the rarity of texts' tokens, (B, L) ids -> (B, TOKEN_FEATURES), without COMMON ones.

    rarity: (B, L), log((W + 1) / (w_t + 1)) for the weight w_t of the texts with token t among W in all; never: the
    rarity of a token without a text. Features: largest, mean and least rarity, the share of unknown tokens, mean and
    largest logarithm of the ids (vocabularies are ordered by frequency), logarithm of their number.
    """
    found, kept = rarity, rarity > -math.log(COMMON)
    count = kept.sum(1).clamp(min=1)
    rank = (ids + 1.0).log()

    def mean(x: Tensor) -> Tensor:
        return (x * kept).sum(1) / count

    least = found.masked_fill(~kept, torch.inf).amin(1)
    least, unknown = least.where(kept.any(1), torch.zeros_like(least)), mean((found >= never).to(found.dtype))
    rarities = (found * kept).amax(1), mean(found), least, unknown
    return torch.stack([*rarities, mean(rank), (rank * kept).amax(1), count.to(rank.dtype).log()], 1)


def in_blocks(function: Callable[..., Tensor], mean: Tensor, ids: Tensor | None) -> Tensor:
    """Apply function(mean, ids) of means (B, D) and ids (B, L) or None, ROWS of them at a time."""
    if len(mean) <= ROWS:
        return function(mean, ids)
    found = None  # one tensor: parts kept between the blocks would stop the heap from shrinking
    for low in range(0, len(mean), ROWS):
        part = function(mean[low : low + ROWS], None if ids is None else ids[low : low + ROWS])
        if found is None:
            found = part.new_empty(len(mean), *part.shape[1:])
        found[low : low + ROWS] = part
    assert found is not None
    return found
