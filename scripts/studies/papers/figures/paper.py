"""Figures 4, 8, 9, C.1, C.2, C.3 and C.5 of the ProLIP paper.

They show certain and uncertain drawings and texts; images at levels, from a part to the whole; captions met from a
drawing to its root, next to its own captions; and weights of prompts next to the images of their classes.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image
from torch import Tensor

from prolip.corpora.emoji.corpus import LEVELS, Corpus
from prolip.corpora.emoji.result import CorpusResult
from prolip.data.images import open_image
from prolip.embedder import Embedder
from prolip.gaussian import Gaussian
from prolip.hierarchy import levels
from prolip.hierarchy.hierarcaps import embed_files
from prolip.hierarchy.hierarimgs import read_levels
from prolip.hierarchy.traversal import Traversal
from prolip.measures import csd_distance
from prolip.prompts.weights import PromptWeights
from prolip.utils.style import BAD, GOOD, INK, LOOKS, MUTED, lettering, styled

ENDS = ("certain", "uncertain")
#: Share of all inputs that count as certain, and as uncertain, in figure C.1.
SHARE = 0.2
COLUMNS = 4
#: Characters per line of captions.
WIDTH = 88
CLASSES, PICTURES, PROMPTS = 3, 5, 5
#: Cells of an image in each direction, each erased as a whole.
CELLS = 8
#: Missing share of a drawing at each level except the last, which is the drawing itself.
ERASED = (0.75, 0.5, 0.25)
WHITE = 255.0


class Corner(NamedTuple):
    """Matches with a certain or uncertain image and text: (P,) rows of drawings and of texts, and csd."""

    image: str
    text: str
    drawings: np.ndarray
    texts: np.ndarray
    csd: np.ndarray


def ends(uncertainty: np.ndarray, count: int) -> dict[str, np.ndarray]:
    """Return the rows of the least and the most uncertain inputs (N,), both from the outside in, without overlap."""
    order = uncertainty.argsort(kind="stable")
    count = min(count, len(order) // 2)
    return {"certain": order[:count], "uncertain": order[::-1][:count]}


def corners(result: CorpusResult, each: int = COLUMNS, seed: int = 0) -> list[Corner]:
    """Return at most `each` matches for every combination of a certain or uncertain image and text.

    Certain: in the fifth with the least uncertainty, among drawings or among texts. Only the seed decides the draw:
    drawings with a matching text in that fifth, then one of these texts.
    """
    rng = np.random.default_rng(seed)
    found, uncertainty = [], {"image": result.uncertainty(result.image), "text": result.uncertainty(result.text)}
    fifths = {kind: ends(x, max(1, round(SHARE * len(x)))) for kind, x in uncertainty.items()}
    for image in ENDS:
        for text in ENDS:
            rows = np.sort(fifths["text"][text])
            able = [i for i in np.sort(fifths["image"][image]) if result.text_relation[rows, i].any()]
            drawings = np.array(sorted(rng.choice(able, min(each, len(able)), replace=False)), dtype=np.int64)
            texts = np.array([rng.choice(rows[result.text_relation[rows, i]]) for i in drawings], dtype=np.int64)
            distance = csd_distance(result.image.select(drawings), result.text.select(texts)).numpy()
            found.append(Corner(image, text, drawings, texts, distance))
    return found


@styled
def certain_and_uncertain(result: CorpusResult, drawings: int = 8, texts: int = 10) -> Figure:
    """Draw the least and the most uncertain drawings and texts with their uncertainties, ProLIP figure 4."""
    image, text = result.uncertainty(result.image), result.uncertainty(result.text)
    pictures, words = ends(image, drawings), ends(text, texts)
    rows = -(-max(len(x) for x in pictures.values()) // COLUMNS)
    figure = Figure(figsize=(9.6, 1.55 * rows + 0.25 * texts + 0.7), layout="constrained")
    halves: Any = figure.subfigures(1, 2, wspace=0.04)
    for half, end, colour in zip(halves, ENDS, (GOOD, BAD)):
        half.suptitle(f"{end}: drawings above, texts below", color=colour)
        grid = half.add_gridspec(rows + 1, COLUMNS, height_ratios=[1.4] * rows + [0.25 * texts])
        for place in range(rows * COLUMNS):
            ax = half.add_subplot(grid[place // COLUMNS, place % COLUMNS])
            ax.set_axis_off()
            if place < len(pictures[end]):
                row = pictures[end][place]
                _picture(ax, result, row, [_name(result, row), f"{image[row]:.3g}"])
        ax = half.add_subplot(grid[rows, :])
        ax.set_axis_off()
        ax.set(xlim=(0, 1), ylim=(texts, 0))
        for line, row in enumerate(words[end]):
            ax.text(0, line + 0.5, f"{text[row]:.3g}", va="center", color=MUTED, fontsize=9)
            said = lettering(f"“{_cut(result.table.texts[row])}”")
            ax.text(0.14, line + 0.5, said, va="center", color=INK, fontsize=10)
    return figure


@styled
def pairs(result: CorpusResult, each: int = COLUMNS, seed: int = 0) -> Figure:
    """Draw matches of certain and uncertain images and texts, ProLIP figure C.1.

    Below each drawing are its text, the uncertainties of both, and csd, the expected squared distance.
    """
    image, text = result.uncertainty(result.image), result.uncertainty(result.text)
    figure = Figure(figsize=(11.5, 4.9), layout="constrained")
    parts: Any = figure.subfigures(2, 2, wspace=0.03, hspace=0.04)
    for part, corner in zip(parts.flat, corners(result, each, seed)):
        sure = (corner.image, corner.text).count("certain")
        part.suptitle(f"{corner.image} image, {corner.text} text", fontsize=11, color=(BAD, INK, GOOD)[sure])
        axes = part.subplots(1, each, squeeze=False)[0]
        for ax in axes:
            ax.set_axis_off()
        for ax, i, j, distance in zip(axes, corner.drawings, corner.texts, corner.csd):
            numbers = [f"image {image[i]:.3g}", f"text {text[j]:.3g}", f"csd {distance:.3g}"]
            _picture(ax, result, i, [f"“{_cut(result.table.texts[j], 34)}”", *numbers])
        if not len(corner.drawings):
            axes[0].text(0, 0.5, "no such pair", color=MUTED)
    return figure


def _picture(ax: Axes, result: CorpusResult, row: int, lines: list[str]) -> None:
    """Show a drawing with some lines below; the first line is wrapped."""
    ax.imshow(np.asarray(result.corpus.drawings[row].image()))
    ax.set_anchor("N")
    words = [lettering(line) for line in (*textwrap.wrap(lines[0], 17), *lines[1:])]
    ax.text(0.5, -0.04, "\n".join(words), transform=ax.transAxes, ha="center", va="top", fontsize=8, color=INK)


def _name(result: CorpusResult, row: int) -> str:
    return _cut(result.corpus.concepts[result.corpus.drawings[row].concept].name, 34)


def _cut(text: str, most: int = 46) -> str:
    """Shorten a text to at most `most` characters."""
    return text if len(text) <= most else f"{text[: most - 1].rstrip()}…"


# --- figure 9 ---------------------------------------------------------------------------------------------------------
class Walk(NamedTuple):
    """A drawing's row, captions met from specific to general, its [ROOT] (None for "" alone), whether the [ROOT]
    matches the drawing, and its own captions, name to group.
    """

    drawing: int
    met: tuple[str, ...]
    root: str | None
    root_is_true: bool
    own: tuple[str, ...]


def walks(result: CorpusResult, found: Traversal, most: int, seed: int = 0) -> list[Walk]:
    """Return the walks of some drawings, chosen by the seed. found: of all drawings and texts of the result."""
    rows = np.sort(np.random.default_rng(seed).permutation(len(result.corpus.drawings))[:most])
    texts, out = result.table.texts, []
    for row in rows.tolist():
        root = int(found.root_caption[row])
        concept = result.corpus.concepts[result.corpus.drawings[row].concept]
        own = tuple(concept.captions(level)[0] for level in reversed(LEVELS) if concept.captions(level))
        true = root >= 0 and bool(result.text_relation[root, row])
        out.append(Walk(row, tuple(texts[i] for i in found.path(row)), texts[root] if root >= 0 else None, true, own))
    return out


def true_roots(result: CorpusResult, found: Traversal) -> float:
    """Return the share of drawings whose [ROOT] matches them; NaN if the root is "" alone."""
    root = found.root_caption.numpy()
    if (root < 0).any():
        return float("nan")
    return float(result.text_relation[root, np.arange(len(root))].mean())


@styled
def traversals(result: CorpusResult, found: Traversal, most: int = 8, seed: int = 0) -> Figure:
    """Draw a row for each drawing: the captions met on the way to its root, and below its own captions."""
    chosen = walks(result, found, most, seed)
    figure = Figure(figsize=(9.6, 0.78 * len(chosen) + 0.5), layout="constrained")
    share = true_roots(result, found)
    title = "to the empty text" if np.isnan(share) else f"the [ROOT] matches {share:.0%}"
    figure.suptitle(f"From {len(found.met):,} drawings to their roots: {title}", x=0.01, ha="left")
    grid = figure.add_gridspec(len(chosen), 2, width_ratios=(0.62, 9.0))
    for i, walk in enumerate(chosen):
        picture, words = figure.add_subplot(grid[i, 0]), figure.add_subplot(grid[i, 1])
        picture.imshow(np.asarray(result.corpus.drawings[walk.drawing].image()))
        for ax in (picture, words):
            ax.set_axis_off()
        met = textwrap.wrap(" → ".join(text or '""' for text in walk.met), WIDTH)
        words.text(0, 0.66, "\n".join(map(lettering, met)), va="center", fontsize=10, color=INK)
        words.text(0, 0.1, lettering("true: " + " → ".join(walk.own)), va="bottom", fontsize=8.5, color=MUTED)
        if walk.root is not None:
            said, colour = ("match", GOOD) if walk.root_is_true else ("no match", BAD)
            said = lettering(f"[ROOT] “{walk.root}”, {said}")
            words.text(1, 0.1, said, va="bottom", ha="right", fontsize=9, color=colour)
    return figure


# --- figure C.5 -------------------------------------------------------------------------------------------------------
class Shown(NamedTuple):
    """A class: its row among the weights, rows of drawings, and rows of the prompts by falling weight."""

    row: int
    drawings: np.ndarray
    prompts: np.ndarray


def choose(weights: PromptWeights, result: CorpusResult, classes: int = CLASSES, seed: int = 0) -> list[Shown]:
    """Choose classes with drawings in the corpus, and drawings of each. Only the seed decides.

    A drawing belongs to a class that is a caption of its concept at any level. ValueError if no drawing does.
    """
    concepts = [result.corpus.concepts[drawing.concept] for drawing in result.corpus.drawings]
    captions = [{text.lower() for level in LEVELS for text in concept.captions(level)} for concept in concepts]
    rows = [np.flatnonzero([name.lower() in own for own in captions]) for name in weights.classnames]
    able = [i for i, found in enumerate(rows) if len(found)]
    if not able:
        raise ValueError(
            f"no drawing belongs to any of the {len(rows)} classes of {weights}, such as"
            f" {weights.classnames[0]!r}. Give drawings of these classes with --data"
        )
    rng = np.random.default_rng(seed)
    out = []
    for i in np.sort(rng.choice(able, min(classes, len(able)), replace=False)).tolist():
        drawings = np.sort(rng.choice(rows[i], min(PICTURES, len(rows[i])), replace=False))
        out.append(Shown(i, drawings, weights.table[i].numpy().argsort(kind="stable")[::-1][:PROMPTS]))
    return out


@styled
def prompts_of_classes(weights: PromptWeights, result: CorpusResult, classes: int = CLASSES, seed: int = 0) -> Figure:
    """Draw some classes: drawings, the prompts of most weight, and the weight of a prompt if all are equal."""
    chosen = choose(weights, result, classes, seed)
    figure = Figure(figsize=(9.6, 1.75 * len(chosen) + 0.3), layout="constrained")
    grid = figure.add_gridspec(len(chosen), PICTURES + 1, width_ratios=[1.0] * PICTURES + [3.4])
    colour, even = LOOKS[0][0], 1 / len(weights.templates)
    for line, shown in enumerate(chosen):
        for place in range(PICTURES):
            ax = figure.add_subplot(grid[line, place])
            ax.set_axis_off()
            if place < len(shown.drawings):
                ax.imshow(np.asarray(result.corpus.drawings[shown.drawings[place]].image()))
            if place == 0:
                ax.set_title(lettering(weights.classnames[shown.row]))
        bars = figure.add_subplot(grid[line, PICTURES])
        share = weights.table[shown.row].numpy()[shown.prompts]
        bars.barh(range(len(share)), share, color=colour, height=0.62)
        bars.axvline(even, color=MUTED, linestyle="--", linewidth=1.2)
        for i, value in enumerate(share):
            bars.annotate(
                f"{value:.3f}", (value, i), (4, 0), textcoords="offset points", va="center", fontsize=8, color=INK
            )
        bars.set_yticks(range(len(share)), [lettering(weights.templates[i]) for i in shown.prompts], fontsize=8)
        bars.invert_yaxis()
        bars.set_xlim(0, 1.25 * max(share.max(), even))
        bars.xaxis.set_major_locator(MaxNLocator(4))
        bars.grid(axis="y", visible=False)
        if line == len(chosen) - 1:
            bars.set_xlabel("weight; dashed: all equal")
    return figure


# --- figures 8, C.2 and C.3 -------------------------------------------------------------------------------------------
class Pictures:
    """N images at L levels, general to specific, the last the original, with their Gaussians.

    z: L Gaussians (N, D); the last field maps (row, level) to an image.
    """

    def __init__(self, embedder: Embedder, z: Sequence[Gaussian], picture: Callable[[int, int], Image.Image]):
        self.z, self.picture, self._embedder = list(z), picture, embedder

    @classmethod
    def erased(cls, embedder: Embedder, corpus: Corpus, seed: int = 0) -> Pictures:
        """Return the corpus's drawings with fewer white cells at each level, chosen by the seed and nested."""

        def picture(row: int, level: int) -> Image.Image:
            image = corpus.drawings[row].image()
            return image if level == len(ERASED) else without_cells(image, ERASED[level], seed + row)

        rows, last = range(len(corpus.drawings)), len(ERASED)
        z = [embedder.embed_images(picture(row, level) for row in rows) for level in range(last + 1)]
        return cls(embedder, z, picture)

    @classmethod
    def read(cls, embedder: Embedder, folder: str | Path) -> Pictures:
        """Read the images of a folder that `prolip hierarchy hierarimgs` wrote. ValueError for another folder."""
        files = read_levels(folder)
        z = [embed_files(embedder, paths, sys.stderr.isatty()) for paths in zip(*files)]
        return cls(embedder, z, lambda row, level: open_image(files[row][level]))

    @cached_property
    def inclusions(self) -> list[levels.Inclusion]:
        """Return H(original in level i) of every level except the last."""
        return levels.inclusion_of_levels(self.z)

    @cached_property
    def traces(self) -> levels.LevelTraces:
        """Return the uncertainties, (N, L)."""
        return levels.traces_by_level([self._embedder.score.uncertainty(z).numpy() for z in self.z])

    def failures(self, most: int) -> np.ndarray:
        """Return the rows whose level 0 does not include the original, H <= 0, the least H first."""
        h = self.inclusions[0].h
        order = h.argsort(kind="stable")
        return order[h[order] <= 0][:most]


def erase(pixels: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Set a share of the cells of every image to 0, the mean colour of normalised pixels, (B, 3, H, W).

    The generator draws the order of the cells, separately for each image.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share {share}: give one from 0 to 1")
    order = torch.rand(len(pixels), CELLS**2, generator=generator).argsort(1).argsort(1)
    gone = (order < round(share * CELLS**2)).view(-1, 1, CELLS, CELLS).float()
    mask = torch.nn.functional.interpolate(gone, pixels.shape[-2:], mode="nearest")
    return pixels * (1 - mask)


def without_cells(image: Image.Image, share: float, seed: int) -> Image.Image:
    """Return the image with a share of its 8 x 8 cells white; a larger share contains the cells of a smaller one."""
    pixels = torch.from_numpy(np.asarray(image, dtype=np.float32)).permute(2, 0, 1)
    kept = erase(pixels[None] - WHITE, share, torch.Generator().manual_seed(seed))[0] + WHITE
    return Image.fromarray(kept.permute(1, 2, 0).byte().numpy())


def inclusion(pictures: Pictures, seed: int = 0) -> Figure:
    """Draw histograms of H(original in level i) below one image at these levels, ProLIP figure 8."""
    row = int(np.random.default_rng(seed).integers(len(pictures.z[0].mean)))
    shown = [np.asarray(pictures.picture(row, level)) for level in range(len(pictures.z) - 1)]
    return levels.plot_inclusion(pictures.inclusions, shown)


@styled
def failures(pictures: Pictures, most: int = 8) -> Figure:
    """Draw, at all levels, the images with the least H that their level 0 does not include, ProLIP figure C.3."""
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
        line[0].text(
            -0.1, 0.5, name, transform=line[0].transAxes, rotation=90, va="center", ha="right", color=INK, fontsize=9.5
        )
    return figure
