"""Traces by level of texts (ProLIP figure 7) and the inclusion test among levels of images (figure 8)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from prolip.embedder import Embedder
from prolip.evaluation.metrics.selective import spearman
from prolip.gaussian import Gaussian
from prolip.measures import inclusion_test

BATCH = 64


class Inclusion(NamedTuple):
    """H(original in level i) of N images, ProLIP (4): h (N,); rate, the share with H > 0; both directions are -h."""

    level: int
    h: np.ndarray

    @property
    def rate(self) -> float:
        """The share of the images that are included in this level of themselves."""
        return float((self.h > 0).mean())


class LevelTraces(NamedTuple):
    """Uncertainty by level, values (N, L), general to specific; spearman: of all values with the level."""

    values: np.ndarray

    @property
    def spearman(self) -> float:
        """Rank correlation with the level, -1: the more specific, the more certain; NaN where nothing varies."""
        return spearman(self.values.ravel(), np.tile(np.arange(self.values.shape[1]), len(self.values)))

    @property
    def in_order(self) -> float:
        """Share of neighbouring levels of one chain of which the more general is the more uncertain."""
        return float((self.values[:, :-1] > self.values[:, 1:]).mean())


def inclusion_by_level(levels: Sequence[Gaussian]) -> list[Inclusion]:
    """H(original in level i) for every level but the last, which is the original: L Gaussians (N, D).

    H is log_inclusion(original, i) - log_inclusion(i, original) at eps = 0. ValueError for fewer than two levels and
    for points, which include nothing.
    """
    if len(levels) < 2:
        raise ValueError(f"{len(levels)} levels: give two or more, the original last")
    if any(bool(z.log_var.isneginf().any()) for z in levels):
        raise ValueError("these embeddings are points, which include nothing: use a model with variances")
    return [Inclusion(i, inclusion_test(levels[-1], z).double().numpy()) for i, z in enumerate(levels[:-1])]


def traces_by_level(levels: Sequence[np.ndarray]) -> LevelTraces:
    """Uncertainties (N,) of each level, general to specific."""
    return LevelTraces(np.stack(levels, 1))


def embed_files(embedder: Embedder, files: Iterable[Path], progress: bool = False) -> Gaussian:
    """Image files, decoded in threads, (N, D). ValueError for a damaged one."""
    return embedder.embed_images(tqdm(list(files), desc="images", unit="", disable=not progress), BATCH)


def format_levels(inclusions: Sequence[Inclusion], traces: LevelTraces, what: str) -> str:
    """What the figures show, as a person reads it."""
    lines = [
        f"{what}: {len(traces.values):,} chains; mean uncertainty by level, general to specific: "
        + ", ".join(f"{x:.4g}" for x in traces.values.mean(0))
        + f"; Spearman with it {traces.spearman:+.3f}, neighbours in order {traces.in_order:.1%}"
    ]
    for x in inclusions:
        lines.append(f"  last in level {x.level}: H > 0 for {x.rate:.1%}, median H {np.median(x.h):+.4g}")
    return "\n".join(lines)
