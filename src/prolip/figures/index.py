"""Which figures of the ProLIP paper there are, and what each is drawn from."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from matplotlib.figure import Figure

from prolip.evaluation.model import Embedder
from prolip.evaluation.suites.emoji.result import CorpusResult
from prolip.figures import images, prompts, samples, walks
from prolip.figures.images import Pictures
from prolip.hierarchy import figures as hierarchy
from prolip.hierarchy.hierarcaps import read_hierarcaps
from prolip.hierarchy.levels import traces_by_level
from prolip.hierarchy.traversal import INCLUSIONS, Pairwise, Traversal, traverse
from prolip.prompts.figures import plot_weights
from prolip.prompts.weights import PromptWeights
from prolip.report import figures as report
from prolip.report.pca import pca

#: The score of the model's method, in place of a measure of inclusion.
OWN = "own"


@dataclass
class Source:
    """What figures are drawn from: a model, its evaluation on a corpus, and data of others where they are given.

    levels: a folder of images at levels (default: drawings with cells erased); captions: HierarCaps' CSV (default: the
    corpus's own levels); weights: of prompts, for C.4 and C.5; inclusion: by which a caption includes a drawing most;
    seed: of every choice.
    """

    embedder: Embedder
    result: CorpusResult
    levels: str | None = None
    captions: str | None = None
    weights: PromptWeights | None = None
    inclusion: str = next(iter(INCLUSIONS))
    seed: int = 0

    @cached_property
    def pictures(self) -> Pictures:
        """Images at levels."""
        if self.levels:
            return Pictures.read(self.embedder, self.levels)
        return Pictures.erased(self.embedder, self.result.corpus, self.seed)

    @cached_property
    def traversal(self) -> Traversal:
        """Of all drawings through all texts; of points to "" alone."""
        by: str | Pairwise = self.embedder.score.pairwise if self.inclusion == OWN else self.inclusion
        root = "included" if self.embedder.probabilistic or self.inclusion == OWN else "empty"
        empty = self.embedder.embed_texts([""])
        return traverse(self.result.image, self.result.text, empty, root, inclusion=by)


class Drawn(NamedTuple):
    """A figure: its file's name, what it shows in words, whether it needs variances, how it is drawn, and whether it
    needs weights of prompts.
    """

    name: str
    words: str
    needs_variances: bool
    draw: Callable[[Source], Figure]
    needs_weights: bool = False


def plane(source: Source) -> Figure:
    """Figure 1. ValueError for a corpus that is too small to span a plane."""
    figure = pca(source.result, source.seed)
    if figure is None:
        raise ValueError("these drawings and their captions span no plane, which figure 1 shows: give more with --data")
    return figure


def levels_of_texts(source: Source) -> Figure:
    """Figure 7: of HierarCaps' captions where they are given, else of the corpus's."""
    if source.captions is None:
        return report.trace_by_level(source.result)
    data = read_hierarcaps(source.captions)
    text = source.embedder.embed_texts(data.texts)
    uncertainty = source.embedder.score.uncertainty(text).numpy()
    return hierarchy.trace_by_level(traces_by_level(list(uncertainty[data.rows.T])), "texts")


def weights_of(source: Source) -> PromptWeights:
    """Those that were given. ValueError where none were."""
    if source.weights is None:
        raise ValueError("figures C.4 and C.5 show weights of prompts, none are given: prolip prompts fit")
    return source.weights


def histograms(source: Source) -> Figure:
    """Figure C.4."""
    weights = weights_of(source)
    return plot_weights(weights.table, f"Weights of {len(weights.templates)} prompts, {weights.rule}")


FIGURES: dict[str, Drawn] = {
    "1": Drawn("plane", "Gaussians of drawings and of their captions in a plane", False, plane),
    "4": Drawn("samples", "the least and most uncertain drawings and texts", True,
               lambda source: samples.certain_and_uncertain(source.result)),
    "5": Drawn("modalities", "uncertainty of drawings against that of texts", True,
               lambda source: report.trace_histogram(source.result)),
    "6": Drawn("lengths", "uncertainty of texts against their length", True,
               lambda source: report.trace_by_length(source.result)),
    "7": Drawn("text_levels", "uncertainty of texts by level, general to specific", True, levels_of_texts),
    "8": Drawn("image_levels", "whether images are included in parts of themselves", True,
               lambda source: images.inclusion(source.pictures, source.seed)),
    "9": Drawn("traversals", "captions met from drawings to their roots", False,
               lambda source: walks.traversals(source.result, source.traversal, seed=source.seed)),
    "C.1": Drawn("pairs", "pairs of certain and uncertain drawings and texts", True,
                 lambda source: samples.pairs(source.result, seed=source.seed)),
    "C.2": Drawn("image_traces", "uncertainty of images by level, and against their originals'", True,
                 lambda source: hierarchy.trace_differences(source.pictures.traces, "images")),
    "C.3": Drawn("failures", "images that their own level 0 does not include", True,
                 lambda source: images.failures(source.pictures)),
    "C.4": Drawn("prompts", "how uneven the weights of prompts are", False, histograms, needs_weights=True),
    "C.5": Drawn("prompts_of_classes", "the prompts that count most, beside drawings of their classes", False,
                 lambda source: prompts.examples(weights_of(source), source.result, seed=source.seed),
                 needs_weights=True),
}  # fmt: skip


def file_of(key: str) -> str:
    """How the files of a figure are called, without their kind: figure_C1_pairs."""
    return f"figure_{key.replace('.', '')}_{FIGURES[key].name}"
