"""One palette and one style for every figure: images are blue, texts warm, darker for the more general levels."""
from __future__ import annotations

from typing import Any

import matplotlib as mpl
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure

IMAGE, TEXT = "#1d6f96", "#d5633c"
LEVEL_COLOURS = {"group": "#5f1f3c", "subgroup": "#b03a54", "keyword": "#e2793f", "name": "#eeae45", "image": IMAGE}
INK, MUTED, LINE = "#20303d", "#667582", "#dfe5ea"
GOOD, BAD = "#2b8a5b", "#c0455a"
CYCLE = [IMAGE, TEXT, "#5f1f3c", "#4f9d69", "#8a6fb0", "#b58a2b", "#667582"]

STYLE: Any = {
    "font.size": 10.5, "axes.titlesize": 11.5, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.labelsize": 10.5, "axes.labelcolor": INK, "axes.edgecolor": MUTED, "axes.linewidth": 0.8,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True,
    "grid.color": LINE, "grid.linewidth": 0.8, "text.color": INK, "xtick.color": MUTED, "ytick.color": MUTED,
    "xtick.labelcolor": INK, "ytick.labelcolor": INK, "legend.frameon": False, "legend.fontsize": 9.5,
    "axes.prop_cycle": cycler(color=CYCLE), "lines.linewidth": 1.8, "figure.facecolor": "white",
    "savefig.facecolor": "white", "figure.dpi": 100, "savefig.dpi": 160, "axes.titlecolor": INK,
}  # fmt: skip


#: A decorator: draw under the common style, whatever the caller's settings of matplotlib are.
styled = mpl.rc_context(STYLE)


def panels(rows: int, columns: int, width: float = 9.6, height: float = 3.2, **kwargs) -> tuple[Figure, list[Axes]]:
    """A figure of rows x columns panels, each row `height` inches, panels in reading order."""
    figure = Figure(figsize=(width, height * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **kwargs)
    return figure, list(axes.flat)
