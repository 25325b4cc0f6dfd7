"""PCME's studies (its figures 7, 8): uncertainty of erased images, of two mixed, of texts that lost words.

    python scripts/studies/uncertainty/ambiguity.py --model local-dir:runs/demo/model \\
        --data data/emoji/emojione.tar --output figures

Strengths go from nothing to nearly all, and a stronger change contains the weaker one of the same input: the same cells
and words and further ones. So every measured change is due to the strength alone. docs/studies/hierarchy.md shows the
figure.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "scripts")]

import numpy as np
import torch
from matplotlib.figure import Figure
from scipy.stats import spearmanr
from torch import Tensor

from prolip.corpora.emoji.corpus import Concept, Corpus
from prolip.corpora.emoji.evaluate import gallery
from prolip.embedder import Embedder
from prolip.gaussian import Gaussian, concatenate
from prolip.hierarchy.entailment import short
from prolip.measures import inclusion_test
from prolip.utils.style import LOOKS, MUTED, panels, percent, styled, write
from studies.papers.figures.paper import erase

#: Share erased or dropped; of mixing, the weight of the second image, 0.5 being the most ambiguous.
ERASED = (0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)
MIXED = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
DROPPED = (0.0, 0.2, 0.4, 0.6, 0.8)
#: What a study changes, for its axis.
CHANGES = {"erase": "share of the pixels erased", "mix": "weight of a second image", "drop": "share of words dropped"}
BATCH = 128


class Study(NamedTuple):
    """One kind of change.

    strengths: (S,), the first 0, the original itself; uncertainty: (S, N); included: (S, N), H(original in changed),
    NaN for points.
    """

    name: str
    strengths: tuple[float, ...]
    uncertainty: np.ndarray
    included: np.ndarray

    @property
    def spearman(self) -> float:
        """Rank correlation of uncertainty with strength within each input, their mean; 1: always rises."""
        rows = [spearmanr(self.strengths, x).statistic for x in self.uncertainty.T if np.ptp(x) > 0]
        return float(np.mean(rows)) if rows else float("nan")

    @property
    def risen(self) -> np.ndarray:
        """(S,) share of the inputs that are more uncertain than they were."""
        return (self.uncertainty > self.uncertainty[:1]).mean(1)

    @property
    def rate(self) -> np.ndarray:
        """(S,) share of the inputs that the changed one includes, H > 0; NaN at strength 0."""
        rate = np.where(np.isnan(self.included).any(1), np.nan, (self.included > 0).mean(1))
        rate[0] = np.nan
        return rate


def mix(pixels: Tensor, weight: float) -> Tensor:
    """(1 - weight) x + weight y, y the next image, of the last the first; PCME figure 8: (B, 3, H, W)."""
    return torch.lerp(pixels, pixels.roll(-1, 0), weight)


def drop_words(text: str, share: float, rng: np.random.Generator) -> str:
    """The text without a share of its words, one at least left; which go first is drawn by rng."""
    words = text.split()
    order = rng.permutation(len(words))
    gone = set(order[: min(len(words) - 1, round(share * len(words)))].tolist())
    return " ".join(word for i, word in enumerate(words) if i not in gone)


def long_caption(concept: Concept) -> str:
    """A concept's name and keywords as one caption, which has words to lose."""
    words = dict.fromkeys(word for text in (concept.name, *concept.keywords) for word in text.split())
    return " ".join(words)


def study_images(embedder: Embedder, corpus: Corpus, most: int = 256, seed: int = 0) -> dict[str, Study]:
    """Erasing and mixing of at most `most` drawings, drawn by `seed`."""
    rng = np.random.default_rng(seed)
    rows = np.sort(rng.permutation(len(corpus.drawings))[:most])
    if len(rows) < 2:
        raise ValueError(f"{len(rows)} drawings: mixing needs two; give more with --data")
    rng.shuffle(rows)  # neighbours, that are mixed, show different things
    pixels = torch.stack([embedder.preprocess(corpus.drawings[i].image()) for i in rows])

    def erased(share: float) -> Tensor:
        return erase(pixels, share, torch.Generator().manual_seed(seed))

    changes: dict[str, tuple[Sequence[float], Callable[[float], Tensor]]] = {
        "erase": (ERASED, erased),
        "mix": (MIXED, lambda weight: mix(pixels, weight)),
    }
    return {
        name: study_of(name, embedder, strengths, [encoded(embedder, change(s)) for s in strengths])
        for name, (strengths, change) in changes.items()
    }


def study_texts(embedder: Embedder, corpus: Corpus, most: int = 256, seed: int = 0) -> Study:
    """Dropping words of at most `most` concepts' long captions, those of five words or more."""
    captions = [caption for caption in map(long_caption, corpus.concepts) if len(caption.split()) >= 5]
    if not captions:
        raise ValueError("no concept has a name and keywords of five words: give shards with keywords")
    chosen = [captions[i] for i in np.sort(np.random.default_rng(seed).permutation(len(captions))[:most])]
    found = []
    for share in DROPPED:
        texts = [drop_words(text, share, np.random.default_rng([seed, i])) for i, text in enumerate(chosen)]
        found.append(embedder.embed_texts(texts))
    return study_of("drop", embedder, DROPPED, found)


def study_of(name: str, embedder: Embedder, strengths: Sequence[float], found: Sequence[Gaussian]) -> Study:
    """What the model's method reads off the Gaussians (N, D) of every strength, and the inclusion of the first."""
    uncertainty = np.stack([embedder.score.uncertainty(z).double().numpy() for z in found])
    if embedder.probabilistic:
        included = np.stack([inclusion_test(found[0], z).double().numpy() for z in found])
    else:
        included = np.full_like(uncertainty, np.nan)
    return Study(name, tuple(strengths), uncertainty, included)


def encoded(embedder: Embedder, pixels: Tensor) -> Gaussian:
    """Any number of images, some at a time."""
    return concatenate([embedder.encode_image(part) for part in pixels.split(BATCH)])


def format_study(study: Study) -> str:
    """Its figures in words."""
    lines = [
        f"{study.name}: {study.uncertainty.shape[1]} inputs, Spearman of uncertainty with strength"
        f" {study.spearman:+.3f}",
        f"{'strength':>10}{'uncertainty':>14}{'risen':>10}{'H > 0':>10}",
    ]
    for s, x, risen, rate in zip(study.strengths, study.uncertainty.mean(1), study.risen, study.rate):
        cell = f"{'-':>10}" if np.isnan(rate) else f"{rate:10.1%}"
        lines.append(f"{s:10.3g}{x:14.4g}{risen:10.1%}{cell}")
    return "\n".join(lines)


@styled
def figure_of(named: Mapping[str, Sequence[Study]]) -> Figure:
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
        percent(below.yaxis)
    axes[0].set_ylabel("uncertainty / original's")
    axes[len(kinds)].set_ylabel("original included (H > 0)")
    handles, labels = axes[0].get_legend_handles_labels()
    if handles:
        axes[0].legend(handles, labels)
    return figure


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", action="append", required=True, help="a model with variances; once for each model")
    add("--pretrained", metavar="FILE", help="weights file, OpenCLIP's tag, or random; of all models")
    add("--data", nargs="+", required=True, metavar="TAR", help="shards whose drawings and texts are changed")
    add("--select", metavar="RULE", help="which concepts, as of prolip eval emoji")
    add("--inputs", type=int, default=256, metavar="N", help="change N drawings and N captions (default: 256)")
    add("--device", default="auto", help="cpu, cuda or cuda:N (default: auto)")
    add("--seed", type=int, default=0)
    add("--output", type=Path, required=True, metavar="FOLDER", help="folder for the figure, PNG and SVG")
    args = parser.parse_args(arguments)
    corpus, named = gallery(args.data, args.select), {}
    for model in args.model:
        embedder = Embedder.load(model, args.pretrained, device=args.device)
        if not embedder.probabilistic:
            raise SystemExit(f"{embedder.name} has no variances, and the studies are of them: give another model")
        studies = [
            *study_images(embedder, corpus, args.inputs, args.seed).values(),
            study_texts(embedder, corpus, args.inputs, args.seed),
        ]
        named[short(embedder.name)] = studies
        print("\n".join([embedder.name, *map(format_study, studies), ""]))
    written = write(figure_of(named), args.output, "ambiguity")
    print(f"written to {', '.join(map(str, written))}")


if __name__ == "__main__":
    main()
