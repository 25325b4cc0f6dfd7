"""A plane through the embedding space: sampled Gaussians of a few concepts, ProLIP figure 1 and appendix A.1."""
from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.offsetbox import AnnotationBbox, OffsetImage
from matplotlib.patches import Ellipse
from sklearn.decomposition import PCA

from prolip.data.emoji import LEVELS
from prolip.evaluation.result import Result
from prolip.gaussian import Gaussian, concatenate
from prolip.report.style import INK, LEVEL_COLOURS, panels, styled

POINTS = 10  # per Gaussian, as in appendix A.1


class Plane(NamedTuple):
    """Gaussians seen in the plane of two principal components.

    mean (M, 2), covariance (M, 2, 2), points (M, POINTS, 2); share (2,): of the samples' variance along each axis.
    """

    mean: np.ndarray
    covariance: np.ndarray
    points: np.ndarray
    share: np.ndarray


def project(z: Gaussian, seed: int = 0) -> Plane:
    """Fit PCA to points sampled from the Gaussians (M, D), and project means and covariances with it.

    A linear map keeps a Gaussian Gaussian: with the components C (2, D), mean -> C (mean - centre) and
    diag(sigma^2) -> C diag(sigma^2) C^T.
    """
    points = z.sample(POINTS, generator=torch.Generator().manual_seed(seed)).transpose(0, 1).double().numpy()
    fit = PCA(n_components=2, svd_solver="full").fit(points.reshape(-1, points.shape[-1]))
    components = fit.components_
    covariance = np.einsum("id,nd,jd->nij", components, z.var.double().numpy(), components)
    flat = fit.transform(points.reshape(-1, points.shape[-1])).reshape(*points.shape[:2], 2)
    return Plane(fit.transform(z.mean.double().numpy()), covariance, flat, fit.explained_variance_ratio_)


def ellipse(mean: np.ndarray, covariance: np.ndarray, sigmas: float, **style) -> Ellipse:
    """The contour of a planar Gaussian at so many standard deviations. mean (2,), covariance (2, 2)."""
    values, axes = np.linalg.eigh(covariance)
    width, height = 2 * sigmas * np.sqrt(np.maximum(values[::-1], 0))
    angle = np.degrees(np.arctan2(axes[1, 1], axes[0, 1]))
    return Ellipse((mean[0], mean[1]), width, height, angle=angle, **style)


def choose(result: Result, seed: int, subgroups: int = 3, each: int = 2) -> list[int]:
    """Rows of drawings: `each` of so many random subgroups, by a seeded generator and nothing else."""
    rng = np.random.default_rng(seed)
    rows: dict[str, list[int]] = {}
    for i, drawing in enumerate(result.corpus.drawings):
        rows.setdefault(result.corpus.concepts[drawing.concept].subgroup, []).append(i)
    able = sorted(name for name, members in rows.items() if len(members) >= each) or sorted(rows)
    chosen = rng.choice(able, size=min(subgroups, len(able)), replace=False)
    return [int(i) for name in chosen for i in rng.choice(rows[name], size=min(each, len(rows[name])), replace=False)]


@styled
def pca(result: Result, seed: int = 0) -> Figure | None:
    """Drawings of a few concepts with their captions of all four levels; ellipses at 1 and 2 standard deviations."""
    drawings = choose(result, seed)
    captions = _captions(result, drawings)
    text_of = {text: i for i, text in enumerate(result.table.texts)}
    z = concatenate([result.image.select(drawings), result.text.select([text_of[text] for text in captions])])
    if len(z.mean) < 3:
        return None
    plane = project(z, seed)
    levels = ["image"] * len(drawings) + list(captions.values())
    figure, (ax,) = panels(1, 1, width=9.6, height=6.6)
    for mean, covariance, points, level in zip(plane.mean, plane.covariance, plane.points, levels):
        colour = LEVEL_COLOURS[level]
        for sigmas, alpha in ((2, 0.07), (1, 0.13)):
            ax.add_patch(ellipse(mean, covariance, sigmas, facecolor=colour, edgecolor=colour, alpha=alpha))
            ax.add_patch(ellipse(mean, covariance, sigmas, fill=False, edgecolor=colour, linewidth=0.9, alpha=0.7))
        ax.scatter(points[:, 0], points[:, 1], s=5, color=colour, alpha=0.45, lw=0)
    for i, row in enumerate(drawings):
        thumbnail = OffsetImage(np.asarray(result.corpus.drawings[row].image()), zoom=0.42)
        frame = {"edgecolor": LEVEL_COLOURS["image"], "linewidth": 1.2, "boxstyle": "round,pad=0.1"}
        ax.add_artist(AnnotationBbox(thumbnail, plane.mean[i], frameon=True, pad=0.1, bboxprops=frame))
    here = plane.mean[len(drawings) :]
    for level in LEVELS:
        of_level = [i for i, name in enumerate(captions.values()) if name == level]
        x, y = here[of_level].T
        ax.scatter(x, y, s=46, color=LEVEL_COLOURS[level], edgecolor="white", zorder=5, label=level)
    ax.scatter([], [], s=60, marker="s", facecolor="white", edgecolor=LEVEL_COLOURS["image"], label="drawing")
    ax.autoscale_view()
    ax.margins(0.08)
    ax.set_aspect("equal", adjustable="datalim")
    ax.set(xlabel=f"first component ({plane.share[0]:.0%} of the samples' variance)",
           ylabel=f"second component ({plane.share[1]:.0%})")  # fmt: skip
    ax.legend(loc="best", handletextpad=0.3)
    figure.draw_without_rendering()  # label places depend on the final limits
    _label(ax, here, list(captions), plane.mean[: len(drawings)])
    return figure


def _captions(result: Result, drawings: list[int]) -> dict[str, str]:
    """Caption -> level: every concept's name, first keyword, subgroup and group, each text once at its first level."""
    out: dict[str, str] = {}
    concepts = [result.corpus.concepts[result.corpus.drawings[i].concept] for i in drawings]
    for level in LEVELS:
        for concept in concepts:
            for text in concept.captions(level)[:1]:
                out.setdefault(text, level)
    return out


def _label(ax: Axes, points: np.ndarray, texts: list[str], taken: np.ndarray) -> None:
    """Write each text beside its point, at the offset that covers least of the labels and drawings placed so far."""
    pixels = ax.transData.transform(points)
    boxes = [(x - 17, y - 17, x + 17, y + 17) for x, y in ax.transData.transform(taken)]
    boxes += [(x - 4, y - 4, x + 4, y + 4) for x, y in pixels]
    for (x, y), text in zip(pixels, texts):
        width, height = 6.2 * len(text), 13
        offsets = [(8, -6), (-8 - width, -6), (-width / 2, 9), (-width / 2, -9 - height)]
        offsets += [(8, 8), (8, -20), (-8 - width, 8), (-8 - width, -20), (14, 22), (14, -34), (-14 - width, 22)]
        places = [(x + dx, y + dy, x + dx + width, y + dy + height) for dx, dy in offsets]
        cost = [sum(_overlap(place, box) for box in boxes) + 0.01 * i for i, place in enumerate(places)]
        best = places[int(np.argmin(cost))]
        boxes.append(best)
        at = ax.transData.inverted().transform(best[:2])
        ax.text(at[0], at[1], text, fontsize=9, color=INK, zorder=6, va="bottom")


def _overlap(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    """Common area of two boxes (left, bottom, right, top)."""
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
