"""Weights of prompts beside the images of their classes: ProLIP figure C.5."""
from __future__ import annotations

from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from prolip.data.emoji import LEVELS
from prolip.evaluation.suites.emoji.result import CorpusResult
from prolip.prompts.weights import PromptWeights
from prolip.utils.style import INK, LOOKS, MUTED, lettering, styled

CLASSES, PICTURES, PROMPTS = 3, 5, 5


class Shown(NamedTuple):
    """A class: its row among the weights, rows of drawings, and of the prompts with most weight, the first one most."""

    row: int
    drawings: np.ndarray
    prompts: np.ndarray


def choose(weights: PromptWeights, result: CorpusResult, classes: int = CLASSES, seed: int = 0) -> list[Shown]:
    """Some classes of which the corpus has drawings, each with some, by a seeded generator and nothing else.

    A drawing is of a class where it is a caption of its concept at any level. ValueError where none is of any.
    """
    concepts = [result.corpus.concepts[drawing.concept] for drawing in result.corpus.drawings]
    captions = [{text.lower() for level in LEVELS for text in concept.captions(level)} for concept in concepts]
    rows = [np.flatnonzero([name.lower() in own for own in captions]) for name in weights.classnames]
    able = [i for i, found in enumerate(rows) if len(found)]
    if not able:
        raise ValueError(f"no drawing is of any of the {len(rows)} classes of {weights}, such as"
                         f" {weights.classnames[0]!r}: give the drawings of these classes with --data")  # fmt: skip
    rng = np.random.default_rng(seed)
    out = []
    for i in np.sort(rng.choice(able, min(classes, len(able)), replace=False)).tolist():
        drawings = np.sort(rng.choice(rows[i], min(PICTURES, len(rows[i])), replace=False))
        out.append(Shown(i, drawings, weights.table[i].numpy().argsort(kind="stable")[::-1][:PROMPTS]))
    return out


@styled
def examples(weights: PromptWeights, result: CorpusResult, classes: int = CLASSES, seed: int = 0) -> Figure:
    """Drawings of some classes with the prompts that count most, and what a prompt has where all count alike."""
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
            bars.annotate(f"{value:.3f}", (value, i), (4, 0), textcoords="offset points", va="center", fontsize=8,
                          color=INK)  # fmt: skip
        bars.set_yticks(range(len(share)), [lettering(weights.templates[i]) for i in shown.prompts], fontsize=8)
        bars.invert_yaxis()
        bars.set_xlim(0, 1.25 * max(share.max(), even))
        bars.xaxis.set_major_locator(MaxNLocator(4))
        bars.grid(axis="y", visible=False)
        if line == len(chosen) - 1:
            bars.set_xlabel("weight; dashed: all alike")
    return figure
