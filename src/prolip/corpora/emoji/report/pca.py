"""A plane through the embedding space: Gaussians of a few concepts and samples of them, ProLIP figure 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.offsetbox import AnnotationBbox, OffsetImage
from matplotlib.patches import Ellipse

from prolip.corpora.emoji.corpus import LEVELS
from prolip.corpora.emoji.result import CorpusResult
from prolip.gaussian import concatenate
from prolip.measures.plane import fit_plane, place
from prolip.utils.style import INK, LEVEL_COLOURS, LEVEL_MARKERS, MUTED, lettering, panels, styled

POINTS = 10  # per Gaussian, as in appendix A.1
SUBGROUPS, EACH = 3, 2  # random subgroups, and drawings of each


@styled
def pca(result: CorpusResult, seed: int = 0) -> Figure | None:
    """Plot drawings of a few concepts with captions of all four levels; ellipses at 1 and 2 standard deviations."""
    rng, members = np.random.default_rng(seed), dict[str, list[int]]()
    for i, drawing in enumerate(result.corpus.drawings):
        members.setdefault(result.corpus.concepts[drawing.concept].subgroup, []).append(i)
    able = sorted(name for name, rows in members.items() if len(rows) >= EACH) or sorted(members)
    chosen = [members[name] for name in rng.choice(able, size=min(SUBGROUPS, len(able)), replace=False)]
    drawings = [int(i) for rows in chosen for i in rng.choice(rows, size=min(EACH, len(rows)), replace=False)]
    concepts = [result.corpus.concepts[result.corpus.drawings[i].concept] for i in drawings]
    captions: dict[str, str] = {}  # name, first keyword, subgroup and group, each text once, at its first level
    for level in LEVELS:
        for concept in concepts:
            captions |= {text: level for text in concept.captions(level)[:1] if text not in captions}
    text_of = {text: i for i, text in enumerate(result.table.texts)}
    z = concatenate([result.image.select(drawings), result.text.select([text_of[text] for text in captions])])
    if len(z.mean) < 3:
        return None
    plane = fit_plane(z)
    places = place(plane, z).numpy()
    points = (z.sample(POINTS, generator=torch.Generator().manual_seed(seed)).double() - plane.centre) @ plane.axes.mT
    levels = ["image"] * len(drawings) + list(captions.values())
    figure, (ax,) = panels(1, 1, width=9.6, height=6.6)
    for (x, y, longer, shorter, angle), own, level in zip(places, points.numpy().swapaxes(0, 1), levels):
        colour = LEVEL_COLOURS[level]
        for sigmas, alpha in ((2, 0.07), (1, 0.13)):
            form: Any = {"xy": (x, y), "width": 2 * sigmas * longer, "height": 2 * sigmas * shorter}
            form |= {"angle": np.degrees(angle), "edgecolor": colour}
            ax.add_patch(Ellipse(**form, facecolor=colour, alpha=alpha))
            ax.add_patch(Ellipse(**form, fill=False, linewidth=0.9, alpha=0.7))
        ax.scatter(own[:, 0], own[:, 1], s=5, color=colour, alpha=0.45, lw=0)
    for level in ("image", *LEVELS):
        x, y = places[[i for i, name in enumerate(levels) if name == level], :2].T
        label = "drawing" if level == "image" else level
        look: Any = {"color": LEVEL_COLOURS[level], "marker": LEVEL_MARKERS[level], "edgecolor": "white"}
        ax.scatter(x, y, s=46, zorder=5, label=label, **look)
    ax.autoscale_view()
    ax.margins(0.1)
    ax.set_aspect("equal", adjustable="datalim")
    first, second, *_ = plane.share
    ax.set(xlabel=f"first component ({first:.0%} of the variance)", ylabel=f"second component ({second:.0%})")
    ax.legend(loc="best", handletextpad=0.3)
    figure.draw_without_rendering()  # positions depend on the final limits
    pictures = [np.asarray(result.corpus.drawings[row].image()) for row in drawings]
    _annotate(ax, places[:, :2], [*pictures, *map(lettering, captions)])
    return figure


def _annotate(ax: Axes, points: np.ndarray, notes: Sequence[np.ndarray | str]) -> None:
    """Place each thumbnail or text near its point, where it covers the fewest points and earlier notes."""
    pixels = ax.transData.transform(points)
    taken = np.hstack([pixels - 5, pixels + 5])  # left, bottom, right, top
    frame = ax.get_window_extent()
    line: Any = {"arrowstyle": "-", "color": MUTED, "linewidth": 0.7, "shrinkA": 0, "shrinkB": 3}
    style: Any = {"fontsize": 9, "color": INK, "ha": "center", "va": "center", "zorder": 6}
    edge = {"edgecolor": LEVEL_COLOURS["image"], "linewidth": 1.1, "boxstyle": "round,pad=0.1"}
    for (x, y), note in zip(pixels, notes):
        width, height = (6.9 * len(note), 13) if isinstance(note, str) else (42, 42)
        places = [
            (x + r * np.cos(t) * (1 + width / 2 / r), y + r * np.sin(t) * (1 + height / 2 / r))
            for r in (10, 24, 40, 60, 85, 115)
            for t in np.linspace(0, 2 * np.pi, 12, endpoint=False)
        ]
        low, high = (np.array(places) + sign * np.array((width, height)) / 2 for sign in (-1, 1))
        sides = np.minimum(high[:, None], taken[:, 2:]) - np.maximum(low[:, None], taken[:, :2])
        over = np.maximum(frame.min - low, 0) + np.maximum(high - frame.max, 0)
        cost = sides.clip(0).prod(2).sum(1) + 40 * over.sum(1)
        best = int((cost + 0.3 * np.arange(len(cost))).argmin())  # nearer positions come first
        taken = np.vstack([taken, [*low[best], *high[best]]])
        points_per_pixel = 72 / ax.figure.dpi
        offset = ((places[best][0] - x) * points_per_pixel, (places[best][1] - y) * points_per_pixel)
        at = tuple(ax.transData.inverted().transform((x, y)))
        form: Any = {"arrowprops": line if best >= 12 else None}  # a leader line if it is far away
        if isinstance(note, str):
            ax.annotate(note, at, offset, textcoords="offset points", **form, **style)
        else:
            box = OffsetImage(note, zoom=0.36 * 64 / max(note.shape[:2]))
            form |= {"boxcoords": "offset points", "pad": 0.1, "bboxprops": edge, "zorder": 4}
            ax.add_artist(AnnotationBbox(box, at, offset, **form))
