"""The toy experiment of PCME++ (appendix A.2): which distance learns that a sample is ambiguous? Metrics and a figure.

    python scripts/studies/methods/toy.py --seeds 0 1 2 --figure toy.png

Three classes of 500 points lie in the plane; 150 of each change to the next class half of the time, drawn again for
every batch. Each point is a trainable Gaussian. The loss is the cross-entropy of same and other class over all pairs of
a batch of 128, for 500 batches, with Adam at 0.02. The result is mean sigma^2 of ambiguous over certain points, by the
closed-form distance (csd) and by the squared Wasserstein distance. The paper has 3.05 / 1.68 = 1.82 and
2.80 / 2.69 = 1.04. It does not give the start of a and b (here 1 and 3, trainable). It says 500 epochs: with 500 passes
over all points instead of 500 batches the ratios keep growing (--steps 6000). Triplets train only the means.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "src"))

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from matplotlib.collections import EllipseCollection
from torch import Tensor

from prolip.gaussian import Gaussian
from prolip.losses import matching_loss, triplet_loss
from prolip.measures import get_measure

CLASSES, POINTS, AMBIGUOUS, BATCH, RATE = 3, 500, 150, 128, 0.02
#: Ratio in the paper, by measure.
PAPER = {"csd": 1.82, "wasserstein2": 1.04}
WAYS = {
    "csd": "closed-form distance",
    "wasserstein2": "Wasserstein distance",
    "hardest": "triplets, hardest",
    "all": "triplets, sum",
}


class Points(NamedTuple):
    """Gaussians (N, 2) of points, the class of each (N,), and a mask of ambiguous points (N,)."""

    z: Gaussian
    label: Tensor
    ambiguous: Tensor

    @property
    def ratio(self) -> float:
        """Return the mean variance of ambiguous points over that of certain points."""
        return (self.z.var[self.ambiguous].mean() / self.z.var[~self.ambiguous].mean()).item()


def draw(seed: int) -> tuple[Points, torch.Generator]:
    """Return points around the centres of their classes, log sigma uniform in (-1.5, 1.5), and the random generator."""
    g = torch.Generator().manual_seed(seed)
    centre = torch.randn(CLASSES, 2, generator=g)
    label = torch.arange(CLASSES).repeat_interleave(POINTS)
    mean = centre[label] + 0.1 * torch.randn(len(label), 2, generator=g)
    log_sigma = 3 * torch.rand(len(label), 2, generator=g) - 1.5
    ambiguous = torch.arange(len(label)) % POINTS >= POINTS - AMBIGUOUS
    return Points(Gaussian(mean, 2 * log_sigma), label, ambiguous), g


def train(way: str, seed: int, steps: int, scale: float = 1.0, bias: float = 3.0) -> Points:
    """Return the points after `steps` batches. way: a measure, or the negatives of `triplet_loss`."""
    points, g = draw(seed)
    mean, log_sigma = points.z.mean.requires_grad_(), (points.z.log_var / 2).requires_grad_()
    a, b = (torch.tensor(x, requires_grad=True) for x in (scale, bias))
    optimizer = torch.optim.Adam([mean, log_sigma, a, b], lr=RATE)
    for _ in range(steps):
        rows = torch.randperm(len(mean), generator=g)[:BATCH]
        other = points.ambiguous & (torch.rand(len(mean), generator=g) < 0.5)
        label = torch.where(other, (points.label + 1) % CLASSES, points.label)[rows]
        same = label.unsqueeze(1) == label
        z = Gaussian(mean[rows], 2 * log_sigma[rows])
        if way in PAPER:
            loss = matching_loss(b - a * get_measure({"csd": "csd_distance"}.get(way, way)).pairwise(z, z), same)
        else:
            loss = of_triplets(-torch.cdist(z.mean, z.mean), same, g, way)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return points._replace(z=Gaussian(mean.detach(), 2 * log_sigma.detach()))


def of_triplets(similarity: Tensor, same: Tensor, g: torch.Generator, negatives: str) -> Tensor:
    """Compute the triplet loss of every point with another of its class against points of other classes."""
    chance = torch.rand(same.shape, generator=g) * same.float().fill_diagonal_(0)
    own = similarity.gather(1, chance.argmax(1, keepdim=True)).squeeze(1)
    return triplet_loss(similarity, same, own, negatives=negatives)  # type: ignore[arg-type]


def draw_figure(found: dict[str, Points], path: Path) -> None:
    """Draw a panel for each way: points as circles of two sigma, ambiguous ones grey."""
    figure, axes = plt.subplots(1, len(found), figsize=(3.2 * len(found), 3.5), constrained_layout=True)
    for axis, (way, points) in zip(axes, found.items()):
        x, sigma = points.z.mean.numpy(), (points.z.log_var / 2).exp().numpy()
        for name, colour, chosen in [
            ("ambiguous", "0.6", points.ambiguous),
            *((None, f"C{c}", (points.label == c) & ~points.ambiguous) for c in range(CLASSES)),
        ]:
            rows = chosen.numpy()
            if way in PAPER:
                width, height = (0.12 * sigma[rows]).T
                axis.add_collection(
                    EllipseCollection(
                        width,
                        height,
                        0,
                        units="xy",
                        offsets=x[rows],
                        transOffset=axis.transData,
                        facecolors=colour,
                        alpha=0.35,
                        edgecolors="none",
                    )
                )
            axis.scatter(*x[rows].T, s=2, color=colour, label=name)
        said = f"\nambiguous / certain {points.ratio:.2f} (paper {PAPER[way]})" if way in PAPER else ""
        axis.set_title(WAYS[way] + said, fontsize=9)
        axis.set_aspect("equal", adjustable="datalim")
        axis.set_xticks([])
        axis.set_yticks([])
    axes[0].legend(loc="upper right", fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=500, help="number of batches (default: 500)")
    parser.add_argument("--scale", type=float, default=1.0, help="initial value of a (default: 1)")
    parser.add_argument("--bias", type=float, default=3.0, help="initial value of b (default: 3)")
    parser.add_argument("--figure", type=Path, help="file for the figure of the first seed")
    options = parser.parse_args(arguments)
    run: Callable[..., Points] = lambda way, seed: train(way, seed, options.steps, options.scale, options.bias)  # noqa: E731
    print("| distance | certain | ambiguous | ratio | of each seed | paper |\n|---|---:|---:|---:|---|---:|")
    for way in PAPER:
        found = [run(way, seed) for seed in options.seeds]
        certain, ambiguous = (
            sum(x.z.var[x.ambiguous == kind].mean().item() for x in found) / len(found) for kind in (False, True)
        )
        ratios = [x.ratio for x in found]
        print(
            f"| {way} | {certain:.2f} | {ambiguous:.2f} | {sum(ratios) / len(ratios):.2f} |"
            f" {' '.join(f'{x:.2f}' for x in ratios)} | {PAPER[way]} |"
        )
    if options.figure:
        draw_figure({way: run(way, options.seeds[0]) for way in WAYS}, options.figure)
        print(f"{options.figure} shows the points")


if __name__ == "__main__":
    main()
