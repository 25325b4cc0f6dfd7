"""The positive pairs of a batch, and the gradient of a block of pairs."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from prolip.gaussian import kind_of

NO_MATCH = -1


class Matches(NamedTuple):
    """Known matches of a batch: pair (i, j) is a match if text[j] is in image[i], or i == j."""

    image: Tensor  # (B, K) int64, the ids of all texts that match an image, padded with -1
    text: Tensor  # (B,) int64, the id of each text; -1: unknown, matches its own image only


Labels = Matches | None


class Positives(NamedTuple):
    """The positive pairs among rows (n) and columns (m)."""

    diagonal: int | None = None  # row i matches column i + diagonal
    rows: Tensor | None = None  # ids as in `Matches` (n, K)
    columns: Tensor | None = None  # (m,)

    def select(self, part: slice) -> Positives:
        diagonal = None if self.diagonal is None else self.diagonal + part.start
        return Positives(diagonal, None if self.rows is None else self.rows[part], self.columns)

    def flip(self, z: Tensor) -> Callable[[Tensor], object]:
        """Return a function that negates, in place, the positive pairs of a matrix of z's shape and dtype (n, m)."""
        if self.rows is None or self.columns is None:
            offset = z.shape[1] if self.diagonal is None else self.diagonal
            return lambda x: x.diagonal(offset).neg_()
        signs = torch.ones_like(z).masked_fill_(self.mask(z), -1)
        return lambda x: x.mul_(signs)

    def mask(self, z: Tensor) -> Tensor:
        """Return True for positive pairs, (n, m). Compares one id of every row at a time: (n, K, m) is never built."""
        mask = torch.zeros_like(z, dtype=torch.bool)
        if self.rows is not None and self.columns is not None:
            for ids in self.rows.unbind(1):
                mask |= ids.unsqueeze(1) == self.columns
            mask &= self.columns != NO_MATCH
        if self.diagonal is not None:
            mask.diagonal(self.diagonal).fill_(True)
        return mask


class BlockGradient(NamedTuple):
    """Gradient of the loss by the logits of a block of pairs (n, m), with its sums per row (n,) and column (m,)."""

    pairs: Tensor
    rows: Tensor
    columns: Tensor


def check_matches(labels: Matches | None, rows: int) -> None:
    """Raise TypeError unless the labels are `Matches` of whole numbers, ValueError unless they belong to `rows`."""
    if labels is None:
        return
    if not isinstance(labels, Matches) or any(x.is_floating_point() or x.is_complex() for x in labels):
        kinds = [kind_of(x) for x in labels] if isinstance(labels, Matches) else kind_of(labels)
        raise TypeError(f"labels are {kinds}, expected prolip.losses.Matches(image, text) with ids in torch.int64")
    if labels.image.ndim != 2 or len(labels.image) != rows or labels.text.shape != (rows,):
        got = f"image ids {tuple(labels.image.shape)} and text ids {tuple(labels.text.shape)} for {rows} pairs"
        raise ValueError(f"labels got {got}: give ({rows}, K) padded with -1 and ({rows},)")
