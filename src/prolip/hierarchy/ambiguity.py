"""PCME's studies (its figures 7, 8): uncertainty of erased images, of two mixed, of texts that lost words.

Strengths go from nothing to nearly all, and a stronger change contains the weaker one of the same input: the same cells
and words and further ones. So whatever is measured rises or falls because of the strength alone.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor

from prolip.data.emoji import Concept, Corpus
from prolip.evaluation.model import Embedder
from prolip.gaussian import Gaussian, concatenate
from prolip.measures import inclusion_test

#: Share erased or dropped; of mixing, the weight of the second image, 0.5 being the most ambiguous.
ERASED = (0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)
MIXED = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
DROPPED = (0.0, 0.2, 0.4, 0.6, 0.8)
#: Cells of an image in each direction, each erased as a whole.
CELLS = 8
BATCH = 128


class Study(NamedTuple):
    """One kind of change.

    strengths: (S,), the first 0, the original itself; uncertainty: (S, N); included: (S, N), H(original in changed),
    NaN for points.
    """

    name: str
    strengths: tuple[float, ...]
    uncertainty: np.ndarray
    included: np.ndarray

    @property
    def spearman(self) -> float:
        """Rank correlation of uncertainty with strength within each input, their mean; 1: always rises."""
        rows = [spearmanr(self.strengths, x).statistic for x in self.uncertainty.T if np.ptp(x) > 0]
        return float(np.mean(rows)) if rows else float("nan")

    @property
    def risen(self) -> np.ndarray:
        """(S,) share of the inputs that are more uncertain than they were."""
        return (self.uncertainty > self.uncertainty[:1]).mean(1)

    @property
    def rate(self) -> np.ndarray:
        """(S,) share of the inputs that the changed one includes, H > 0; NaN at strength 0."""
        rate = np.where(np.isnan(self.included).any(1), np.nan, (self.included > 0).mean(1))
        rate[0] = np.nan
        return rate


def erase(pixels: Tensor, share: float, generator: torch.Generator, cells: int = CELLS) -> Tensor:
    """A share of the cells of every image set to 0, the mean colour of normalised pixels, (B, 3, H, W).

    The order in which cells go is drawn by the generator, for each image its own.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share {share}: give one from 0 to 1")
    order = torch.rand(len(pixels), cells * cells, generator=generator).argsort(1).argsort(1)
    gone = (order < round(share * cells * cells)).view(-1, 1, cells, cells).float()
    mask = torch.nn.functional.interpolate(gone, pixels.shape[-2:], mode="nearest")
    return pixels * (1 - mask)


def mix(pixels: Tensor, weight: float) -> Tensor:
    """(1 - weight) x + weight y, y the next image, of the last the first; PCME figure 8: (B, 3, H, W)."""
    return torch.lerp(pixels, pixels.roll(-1, 0), weight)


def drop_words(text: str, share: float, rng: np.random.Generator) -> str:
    """The text without a share of its words, one at least left; which go first is drawn by rng."""
    words = text.split()
    order = rng.permutation(len(words))
    gone = set(order[: min(len(words) - 1, round(share * len(words)))].tolist())
    return " ".join(word for i, word in enumerate(words) if i not in gone)


def long_caption(concept: Concept) -> str:
    """A concept's name and keywords as one caption, which has words to lose."""
    words = dict.fromkeys(word for text in (concept.name, *concept.keywords) for word in text.split())
    return " ".join(words)


def study_images(embedder: Embedder, corpus: Corpus, most: int = 256, seed: int = 0) -> dict[str, Study]:
    """Erasing and mixing of at most `most` drawings, drawn by `seed`."""
    rng = np.random.default_rng(seed)
    rows = np.sort(rng.permutation(len(corpus.drawings))[:most])
    if len(rows) < 2:
        raise ValueError(f"{len(rows)} drawings: mixing needs two; give more with --data")
    rng.shuffle(rows)  # neighbours, that are mixed, show different things
    pixels = torch.stack([embedder.preprocess(corpus.drawings[i].image()) for i in rows])

    def erased(share: float) -> Tensor:
        return erase(pixels, share, torch.Generator().manual_seed(seed))

    changes: dict[str, tuple[Sequence[float], Callable[[float], Tensor]]] = {
        "erase": (ERASED, erased), "mix": (MIXED, lambda weight: mix(pixels, weight)),
    }  # fmt: skip
    return {
        name: study_of(name, embedder, strengths, [encoded(embedder, change(s)) for s in strengths])
        for name, (strengths, change) in changes.items()
    }


def study_texts(embedder: Embedder, corpus: Corpus, most: int = 256, seed: int = 0) -> Study:
    """Dropping words of at most `most` concepts' long captions, those of five words or more."""
    captions = [caption for caption in map(long_caption, corpus.concepts) if len(caption.split()) >= 5]
    if not captions:
        raise ValueError("no concept has a name and keywords of five words: give shards with keywords")
    chosen = [captions[i] for i in np.sort(np.random.default_rng(seed).permutation(len(captions))[:most])]
    found = []
    for share in DROPPED:
        texts = [drop_words(text, share, np.random.default_rng([seed, i])) for i, text in enumerate(chosen)]
        found.append(embedder.embed_texts(texts))
    return study_of("drop", embedder, DROPPED, found)


def study_of(name: str, embedder: Embedder, strengths: Sequence[float], found: Sequence[Gaussian]) -> Study:
    """What the model's method reads off the Gaussians (N, D) of every strength, and the inclusion of the first."""
    uncertainty = np.stack([embedder.score.uncertainty(z).double().numpy() for z in found])
    if embedder.probabilistic:
        included = np.stack([inclusion_test(found[0], z).double().numpy() for z in found])
    else:
        included = np.full_like(uncertainty, np.nan)
    return Study(name, tuple(strengths), uncertainty, included)


def encoded(embedder: Embedder, pixels: Tensor) -> Gaussian:
    """Any number of images, some at a time."""
    return concatenate([embedder.encode_image(part) for part in pixels.split(BATCH)])


def format_study(study: Study) -> str:
    """Its figures in words."""
    lines = [f"{study.name}: {study.uncertainty.shape[1]} inputs, Spearman of uncertainty with strength"
             f" {study.spearman:+.3f}", f"{'strength':>10}{'uncertainty':>14}{'risen':>10}{'H > 0':>10}"]  # fmt: skip
    for s, x, risen, rate in zip(study.strengths, study.uncertainty.mean(1), study.risen, study.rate):
        cell = f"{'-':>10}" if np.isnan(rate) else f"{rate:10.1%}"
        lines.append(f"{s:10.3g}{x:14.4g}{risen:10.1%}{cell}")
    return "\n".join(lines)
