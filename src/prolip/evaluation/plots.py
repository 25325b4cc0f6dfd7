"""Plots of risk against coverage, errors by decile of uncertainty, and reliability, with colour-blind-safe colours."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, NullLocator, PercentFormatter
from scipy.special import expit, logit
from scipy.stats import binomtest

from prolip.evaluation.metrics.calibration import Reliability
from prolip.evaluation.metrics.selective import Deciles, RiskCoverage, by_decile, risk_coverage
from prolip.evaluation.metrics.study import Study
from prolip.utils.style import LOOKS, MUTED, lettering, panels, percent, save, styled

#: Inches; 600 pixels wide at 100 dots per inch, to which the font sizes are adapted.
WIDTH, HEIGHT = 6.0, 3.9
#: Probabilities at which axes of log odds have ticks.
TICKS = (1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.1, 0.5, 0.9, 0.99, 0.999)


@styled
def plot_risk_coverage(curves: Mapping[str, RiskCoverage], title: str = "Refusing the most uncertain") -> Figure:
    """Plot the error of answered queries against coverage, with random refusal and the oracle; curves by name."""
    figure, (ax,) = panels(1, 1, width=WIDTH, height=HEIGHT)
    one = next(iter(curves.values()))
    samples = len(one.risk)
    rows = slice(min(samples - 1, samples // 50, 200), None)  # the first risks are noise and would dominate the scale
    top = max(float(curve.risk[rows].max()) for curve in curves.values())
    for (colour, dashes, _), (name, curve) in zip(cycle(LOOKS), curves.items()):
        label = f"{name}  (AURC {curve.aurc:.3f}, gain {curve.gain:.0%})" if np.isfinite(curve.gain) else name
        ax.plot(curve.coverage[rows], curve.risk[rows], color=colour, linestyle=dashes, label=label)
    ax.axhline(one.error, linestyle="--", color=MUTED, linewidth=1.2, label="random")  # last in the legend
    ax.plot(one.coverage, one.oracle, linestyle=":", color=MUTED, linewidth=1.2, label="oracle")
    ax.set(xlim=(0, 1.01), ylim=(0, 1.06 * top or 1), xlabel="coverage: share answered", ylabel="error among answers")
    _finish(ax, title, shares="xy")
    return figure


@styled
def plot_deciles(deciles: Mapping[str, Deciles], value: str, title: str = "By decile of uncertainty") -> Figure:
    """Plot the mean value of queries in groups of rising uncertainty, PCME++ figure 3; several series by name."""
    figure, (ax,) = panels(1, 1, width=WIDTH, height=HEIGHT)
    for (colour, dashes, marker), (name, series) in zip(cycle(LOOKS), deciles.items()):
        place = np.arange(1, len(series.value) + 1)
        rho = f"$\\rho$ {series.spearman_bins:+.2f}" if np.isfinite(series.spearman_bins) else "constant"
        form: Any = {"color": colour, "linestyle": dashes, "marker": marker}
        ax.plot(place, series.value, markersize=5.5, label=f"{name}  ({rho})", **form)
    most = max(len(series.value) for series in deciles.values())
    ax.set_xticks(range(1, most + 1))
    ax.set_ylim(bottom=0)
    ax.set(xlabel="tenth of the queries, certain to uncertain", ylabel=value)
    _finish(ax, title, shares="y")
    return figure


@styled
def plot_reliability(rel: Reliability, name: str, title: str = "Reliability", log_odds: bool = False) -> Figure:
    """Plot the observed frequency against the predicted probability, with 95% (Wilson) intervals, and counts below."""
    heights = {"height_ratios": (3.4, 1)}
    figure, (ax, below) = panels(2, 1, width=WIDTH, height=2.5, sharex=True, gridspec_kw=heights)
    span = np.array([0.0, 1.0])
    if log_odds:  # from the least to the greatest value
        every = np.concatenate([rel.probability, rel.frequency, [0.05, 0.95]])
        span = np.quantile(every[_inside(every)], (0, 1))
        ax.set(xscale="logit", yscale="logit")
    ax.plot(span, span, color=MUTED, linestyle="--", linewidth=1.2, label="calibrated")
    colour, dashes, marker = LOOKS[0]
    form: Any = {"color": colour, "linestyle": dashes, "marker": marker}
    filled = _inside(rel.probability) if log_odds else rel.counts > 0
    kept = filled & _inside(rel.frequency) if log_odds else filled
    x = rel.probability[kept]
    ax.plot(x, rel.frequency[kept], markersize=5.5, label=f"{name}  (ECE {rel.ece:.3g})", **form)
    true = np.rint(np.nan_to_num(rel.frequency) * rel.counts).astype(int)[kept]
    both = [binomtest(k, n).proportion_ci(method="wilson") for k, n in zip(true.tolist(), rel.counts[kept].tolist())]
    ax.vlines(x, [ci.low for ci in both], [ci.high for ci in both], color=colour, linewidth=1.1, alpha=0.7)
    below.plot(rel.probability[filled], rel.counts[filled] / rel.counts.sum(), markersize=4, **form)
    ax.set(ylabel="observed frequency")
    ax.set_title(lettering(title))
    below.set(xlabel="predicted probability", ylabel="share", yscale="log")
    below.yaxis.set_minor_formatter(NullFormatter())
    for axis in (ax.xaxis, ax.yaxis, below.xaxis):
        axis.set_major_formatter(PercentFormatter(1, decimals=0))
        if log_odds:
            axis.set_ticks(TICKS, [f"{p:.4g}" if p > 1e-4 else f"$10^{{{round(np.log10(p))}}}$" for p in TICKS])
            axis.set_minor_locator(NullLocator())
    x, y = (expit(logit(span) + (-room, room)) if log_odds else (-0.02, 1.02) for room in (0.4, 0.8))
    ax.set(xlim=x, ylim=y)  # after the ticks, which widen the axes
    ax.legend(loc="upper left")
    return figure


def write_plots(study: Study, name: str, folder: Path) -> None:
    """Write FOLDER/*.png: `risk_coverage...`, `by_decile...`, `reliability...`; name: for the titles."""
    drawn: dict[str, Figure] = {}
    for part, (error, uncertainties) in study.samples.items():
        what = part.removeprefix("refusal").replace("/", "_")
        title = " ".join((name, what.strip("_"))).rstrip()
        curves = {key: risk_coverage(u, error) for key, u in uncertainties.items()}
        drawn[f"risk_coverage{what}"] = plot_risk_coverage(curves, f"Refusing the most uncertain: {title}")
        traces = {key: by_decile(u, 1 - error) for key, u in uncertainties.items()}
        drawn[f"by_decile{what}"] = plot_deciles(traces, "1 - error", f"By uncertainty: {title}")
    for part, found in study.reliability.items():
        what = part.removeprefix("calibration/")
        drawn[f"reliability_{what}"] = plot_reliability(found, what, f"Reliability: {name} {what}", what == "match")
    for file, figure in drawn.items():
        save(figure, folder / f"{file}.png", dpi=150)


def _finish(ax: Axes, title: str, shares: str) -> None:
    """Set the title, percent axes for shares, and the legend below the axes, where it hides no curve."""
    ax.set_title(lettering(title))
    for letter in shares:
        percent(getattr(ax, f"{letter}axis"))
    handles, labels = ax.get_legend_handles_labels()
    columns = 2 if max(map(len, labels)) < 36 else 1
    form: Any = {"loc": "outside lower center", "ncols": columns, "columnspacing": 1.4, "handlelength": 2.6}
    ax.figure.legend(handles, labels, **form)


def _inside(p: np.ndarray) -> np.ndarray:
    """Return True for probabilities with log odds; empty bins, NaN, have none."""
    return (p > 0) & (p < 1)
