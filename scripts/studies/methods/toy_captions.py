"""PCME's toy experiment (4.4 and C.3), small: images and captions of nine classes in the plane, and vaguer captions.

    python scripts/studies/methods/toy_captions.py --seeds 0 1 2 --figure captions.png

The paper trains PCME in two dimensions on nine classes of CUB, three kinds of three; its figure 5 has the 50% region
of each embedding, and the 99% region of "this bird has <unk> ... <unk>", which covers most captions. Here an image is
16 numbers (its kind's, its class's, noise). A caption is two words common to all, one of its kind and one of its class.
Two layers encode images, a bidirectional GRU captions, each with two projections to the plane; means are not
normalised. PCME's loss has J = 7 samples, a and b from 5, KL 0.001, words dropped with 0.1 and numbers of images with
0.2, as in the paper for CUB; Adam at 0.003, 600 batches of 48. Uniformity is 0, as for COCO (--uniformity).
It prints the geometric mean of sigma by the words a caption lacks, and the share of captions in the generic region.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "src"))

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from matplotlib.collections import EllipseCollection
from torch import Tensor, nn

from prolip.gaussian import Gaussian
from prolip.losses import log_match_odds, uniformity_over_ranks, vib

CLASSES, KINDS, EACH, WIDTH = 9, 3, 60, 16
SHARED, SYNONYMS, UNKNOWN = 6, 2, 0
WORDS = 1 + SHARED + SYNONYMS * (KINDS + CLASSES)
BATCH, SAMPLES, START, KL, RATE, DROPPED, ERASED = 48, 7, 5.0, 1e-3, 3e-3, 0.1, 0.2
#: Unknown words of a caption: two are common to all, then one of the kind, one of the class.
OPEN: dict[str, list[int]] = {"nothing": [], "the class": [3], "class and kind": [2, 3], "all words": [0, 1, 2, 3]}
#: Squared radius, in sigma, that holds 50% and 99% of a Gaussian in the plane: -2 log(1 - p).
HALF, NEARLY_ALL = 1.386, 9.210


class Data(NamedTuple):
    """Images (N, 16), captions of four words (N, 4), the class of each pair (N,)."""

    image: Tensor
    caption: Tensor
    label: Tensor


class Encoder(nn.Module):
    """A Gaussian in the plane from features of a network, by two projections."""

    def __init__(self, width: int):
        super().__init__()
        self.mean, self.log_var = nn.Linear(width, 2), nn.Linear(width, 2)
        nn.init.constant_(self.log_var.bias, -2.0)

    def forward(self, x: Tensor) -> Gaussian:
        return Gaussian(self.mean(x), self.log_var(x))


class CaptionEncoder(nn.Module):
    """Words (N, L) -> Gaussians, by the last states of a bidirectional GRU."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.gru = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.heads = Encoder(2 * width)

    def forward(self, words: Tensor) -> Gaussian:
        last = self.gru(self.words(words))[1]
        return self.heads(last.transpose(0, 1).flatten(1))


class Found(NamedTuple):
    """Embeddings of the images, and of all captions by the words they lack; the class of each."""

    image: Gaussian
    captions: dict[str, Gaussian]
    label: Tensor

    def sigma(self, what: str) -> float:
        """Return PCME's uncertainty, the geometric mean over the dimensions, averaged over captions."""
        return (self.captions[what].log_var.mean(1) / 2).exp().mean().item()

    @property
    def covered(self) -> float:
        """Return the share of the whole captions whose mean lies in the 99% region of the generic one."""
        whole, generic = self.captions["nothing"], self.captions["all words"].select(slice(0, 1))
        return ((whole.mean - generic.mean).square() / generic.var).sum(1).le(NEARLY_ALL).float().mean().item()


def draw(g: torch.Generator) -> Data:
    """Draw sixty images of each class with a caption each."""
    kinds, own = (torch.randn(count, WIDTH, generator=g) for count in (KINDS, CLASSES))
    label = torch.arange(CLASSES).repeat_interleave(EACH)
    kind = label // (CLASSES // KINDS)
    image = kinds[kind] + 0.7 * own[label] + 0.5 * torch.randn(len(label), WIDTH, generator=g)
    shared = 1 + torch.randint(SHARED, (len(label), 2), generator=g)
    groups = torch.stack([kind, KINDS + label], 1)
    chosen = 1 + SHARED + SYNONYMS * groups + torch.randint(SYNONYMS, groups.shape, generator=g)
    return Data(image, torch.cat([shared, chosen], 1), label)


def train(seed: int, steps: int, uniformity: float = 0.0) -> Found:
    """Train PCME on the nine classes. A pair matches if both have the same class."""
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    data = draw(g)
    images = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), Encoder(64))
    texts = CaptionEncoder()
    a, b = (torch.tensor(START, requires_grad=True) for _ in range(2))
    optimizer = torch.optim.Adam([*images.parameters(), *texts.parameters(), a, b], lr=RATE)
    for _ in range(steps):
        rows = torch.randperm(len(data.label), generator=g)[:BATCH]
        image, caption, label = (x[rows] for x in data)
        v = images(image * (torch.rand(image.shape, generator=g) >= ERASED))
        t = texts(caption.masked_fill(torch.rand(caption.shape, generator=g) < DROPPED, UNKNOWN))
        points = v.sample(SAMPLES, g).transpose(0, 1), t.sample(SAMPLES, g).transpose(0, 1)
        same = (label.unsqueeze(1) == label).float()
        odds = log_match_odds(*points, a, b)
        loss = F.binary_cross_entropy_with_logits(odds, same, reduction="sum") / BATCH + KL * (vib(v) + vib(t))
        if uniformity:
            loss = loss + uniformity * uniformity_over_ranks(torch.cat([x[:, 0] for x in points]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        said = {
            what: data.caption.index_fill(1, torch.tensor(which, dtype=torch.long), UNKNOWN)
            for what, which in OPEN.items()
        }
        return Found(images(data.image), {what: texts(words) for what, words in said.items()}, data.label)


def draw_figure(found: Found, path: Path) -> None:
    """Draw 50% regions of images and captions with and without class, in class colours; the generic 99% is red."""
    shown = {
        "images": found.image,
        "captions": found.captions["nothing"],
        "captions without their class": found.captions["the class"],
    }
    figure, axes = plt.subplots(1, 3, figsize=(10.5, 3.8), constrained_layout=True)
    generic = found.captions["all words"].select(slice(0, 1))
    reach = (NEARLY_ALL * generic.var).sqrt()
    seen = torch.cat([generic.mean - reach, generic.mean + reach, *(z.mean for z in shown.values())])
    side = 1.1 * (seen.amax(0) - seen.amin(0)).amax().item()
    left, low = ((seen.amax(0) + seen.amin(0) - side) / 2).tolist()
    looks = {"facecolors": 0.02, "edgecolors": 0.3}  # opacity of faces and edges
    colours = plt.get_cmap("tab10")(found.label.numpy())
    for axis, (name, z) in zip(axes, shown.items()):
        for gaussian, radius, look in (
            (z, HALF, {key: [(*c[:3], alpha) for c in colours] for key, alpha in looks.items()}),
            (generic, NEARLY_ALL, {"facecolors": "none", "edgecolors": "red", "linewidths": 1.5}),
        ):
            width, height = (2 * radius**0.5 * (gaussian.log_var / 2).exp().numpy()).T
            axis.add_collection(
                EllipseCollection(
                    width, height, 0, units="xy", offsets=gaussian.mean.numpy(), transOffset=axis.transData, **look
                )
            )
        axis.scatter(*z.mean.numpy().T, s=3, c=colours)
        axis.set_title(name, fontsize=10)
        axis.set_aspect("equal")
        axis.set_xticks([])
        axis.set_yticks([])
        axis.set(xlim=(left, left + side), ylim=(low, low + side))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=600, help="number of batches (default: 600)")
    parser.add_argument("--uniformity", type=float, default=0.0, help="weight of the uniformity loss (default: 0)")
    parser.add_argument("--figure", type=Path, help="file for the figure of the first seed")
    options = parser.parse_args(arguments)
    found = [train(seed, options.steps, options.uniformity) for seed in options.seeds]
    print("| a caption lacks | sigma | of each seed |\n|---|---:|---|")
    for what in OPEN:
        values = [x.sigma(what) for x in found]
        print(f"| {what} | {sum(values) / len(values):.2f} | {' '.join(f'{x:.2f}' for x in values)} |")
    covered = " ".join(f"{x.covered:.0%}" for x in found)
    print(f"\nwhole captions in the 99% region of one without known words: {covered}")
    if options.figure:
        draw_figure(found[0], options.figure)
        print(f"{options.figure} shows the embeddings")


if __name__ == "__main__":
    main()
