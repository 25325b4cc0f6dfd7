"""Figures of hierarchy, in the colours of Okabe and Ito; each series has its own marker and dashes, too."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from prolip.evaluation.plots import LOOKS
from prolip.hierarchy.ambiguity import Study
from prolip.hierarchy.levels import Inclusion, LevelTraces
from prolip.utils.style import INK, MUTED, panels, styled

#: What a study changes, for its axis.
CHANGES = {"erase": "share of the pixels erased", "mix": "weight of a second image", "drop": "share of words dropped"}


@styled
def trace_by_level(traces: LevelTraces, what: str) -> Figure:
    """Uncertainty by level, ProLIP figure 7: quartiles as a box, means as diamonds, general to specific."""
    figure, (ax,) = panels(1, 1, width=6.0, height=3.6)
    x = traces.values
    for i, column in enumerate(x.T):
        colour, _, marker = LOOKS[i % len(LOOKS)]
        ax.boxplot(column, positions=[i], widths=0.5, showfliers=False, patch_artist=True,
                   boxprops={"facecolor": colour, "alpha": 0.35, "edgecolor": colour},
                   medianprops={"color": INK, "linewidth": 1.6}, whiskerprops={"color": MUTED},
                   capprops={"color": MUTED})  # fmt: skip
        ax.plot([i], [column.mean()], marker=marker, color=colour, markeredgecolor="white", markersize=8)
    ax.set_xticks(range(x.shape[1]), [f"level {i}" for i in range(x.shape[1])])
    ax.set(xlabel="general  →  specific; markers: means", ylabel="uncertainty")
    ax.set_title(f"{what}: Spearman with the level {traces.spearman:+.2f}")
    return figure


@styled
def inclusion_by_level(inclusions: Sequence[Inclusion]) -> Figure:
    """Histograms of H(original in level i) with the share above 0, ProLIP figure 8, a panel for each level."""
    figure, axes = panels(1, len(inclusions), width=3.2 * len(inclusions), height=3.2, sharey=True)
    every = np.concatenate([x.h for x in inclusions])
    low, high = np.quantile(every, (0.005, 0.995))
    width = max(high - low, 1e-9) / 40
    edges = np.arange(np.floor(min(low, 0.0) / width), np.ceil(max(high, 0.0) / width) + 2) * width  # 0 is one of them
    for ax, inclusion in zip(axes, inclusions):
        h = inclusion.h.clip(edges[0], edges[-1])
        for rows, (colour, _, _), label in ((h > 0, LOOKS[0], "included"), (h <= 0, LOOKS[1], "not")):
            hatch = "" if label == "included" else "//"
            ax.hist(h[rows], list(edges), weights=np.full(int(rows.sum()), 1 / len(h)), color=colour, alpha=0.75,
                    label=label, hatch=hatch, edgecolor="white", linewidth=0.4)  # fmt: skip
        ax.axvline(0, color=INK, linewidth=1, linestyle="--")
        ax.set_title(f"last in level {inclusion.level}: {inclusion.rate:.0%}", fontsize=10)
        ax.set_xlabel("H")
        ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes[0].set_ylabel("share")
    axes[-1].legend()
    return figure


@styled
def ambiguity(named: Mapping[str, Sequence[Study]]) -> Figure:
    """Uncertainty over that of the original (above) and inclusion of the original (below), a column for each change.

    named: the studies of each model; PCME figure 7.
    """
    kinds = list(dict.fromkeys(study.name for studies in named.values() for study in studies))
    figure, axes = panels(2, len(kinds), width=3.6 * len(kinds), height=2.7, sharex="col")
    for (model, studies), (colour, dashes, marker) in zip(named.items(), cycle(LOOKS)):
        form: Any = {"color": colour, "linestyle": dashes, "marker": marker, "markersize": 5, "label": model}
        for study in studies:
            above, below = axes[kinds.index(study.name)], axes[len(kinds) + kinds.index(study.name)]
            with np.errstate(divide="ignore", invalid="ignore"):
                ratio = study.uncertainty / study.uncertainty[:1]
            if np.isfinite(ratio).all():
                low, middle, high = np.quantile(ratio, (0.25, 0.5, 0.75), axis=1)
                above.plot(study.strengths, middle, **form)
                above.fill_between(study.strengths, low, high, color=colour, alpha=0.15, lw=0)
            if np.isfinite(study.rate).any():
                below.plot(study.strengths[1:], study.rate[1:], **form)
    for i, kind in enumerate(kinds):
        axes[i].axhline(1, color=MUTED, linewidth=1, linestyle=":")
        axes[i].set_title(kind)
        below = axes[len(kinds) + i]
        below.axhline(0.5, color=MUTED, linewidth=1, linestyle=":")
        below.set(ylim=(-0.03, 1.03), xlabel=CHANGES.get(kind, kind))
        below.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes[0].set_ylabel("uncertainty / original's")
    axes[len(kinds)].set_ylabel("original included (H > 0)")
    handles, labels = axes[0].get_legend_handles_labels()
    if handles:
        axes[0].legend(handles, labels)
    return figure


def write(figure: Figure, folder: str | Path, name: str) -> list[Path]:
    """FOLDER/NAME.png and, to be printed at any size, NAME.svg."""
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    paths = [place / f"{name}.{kind}" for kind in ("png", "svg")]
    for path in paths:
        figure.savefig(path)
    return paths
