"""Samples with what a model is sure of and what not: ProLIP figures 4 and C.1."""
from __future__ import annotations

import textwrap
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from prolip.evaluation.suites.emoji.result import CorpusResult
from prolip.measures import csd
from prolip.utils.style import BAD, GOOD, INK, MUTED, lettering, styled

ENDS = ("certain", "uncertain")
#: The share of all inputs that count as certain, and as uncertain, in figure C.1.
SHARE = 0.2
COLUMNS = 4


class Corner(NamedTuple):
    """True pairs of an image and a text that are each certain or uncertain: (P,) rows of drawings and of texts, csd."""

    image: str
    text: str
    drawings: np.ndarray
    texts: np.ndarray
    csd: np.ndarray


def ends(uncertainty: np.ndarray, count: int) -> dict[str, np.ndarray]:
    """Rows of the least and of the most uncertain, both from the outside in, without one in both: (N,)."""
    order = uncertainty.argsort(kind="stable")
    count = min(count, len(order) // 2)
    return {"certain": order[:count], "uncertain": order[::-1][:count]}


def corners(result: CorpusResult, each: int = COLUMNS, seed: int = 0) -> list[Corner]:
    """At most `each` true pairs for every combination of a certain or uncertain image with a like text.

    Certain: of the fifth with the least uncertainty, among drawings or among texts. Drawn by the seed and nothing else:
    drawings that have a true text in that fifth, then one of these texts.
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
            distance = csd(result.image.select(drawings), result.text.select(texts)).numpy()
            found.append(Corner(image, text, drawings, texts, distance))
    return found


@styled
def certain_and_uncertain(result: CorpusResult, drawings: int = 8, texts: int = 10) -> Figure:
    """The least and the most uncertain drawings and texts with their uncertainties, ProLIP figure 4."""
    image, text = result.uncertainty(result.image), result.uncertainty(result.text)
    pictures, words = ends(image, drawings), ends(text, texts)
    rows = -(-max(len(x) for x in pictures.values()) // COLUMNS)
    figure = Figure(figsize=(9.6, 1.55 * rows + 0.25 * texts + 0.7), layout="constrained")
    halves: Any = figure.subfigures(1, 2, wspace=0.04)
    for half, end, colour in zip(halves, ENDS, (GOOD, BAD)):
        half.suptitle(f"{end}: drawings above, texts below", color=colour, fontsize=11.5, fontweight="bold")
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
    """True pairs with certain and uncertain images and texts, ProLIP figure C.1.

    Below each drawing its text, the uncertainties of both, and csd, the expected squared distance.
    """
    image, text = result.uncertainty(result.image), result.uncertainty(result.text)
    figure = Figure(figsize=(11.5, 4.9), layout="constrained")
    parts: Any = figure.subfigures(2, 2, wspace=0.03, hspace=0.04)
    for part, corner in zip(parts.flat, corners(result, each, seed)):
        sure = (corner.image, corner.text).count("certain")
        part.suptitle(f"{corner.image} image, {corner.text} text", fontsize=11, fontweight="bold",
                      color=(BAD, INK, GOOD)[sure])  # fmt: skip
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
    """A drawing with some lines below, the first of which is wrapped."""
    ax.imshow(np.asarray(result.corpus.drawings[row].image()))
    ax.set_anchor("N")
    words = [lettering(line) for line in (*textwrap.wrap(lines[0], 17), *lines[1:])]
    ax.text(0.5, -0.04, "\n".join(words), transform=ax.transAxes, ha="center", va="top", fontsize=8, color=INK)


def _name(result: CorpusResult, row: int) -> str:
    return _cut(result.corpus.concepts[result.corpus.drawings[row].concept].name, 34)


def _cut(text: str, most: int = 46) -> str:
    """A text as it fits."""
    return text if len(text) <= most else f"{text[: most - 1].rstrip()}…"
