"""Images at levels, from a part to the whole: ProLIP figures 8, C.2 and C.3."""
from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image

from prolip.data.emoji import Corpus
from prolip.data.pictures import open_image
from prolip.evaluation.model import Embedder
from prolip.gaussian import Gaussian
from prolip.hierarchy import figures, levels
from prolip.hierarchy.ambiguity import encoded, erase
from prolip.hierarchy.hierarimgs import read_levels
from prolip.utils.style import INK, styled

#: Shares of a drawing that are missing at each level but the last, which is the drawing itself.
ERASED = (0.75, 0.5, 0.25)
WHITE = 255.0


class Pictures:
    """N images at L levels, general to specific, the last the original, and what a model makes of them.

    z: L Gaussians (N, D); picture: of (row, level).
    """

    def __init__(self, embedder: Embedder, z: Sequence[Gaussian], picture: Callable[[int, int], Image.Image]):
        self.z, self.picture, self._embedder = list(z), picture, embedder

    @classmethod
    def erased(cls, embedder: Embedder, corpus: Corpus, seed: int = 0) -> Pictures:
        """The corpus's drawings with ever fewer white cells, drawn by the seed: a level's are among those above."""

        def picture(row: int, level: int) -> Image.Image:
            image = corpus.drawings[row].image()
            return image if level == len(ERASED) else without_cells(image, ERASED[level], seed + row)

        pixels = [
            torch.stack([embedder.preprocess(picture(row, level)) for row in range(len(corpus.drawings))])
            for level in range(len(ERASED) + 1)
        ]
        return cls(embedder, [encoded(embedder, x) for x in pixels], picture)

    @classmethod
    def read(cls, embedder: Embedder, folder: str | Path) -> Pictures:
        """Those of a folder as `prolip hierarchy hierarimgs` writes it. ValueError for another."""
        files = read_levels(folder)
        z = [levels.embed_files(embedder, paths, sys.stderr.isatty()) for paths in zip(*files)]
        return cls(embedder, z, lambda row, level: open_image(files[row][level]))

    @cached_property
    def inclusions(self) -> list[levels.Inclusion]:
        """H(original in level i) of every level but the last."""
        return levels.inclusion_by_level(self.z)

    @cached_property
    def traces(self) -> levels.LevelTraces:
        """Uncertainties, (N, L)."""
        return levels.traces_by_level([self._embedder.score.uncertainty(z).numpy() for z in self.z])

    def failures(self, most: int) -> np.ndarray:
        """Rows whose level 0 does not include the original, H <= 0, the least H first."""
        h = self.inclusions[0].h
        order = h.argsort(kind="stable")
        return order[h[order] <= 0][:most]


def without_cells(image: Image.Image, share: float, seed: int) -> Image.Image:
    """The image with a share of its 8 x 8 cells white; with one seed a larger share has the cells of the smaller."""
    pixels = torch.from_numpy(np.asarray(image, dtype=np.float32)).permute(2, 0, 1)
    kept = erase(pixels[None] - WHITE, share, torch.Generator().manual_seed(seed))[0] + WHITE
    return Image.fromarray(kept.permute(1, 2, 0).byte().numpy())


def inclusion(pictures: Pictures, seed: int = 0) -> Figure:
    """Histograms of H(original in level i) below one image at these levels, drawn by the seed: ProLIP figure 8."""
    row = int(np.random.default_rng(seed).integers(len(pictures.z[0].mean)))
    shown = [np.asarray(pictures.picture(row, level)) for level in range(len(pictures.z) - 1)]
    return figures.inclusion_by_level(pictures.inclusions, shown)


@styled
def failures(pictures: Pictures, most: int = 8) -> Figure:
    """Images that their own level 0 does not include, those with the least H, at all levels: ProLIP figure C.3."""
    rows, count = pictures.failures(most), len(pictures.z)
    figure = Figure(figsize=(max(4.8, 1.15 * max(1, len(rows))), 1.2 * count + 0.7), layout="constrained")
    share = 1 - pictures.inclusions[0].rate
    total = len(pictures.z[0].mean)
    figure.suptitle(f"not included in level 0: {share:.0%} of {total:,} images; the least H", x=0.01, ha="left")
    axes = figure.subplots(count, max(1, len(rows)), squeeze=False)
    for level, line in enumerate(axes):
        for ax in line:
            ax.set_axis_off()
        for ax, row in zip(line, rows):
            ax.imshow(np.asarray(pictures.picture(int(row), level)))
            ax.set_title(f"{pictures.traces.values[row, level]:.4g}", fontsize=8.5, fontweight="normal", loc="center")
        name = "original" if level == count - 1 else f"level {level}"
        line[0].text(-0.1, 0.5, name, transform=line[0].transAxes, rotation=90, va="center", ha="right", color=INK,
                     fontsize=9.5)  # fmt: skip
    return figure
