"""The report's figures. Each function draws and returns one, or None without data."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from prolip.corpora.emoji.corpus import LEVELS
from prolip.corpora.emoji.report.pca import pca
from prolip.corpora.emoji.report.runs import RunFolder
from prolip.corpora.emoji.result import REFUSED_BY, CorpusResult
from prolip.corpora.emoji.uncertainty import reliabilities, signs_against, traces_of_levels
from prolip.evaluation.metrics.selective import risk_coverage, spearman
from prolip.evaluation.plots import plot_reliability, plot_risk_coverage
from prolip.evaluation.tasks import TASKS
from prolip.utils.style import BOX, IMAGE, INK, LEVEL_COLOURS, LEVEL_MARKERS, MUTED, TEXT, panels, percent, styled

#: Keys of a line of the log that are not terms of the loss.
NO_TERMS = "kind step epoch samples seconds time lr grad_norm scale bias faults samples_per_second samples_per_s"
NO_TERMS += " data_wait eta mfu memory_gib"
NORMS = ("grad_norm", "param_norm")
#: Dashes of texts and of masked views.
DASHES, DOTS = (0, (6, 2)), (0, (1.5, 1.5))
#: A panel: its title, and for the label of each line its key in the log, with colour and dashes if set.
Panel = tuple[str, Mapping[str, tuple[str, tuple[Any, ...]]]]
#: Suffix of the metric that training pairs also have, and the corpus's main metrics.
PAIRS, CORPUS_MAINS = "/pairs_R@1", ("/names/i2t/R@1", "/names/t2i/R@1")
LINES: dict[str, tuple[str, Any]] = {
    **{f"{kind}_image": (IMAGE, "-") for kind in ("trace", "vib", "grad_norm", "inclusion")},
    **{f"{kind}_text": (TEXT, DASHES) for kind in ("trace", "vib", "grad_norm", "inclusion")},
    "trace_masked_image": (IMAGE, DOTS),
    "trace_masked_text": (TEXT, DOTS),
    "inclusion_image_text": ("#5f1f3c", DOTS),
}


@styled
def learning_curves(run: RunFolder) -> Figure | None:
    """Plot loss and its terms, logit scale and bias, traces, learning rate, gradients, recall in a batch."""
    names = _keys(run.train)
    if len(run.train) < 2:
        return None
    recalls = [n for n in names if "R@" in n or "chance" in n]
    terms = [n for n in names if n not in (*NO_TERMS.split(), *recalls) and not n.startswith(("trace_", *NORMS))]
    main = [n for n in terms if n in ("loss", "ppcl") or not n.startswith(("inclusion", "vib"))]
    groups = {
        "Loss": main,
        "Inclusion terms (unweighted)": [n for n in terms if n.startswith("inclusion")],
        "VIB (unweighted)": [n for n in terms if n.startswith("vib")],
        "Mean trace": [n for n in names if n.startswith("trace_")],
        "Logit scale a": [n for n in names if n == "scale"],
        "Logit bias b": [n for n in names if n == "bias"],
        "Learning rate": [n for n in names if n == "lr"],
        "Gradient norm": [n for n in names if n in ("grad_norm_image", "grad_norm_text")],
        "R@1 within a batch": recalls,
    }
    panels = [(title, {_short(n): (n, LINES.get(n, ())) for n in keys}) for title, keys in groups.items() if keys]
    return over_steps(panels, run.train)


@styled
def evaluations(run: RunFolder) -> Figure | None:
    """Plot the main metric of every test set over steps, and the training rows against it among as many pairs."""
    if len(run.evals) < 2:
        return None
    mains, drawn = main_metrics(run), list[Panel]()
    if mains:
        drawn.append((mains[0] if len(mains) == 1 else "Test sets", {key: (key, ()) for key in mains}))
    for name in sampled_sets(run):
        training, own = (f"{name}/train_pairs_R@1", (MUTED, DASHES)), (f"{name}/pairs_R@1", (IMAGE, "-"))
        title = f"R@1 among {run.evals[-1].get(f'{name}/pairs') or 0:.0f} pairs: {name}"
        drawn.append((title, {"training rows": training, "validation": own}))
    figure = over_steps(drawn, run.evals, marker="o", markersize=4)
    for ax in [] if figure is None else figure.axes:
        percent(ax.yaxis)
        ax.set_ylim(bottom=0)
    return figure


def main_metrics(run: RunFolder) -> list[str]:
    """Return the keys of every test set's main metric in the evaluations of a run."""
    mains = (*(f"/{task.main}" for task in TASKS.values()), *CORPUS_MAINS)
    return [key for key in _keys(run.evals) if f"/{key}".endswith(mains) and "/own/" not in key]


def sampled_sets(run: RunFolder, most: int = 5) -> list[str]:
    """Return the first test sets with as many ranked pairs as the training data."""
    return [key.removesuffix(PAIRS) for key in _keys(run.evals) if key.endswith(PAIRS)][:most]


def over_steps(drawn: Sequence[Panel], lines: Sequence[Mapping[str, Any]], **form: Any) -> Figure | None:
    """Plot a panel for each (title, {label: (key of the lines, colour and dashes)}); None without data."""
    if not drawn:
        return None
    columns = min(4 if len(drawn) in (4, 7, 8) else 3, len(drawn))
    figure, axes = panels(-(-len(drawn) // columns), columns, width=max(9.6, 3 * columns), height=2.7)
    for ax, (title, keys) in zip(axes, drawn):
        for label, (key, look) in keys.items():
            points = [(line["step"], line[key]) for line in lines if _is_number(line.get(key))]
            ax.plot(*zip(*points), label=label, **dict(zip(("color", "linestyle"), look)), **form)  # or by the style
        ax.set_title(title)
        if len(keys) > 1:
            ax.legend()
    for ax in axes[len(drawn) :]:
        ax.set_visible(False)
    for ax in axes[max(0, len(drawn) - columns) : len(drawn)]:
        ax.set_xlabel("step")
    return figure


@styled
def trace_histogram(result: CorpusResult) -> Figure:
    """Plot the traces of all drawings against those of all texts, ProLIP figure 5."""
    figure, (ax,) = panels(1, 1, width=6.4)
    image, text = result.uncertainty(result.image), result.uncertainty(result.text)
    scale, both = _scale(image, text), np.concatenate([image, text])
    edges = (
        np.geomspace(both.min(), both.max(), 60) if scale == "log" else np.linspace(both.min(), both.max() + 1e-12, 60)
    )
    series = ((image, IMAGE, "", "--", "drawings"), (text, TEXT, "///", DOTS, "texts"))
    for values, colour, hatch, dashes, label in series:
        form: Any = {"color": colour, "alpha": 0.65, "hatch": hatch, "edgecolor": "white"}
        ax.hist(values, list(edges), weights=np.full(len(values), 1 / len(values)), label=label, **form)
        ax.axvline(values.mean(), color=colour, linestyle=dashes, linewidth=1.6)
    percent(ax.yaxis)
    ax.set(
        xlabel="trace (uncertainty); lines: means of drawings (dashed) and texts (dotted)", ylabel="share", xscale=scale
    )
    ax.legend()
    return figure


@styled
def trace_by_level(result: CorpusResult) -> Figure:
    """Plot traces by caption level and of the drawings, ProLIP figure 7: captions as dots, box of quartiles, mean."""
    figure, (ax,) = panels(1, 1, width=6.4)
    values = traces_of_levels(result.uncertainty(result.text), result.table)
    values["image"] = result.uncertainty(result.image)
    noise = np.random.default_rng(0)
    for i, (level, x) in enumerate(values.items()):
        colour = LEVEL_COLOURS[level]
        ax.scatter(i + noise.uniform(-0.3, 0.3, len(x)), x, s=5, color=colour, alpha=0.25 if len(x) > 50 else 0.8, lw=0)
        ax.boxplot(x, positions=[i], widths=0.45, boxprops={"color": INK}, **BOX)
        ax.scatter([i], [x.mean()], marker="D", s=34, color=colour, edgecolor="white", zorder=4)
        box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.8}
        ax.annotate(f"{x.mean():.3g}", (i + 0.26, x.mean()), va="center", fontsize=9, weight="bold", bbox=box, zorder=5)
    ax.set_xticks(range(len(values)), [f"{level}\n({len(x):,})" for level, x in values.items()])
    ax.set_xlim(-0.5, len(values) - 0.35)
    ax.set(ylabel="trace (uncertainty)", yscale=_scale(*values.values()))
    ax.set(xlabel="general  →  specific captions, and drawings; diamonds: means")
    return figure


@styled
def trace_by_length(result: CorpusResult) -> Figure:
    """Plot traces of texts against length, ProLIP figure 6; mean line and quartile band for at least 5 texts."""
    figure, axes = panels(1, 2, width=11)
    trace, level = result.uncertainty(result.text), result.table.text_level
    noise = np.random.default_rng(0)
    lengths = {"tokens": result.token_lengths, "characters": np.array([len(text) for text in result.table.texts])}
    for ax, (unit, length) in zip(axes, lengths.items()):
        _dots(ax, length + noise.uniform(-0.3, 0.3, len(length)), trace, level)
        groups = [(x, trace[length == x]) for x in np.unique(length)]
        rows = [(x, y.mean(), *np.quantile(y, (0.25, 0.75))) for x, y in groups if len(y) >= 5]
        x, mean, lower, upper = np.array(rows).reshape(-1, 4).T
        ax.fill_between(x, lower, upper, color=INK, alpha=0.12, lw=0)
        ax.plot(x, mean, color=INK, marker="o", markersize=3.5, label="mean")
        ax.set_title(f"Spearman {spearman(trace, length):+.2f}")
        ax.set(xlabel=f"length in {unit}", ylabel="trace (uncertainty)", yscale=_scale(trace))
    _legend(axes[1])
    return figure


@styled
def true_matches(result: CorpusResult) -> Figure:
    """Plot the trace of every text against its number of matching concepts."""
    figure, (ax,) = panels(1, 1, width=6.4)
    table, trace = result.table, result.uncertainty(result.text)
    jitter = np.exp(np.random.default_rng(0).uniform(-0.12, 0.12, len(trace)))
    _dots(ax, table.true_matches * jitter, trace, table.text_level)
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    rho = result.metrics["spearman/trace_true_matches"]
    ax.set_title(f"Spearman {rho:+.2f}" if np.isfinite(rho) else "Spearman undefined: constant traces")
    ax.set(xlabel="matching concepts", ylabel="trace (uncertainty)", yscale=_scale(trace))
    _legend(ax)
    return figure


@styled
def expected_matches(result: CorpusResult) -> Figure | None:
    """Plot the expected against the true matches of every text: a calibration plot of the traces."""
    expected = result.expected_matches
    if expected is None:
        return None
    figure, (ax,) = panels(1, 1, width=6.4)
    true = result.text_relation.sum(1)
    jitter = np.exp(np.random.default_rng(0).uniform(-0.12, 0.12, len(true)))
    shown = true > 0
    _dots(ax, (true * jitter)[shown], expected[shown], result.table.text_level[shown])
    doubling = np.floor(np.log2(np.maximum(expected, 0.5)))  # all below 1 are one group
    groups = [rows for rows in (doubling == k for k in np.unique(doubling)) if rows.sum() >= 5 and true[rows].any()]
    means = np.array([(expected[rows].mean(), true[rows].mean()) for rows in groups])
    diamonds: Any = {"color": INK, "markeredgecolor": "white", "markersize": 7, "label": "mean of a group"}
    ax.plot(*means.reshape(-1, 2).T[::-1], "D", **diamonds)
    if "share_low" in result.read:
        low, high = (len(result.corpus.drawings) * result.read[f"share_{end}"][shown] for end in ("low", "high"))
        ax.vlines((true * jitter)[shown], low, high, color=INK, linewidth=0.4, alpha=0.25, zorder=0.5)
    ends = np.array([0.2, 1.2 * max(true.max(), expected.max())])
    ax.plot(ends, ends, color=INK, linewidth=1.2, linestyle="--")
    ax.fill_between(ends, ends / 2, ends * 2, color=INK, alpha=0.08, lw=0)
    ax.set(xscale="log", yscale="log")
    ax.set(xlabel="true matches", ylabel="expected matches")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    _legend(ax)
    return figure


def refused(result: CorpusResult) -> Figure:
    """Plot the share of wrong first names of drawings against the share that is named, by refusal signal."""
    ranking = result.rankings["names"][0]
    asked = ranking.answerable.numpy()
    wrong = (~ranking.hit(1)).numpy()[asked].astype(np.float64)
    signs = signs_against(result, "names", "i2t")
    kept = [key for key in ("all", "answer", "mean", "score", "image") if key in signs]
    curves = {REFUSED_BY[key]: risk_coverage(signs[key][asked], wrong) for key in kept}
    return plot_risk_coverage(curves, f"Naming {len(wrong):,} drawings, refusing the least certain")


@styled
def reliability(result: CorpusResult) -> Figure | None:
    """Plot match probabilities of the first captions of drawings, adjusted and unadjusted; None without both."""
    rel, own = (reliabilities(x, "captions").get("calibration/match_i2t") for x in (result, replace(result, read={})))
    if result.doubt is None or rel is None or own is None:
        return None
    figure = plot_reliability(rel, "adjusted", "First captions of drawings")
    form: Any = {"color": MUTED, "linewidth": 1, "marker": "o", "markersize": 3, "zorder": 1}
    figure.axes[0].plot(own.probability, own.frequency, label=f"unadjusted  (ECE {own.ece:.3g})", **form)
    figure.axes[0].legend(loc="lower right")
    return figure


def draw_all(run: RunFolder, seed: int = 0) -> dict[str, Figure]:
    """Return every figure that the run has data for, by name."""
    figures: dict[str, Figure | None] = {"evaluations": evaluations(run), "learning_curves": learning_curves(run)}
    if run.result is not None and run.result.probabilistic:
        of_traces = (trace_histogram, trace_by_level, trace_by_length, true_matches)
        of_probabilities = (expected_matches, refused, reliability)
        figures |= {draw.__name__: draw(run.result) for draw in (*of_traces, *of_probabilities)}
        figures["pca"] = pca(run.result, seed)
    return {name: figure for name, figure in figures.items() if figure is not None}


def _dots(ax: Axes, x: np.ndarray, y: np.ndarray, level: np.ndarray) -> None:
    """Draw texts as dots in the colour and with the marker of their level, the many names below: all (T,)."""
    for i, name in reversed(list(enumerate(LEVELS))):
        rows = level == i
        form: Any = {"s": 9 if rows.sum() > 100 else 30, "color": LEVEL_COLOURS[name], "marker": LEVEL_MARKERS[name]}
        ax.scatter(x[rows], y[rows], alpha=0.5, lw=0, label=name, **form)


def _legend(ax: Axes) -> None:
    """Add a legend with larger dots."""
    for handle in ax.legend(handletextpad=0.3).legend_handles:
        if isinstance(handle, PathCollection):
            handle.set(alpha=1.0, sizes=[32])


def _keys(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the numeric keys, in order of appearance."""
    return list(dict.fromkeys(key for line in lines for key, value in line.items() if _is_number(value)))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and bool(np.isfinite(value))


def _short(key: str) -> str:
    """Return a legend entry without the words of the panel's title."""
    said = re.sub("^(inclusion|vib|trace|grad_norm)_", "", key)
    return key if said == key else said.replace("image_text", "image in text").replace("_", " ")


def _scale(*values: np.ndarray) -> str:
    """Return the scale of an axis: logarithmic if the range of positive values requires it."""
    x = np.concatenate(values)
    return "log" if x.min() > 0 and np.quantile(x, 0.98) / np.quantile(x, 0.02) > 12 else "linear"
