"""Traces by level of texts (ProLIP figure 7) and the inclusion test among levels of images (figure 8)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from prolip.evaluation.metrics.selective import spearman
from prolip.gaussian import Gaussian
from prolip.measures import inclusion_test
from prolip.scores import Score
from prolip.utils.style import BOX, INK, LOOKS, panels, percent, styled, write


class Inclusion(NamedTuple):
    """H(original in level i) of N images, ProLIP (4): h (N,); rate: share with H > 0. The reverse direction is -h."""

    level: int
    h: np.ndarray

    @property
    def rate(self) -> float:
        """Share of the images that this level of themselves includes."""
        return float((self.h > 0).mean())


class LevelTraces(NamedTuple):
    """Uncertainty by level, values (N, L), general to specific."""

    values: np.ndarray

    @property
    def spearman(self) -> float:
        """Rank correlation with the level, -1: the more specific, the more certain; NaN if nothing varies."""
        return spearman(self.values.ravel(), np.tile(np.arange(self.values.shape[1]), len(self.values)))

    @property
    def in_order(self) -> float:
        """Share of neighbouring levels in a chain of which the more general is more uncertain."""
        return float((self.values[:, :-1] > self.values[:, 1:]).mean())


def inclusion_of_levels(levels: Sequence[Gaussian]) -> list[Inclusion]:
    """Compute H(original in level i) at eps = 0 for every level but the last, the original: L Gaussians (N, D)."""
    if len(levels) < 2:
        raise ValueError(f"{len(levels)} levels: give two or more, the original last")
    if any(bool(z.log_var.isneginf().any()) for z in levels):
        raise ValueError("these embeddings are points, which cannot include anything: use a model with variances")
    return [Inclusion(i, inclusion_test(levels[-1], z).double().numpy()) for i, z in enumerate(levels[:-1])]


def traces_by_level(levels: Sequence[np.ndarray]) -> LevelTraces:
    """Collect uncertainties (N,) of each level, general to specific."""
    return LevelTraces(np.stack(levels, 1))


@styled
def plot_traces(traces: LevelTraces, what: str) -> Figure:
    """Plot uncertainty by level, ProLIP figure 7: quartiles as a box, a marker at the mean, general to specific."""
    figure, (ax,) = panels(1, 1, width=6.0, height=3.6)
    count = traces.values.shape[1]
    for (colour, _, marker), i, x in zip(cycle(LOOKS), range(count), traces.values.T):
        box = {"facecolor": colour, "alpha": 0.35, "edgecolor": colour}
        ax.boxplot(x, positions=[i], widths=0.5, patch_artist=True, boxprops=box, **BOX)
        ax.plot([i], [x.mean()], marker=marker, color=colour, markeredgecolor="white", markersize=8)
    ax.set_xticks(range(count), [f"level {i}" for i in range(count)])
    ax.set(xlabel="general  →  specific; markers: means", ylabel="uncertainty")
    ax.set_title(f"{what}: Spearman with the level {traces.spearman:+.2f}")
    return figure


@styled
def plot_inclusion(inclusions: Sequence[Inclusion], examples: Sequence[np.ndarray] = ()) -> Figure:
    """Plot histograms of H(original in level i), ProLIP figure 8; examples: pixels of one image at each level."""
    count, heights = len(inclusions), ((1.4, 3.2) if len(examples) else (3.2,))
    figure = Figure(figsize=(3.2 * count, sum(heights)), layout="constrained")
    grid = figure.add_gridspec(len(heights), count, height_ratios=heights)
    for i, pixels in enumerate(examples):
        picture = figure.add_subplot(grid[0, i])
        picture.imshow(pixels)
        picture.set_axis_off()
    axes = [figure.add_subplot(grid[-1, 0])]
    axes += [figure.add_subplot(grid[-1, i], sharey=axes[0]) for i in range(1, count)]
    low, high = np.quantile(np.concatenate([x.h for x in inclusions]), (0.005, 0.995))
    width = max(high - low, 1e-9) / 40
    edges = np.arange(np.floor(min(low, 0.0) / width), np.ceil(max(high, 0.0) / width) + 2) * width  # 0 is an edge
    form: Any = {"alpha": 0.75, "edgecolor": "white", "linewidth": 0.4}
    for ax, inclusion in zip(axes, inclusions):
        h = inclusion.h.clip(edges[0], edges[-1])
        sides = (h[h > 0], LOOKS[0], "included", ""), (h[h <= 0], LOOKS[1], "not", "//")
        for part, (colour, _, _), label, hatch in sides:
            share = np.full(len(part), 1 / len(h))
            ax.hist(part, list(edges), weights=share, color=colour, label=label, hatch=hatch, **form)
        ax.axvline(0, color=INK, linewidth=1, linestyle="--")
        ax.tick_params(labelleft=ax is axes[0])
        ax.set_title(f"last in level {inclusion.level}: {inclusion.rate:.0%}", fontsize=10)
        ax.set_xlabel("H")
        percent(ax.yaxis)
    axes[0].set_ylabel("share")
    axes[-1].legend()
    return figure


@styled
def plot_differences(traces: LevelTraces, what: str) -> Figure:
    """Plot uncertainty at all levels, and the difference of each level to the last, ProLIP figure C.2."""
    x = traces.values
    (rows, count), edges = x.shape, list(np.histogram_bin_edges(x, 30))
    figure, axes = panels(1, count, width=3.0 * count, height=3.1)
    share = np.full(rows, 1 / rows)
    for i, (colour, dashes, _) in zip(range(count), cycle(LOOKS)):
        form: Any = {"histtype": "step", "color": colour, "linestyle": dashes, "linewidth": 1.6}
        axes[0].hist(x[:, i], edges, weights=share, label=f"level {i}" if i < count - 1 else "last", **form)
    axes[0].set_title(what)
    axes[0].set(xlabel="uncertainty", ylabel="share")
    axes[0].legend()
    for i, ax in enumerate(axes[1:]):
        difference = x[:, i] - x[:, -1]
        ax.hist(difference, 30, weights=share, color=LOOKS[0][0])
        ax.axvline(0, color=INK, linewidth=1, linestyle="--")
        ax.set_title(f"level {i} - last: > 0 for {(difference > 0).mean():.0%}", fontsize=10)
        ax.set_xlabel("difference")
    for ax in axes:
        percent(ax.yaxis)
        ax.xaxis.set_major_locator(MaxNLocator(4))
    return figure


def write_levels(score: Score, z: Sequence[Gaussian], what: str, folder: str | Path) -> str:
    """Write the figures of images or texts (`what`) at levels, general to specific; return their metrics as text."""
    inclusions = inclusion_of_levels(z)
    traces = traces_by_level([score.uncertainty(of_level).numpy() for of_level in z])
    write(plot_traces(traces, f"{what}s"), folder, f"{what}_traces")
    if what == "image":
        write(plot_differences(traces, "images"), folder, "image_differences")
    write(plot_inclusion(inclusions), folder, f"{what}_inclusion")
    values = traces.values
    means = ", ".join(f"{x:.4g}" for x in values.mean(0))
    order = f"Spearman with the level {traces.spearman:+.3f}, neighbours in order {traces.in_order:.1%}"
    lines = [f"{what}s: {len(values):,} chains; mean uncertainty by level, general to specific: {means}; {order}"]
    for x in inclusions:
        lines.append(f"  last in level {x.level}: H > 0 for {x.rate:.1%}, median H {np.median(x.h):+.4g}")
    return "\n".join(lines)
