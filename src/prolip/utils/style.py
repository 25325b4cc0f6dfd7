"""The palette and style of all figures: images are blue, texts warm, darker for more general levels."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import matplotlib as mpl
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from PIL import Image

from prolip.utils.console import plain
from prolip.utils.outputs import replacing

IMAGE, TEXT = "#1d6f96", "#d5633c"
LEVEL_COLOURS = {"group": "#5f1f3c", "subgroup": "#b03a54", "keyword": "#e2793f", "name": "#eeae45", "image": IMAGE}
LEVEL_MARKERS = {"group": "s", "subgroup": "^", "keyword": "v", "name": "o", "image": "P"}
INK, MUTED, LINE = "#20303d", "#667582", "#dfe5ea"
#: Colour (of Okabe and Ito), dashes and marker of each series.
LOOKS: tuple[tuple[str, Any, str], ...] = (
    ("#0072b2", "-", "o"),
    ("#d55e00", (0, (6, 2)), "s"),
    ("#009e73", (0, (1.5, 1.5)), "D"),
    ("#cc79a7", (0, (6, 2, 1.5, 2)), "^"),
    ("#e69f00", (0, (3, 1.5)), "v"),
    ("#56b4e9", "-", "P"),
)
GOOD, BAD = LOOKS[0][0], LOOKS[1][0]

BOX: Any = {"showfliers": False, "medianprops": {"color": INK, "linewidth": 1.6}}  # settings of box plots
BOX |= {"whiskerprops": {"color": MUTED}, "capprops": {"color": MUTED}}
STYLE: Any = mpl.rc_params_from_file(Path(__file__).with_name("figures.mplstyle"), use_default_template=False)
STYLE["axes.prop_cycle"] = cycler(color=[look[0] for look in LOOKS], linestyle=[look[1] for look in LOOKS])
DPI = STYLE["savefig.dpi"]


def lettering(text: str) -> str:
    """Return a text from data for a figure: one line, control characters escaped, no formula."""
    return plain(text).replace("$", r"\$")


#: Decorator: draw in the common style, independent of the caller's matplotlib settings.
styled = mpl.rc_context(STYLE)


def panels(rows: int, columns: int, width: float = 9.6, height: float = 3.2, **kwargs) -> tuple[Figure, list[Axes]]:
    """Create a figure of rows x columns panels, each row `height` inches; returns panels in reading order."""
    figure = Figure(figsize=(width, height * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **kwargs)
    return figure, list(axes.flat)


def percent(axis: Axis) -> None:
    """Label ticks with exact percentages: 2.5%, not 2%."""
    axis.set_major_formatter(FuncFormatter(lambda share, _: f"{round(100 * share, 9) + 0.0:.3g}%"))


def write(figure: Figure, folder: str | Path, name: str, vector: str = "svg", dpi: float = DPI) -> list[Path]:
    """Write FOLDER/NAME.png with `dpi` dots per inch, and NAME.svg or .pdf."""
    return [save(figure, Path(folder) / f"{name}.{kind}", dpi) for kind in ("png", vector)]


def save(figure: Figure, path: Path, dpi: float = DPI) -> Path:
    """Write the figure atomically, in the format of the suffix."""
    with replacing(path) as temporary:
        figure.savefig(temporary, format=path.suffix[1:], dpi=dpi)
    return path


def picture(image: Image.Image, **how: Any) -> str:
    """Encode an image for a self-contained page as WebP, because browsers do not open TIFF. how: Pillow's settings."""
    encoded = io.BytesIO()
    image.save(encoded, "WEBP", **how)
    return data_uri(encoded.getvalue(), "webp")


def data_uri(data: bytes, kind: str) -> str:
    """Return the data URI of an encoded image, png or webp, for a self-contained page."""
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
