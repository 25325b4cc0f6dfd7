"""Plots and lists of prompt weights: their distance from even weights (ProLIP figure C.4), and the largest ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from prolip.prompts.weights import PromptWeights
from prolip.utils.style import LOOKS, panels, styled

BINS = 30


def entropy(weights: Tensor) -> Tensor:
    """Return -sum pi log pi in nats, log N for N even weights: (C, N) -> (C,)."""
    return -torch.xlogy(weights, weights).sum(1)


@styled
def plot_weights(weights: Tensor, title: str = "Weights of prompts") -> Figure:
    """Plot histograms over classes of the largest weight and the entropy, with the values of even weights: (C, N)."""
    figure, axes = panels(1, 2, width=9.6, height=3.5)
    prompts = weights.shape[1]
    columns = (
        (weights.amax(1), 1 / prompts, "largest weight of a class", "{:.3f}"),
        (entropy(weights), float(np.log(prompts)), "entropy of a class's weights, nats", "{:.2f}"),
    )
    for ax, (values, even, label, form) in zip(axes, columns):
        low, high = min(float(values.min()), even), max(float(values.max()), even)
        room = 0.03 * (high - low) or 0.1 * abs(even) or 0.1
        look: Any = {"color": LOOKS[0][0], "edgecolor": "white", "linewidth": 0.5, "label": f"{len(values)} classes"}
        ax.hist(values.numpy(), bins=BINS, range=(low - room, high + room), **look)
        ax.axvline(even, color=LOOKS[1][0], linestyle="--", label=f"even: {form.format(even)}")
        middle = float(values.median())
        ax.axvline(middle, color="black", linestyle=":", label=f"median: {form.format(middle)}")
        ax.set(xlabel=label, ylabel="classes")
        ax.yaxis.set_major_locator(MaxNLocator(integer=True))
        ax.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=3, columnspacing=1.0, handlelength=1.6)
    figure.suptitle(title, x=0.01, ha="left")
    return figure


def listing(fitted: PromptWeights, most: int = 3) -> Iterator[str]:
    """Yield lines: the prompts of largest mean weight, then the `most` most and least weighted ones of each class."""
    table, prompts = fitted.table, len(fitted.templates)
    own = entropy(table)
    yield f"{fitted}"
    yield f"{len(table)} classes, {prompts} prompts; even weights are {1 / prompts:.4f}"
    spread = f"{own.mean():.3f} nats on average, {own.min():.3f} to {own.max():.3f}"
    yield f"entropy {spread} (even weights: {np.log(prompts):.3f})"
    mean = table.mean(0)
    for rank in mean.argsort(descending=True, stable=True).tolist():
        yield f"{mean[rank]:8.4f}  {fitted.templates[rank]}"
    for i, (name, row, nats) in enumerate(zip(fitted.classnames, table, own)):
        name = f"{name} (class {i})" if fitted.classnames.count(name) > 1 else name  # ImageNet has two `missile`
        order = row.argsort(descending=True, stable=True).tolist()
        shown = order[:most], order[max(most, prompts - most) :]
        words = [", ".join(f"{row[i]:.4f} {fitted.templates[i]!r}" for i in part) for part in shown]
        yield f"{name} (entropy {nats:.3f}): most {words[0]}" + (f"; least {words[1]}" if words[1] else "")
