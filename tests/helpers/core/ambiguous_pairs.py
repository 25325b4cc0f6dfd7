"""A world whose ambiguity is known: texts true of n of the images around a point, and embedded where those lie."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from scipy.stats import spearmanr

from prolip.embeddings import Pairs

FITTED = 300


class World(NamedTuple):
    """Pairs of the first FITTED texts alone; the further ones are for asking."""

    pairs: Pairs
    log_n: torch.Tensor  # (M,) of each text

    def correlation(self, uncertainty: torch.Tensor) -> float:
        """Spearman of the uncertainty of all texts with log n, over those that nothing was fitted to."""
        return float(spearmanr(uncertainty[FITTED:].numpy(), self.log_n[FITTED:].numpy())[0])


def points(rows: int, dim: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return F.normalize(torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed), dtype=dtype), dim=1)


def few(pairs: int = 30, dim: int = 6, **further) -> Pairs:
    """Pairs that a head is fitted to in no time."""
    image = points(pairs, dim)
    further = {"empty": image.mean(0) / image.mean(0).norm()} | further
    return Pairs.in_rows(image, F.normalize(image + 0.3 * points(pairs, dim, seed=1), dim=1), 10.0, **further)


def ambiguous_world() -> World:
    """Return a world like a trained model: a text lies in the middle of its images, farther away the more it has.

    One pair for each image of a text, 16 drawn of those that have more; the middle of all images is the empty text.
    """
    images, texts, dim, g = 600, 500, 36, torch.Generator().manual_seed(0)
    root = F.one_hot(torch.tensor(0), dim).float()
    image = F.normalize(0.6 * root + torch.randn(images, dim, generator=g) / dim**0.5, dim=1)
    n = 4 ** torch.randint(0, 5, (texts,), generator=g)
    near = (image[torch.randint(images, (texts,), generator=g)] @ image.T).argsort(1, descending=True)
    text = F.normalize(torch.stack([image[row[:k]].mean(0) for row, k in zip(near, n)]), dim=1)
    drawn = [row[:k][torch.randperm(int(k), generator=g)[:16]] for row, k in zip(near[:FITTED], n)]
    text_of = torch.arange(FITTED).repeat_interleave(torch.tensor([len(rows) for rows in drawn]))
    empty = F.normalize(image.mean(0), dim=0)
    pairs = Pairs(image=image, text=text, image_of=torch.cat(drawn), text_of=text_of, scale=15.0, empty=empty)
    return World(pairs, n.float().log())
