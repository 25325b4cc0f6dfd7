"""Captions met from a drawing to its root, beside those that are true of it: ProLIP figure 9."""
from __future__ import annotations

import textwrap
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from prolip.data.emoji import LEVELS
from prolip.evaluation.suites.emoji.result import CorpusResult
from prolip.hierarchy.traversal import Traversal
from prolip.utils.style import BAD, GOOD, INK, MUTED, lettering, styled

WIDTH = 88


class Walk(NamedTuple):
    """A drawing's row, captions met from specific to general, its [ROOT] ("" alone: None), whether that is true of the
    drawing, and its own captions, name to group.
    """

    drawing: int
    met: tuple[str, ...]
    root: str | None
    root_is_true: bool
    own: tuple[str, ...]


def walks(result: CorpusResult, found: Traversal, most: int, seed: int = 0) -> list[Walk]:
    """Some drawings, drawn by the seed; found: of all drawings and all texts of the result."""
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
    """The share of drawings whose [ROOT] is true of them; NaN where the root is "" alone."""
    root = found.root_caption.numpy()
    if (root < 0).any():
        return float("nan")
    return float(result.text_relation[root, np.arange(len(root))].mean())


@styled
def traversals(result: CorpusResult, found: Traversal, most: int = 8, seed: int = 0) -> Figure:
    """A row for each drawing: what is met on the way to its root, and below what is true of it."""
    chosen = walks(result, found, most, seed)
    figure = Figure(figsize=(9.6, 0.78 * len(chosen) + 0.5), layout="constrained")
    share = true_roots(result, found)
    title = "to the empty text" if np.isnan(share) else f"the [ROOT] is true of {share:.0%}"
    figure.suptitle(f"From {len(found.met):,} drawings to their roots: {title}", x=0.01, ha="left", fontsize=11.5,
                    fontweight="bold")  # fmt: skip
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
            said, colour = ("true", GOOD) if walk.root_is_true else ("not true", BAD)
            said = lettering(f"[ROOT] “{walk.root}”, {said}")
            words.text(1, 0.1, said, va="bottom", ha="right", fontsize=9, color=colour)
    return figure
