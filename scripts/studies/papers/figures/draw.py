"""The figures of the ProLIP paper: the data of each, and all of them as files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from matplotlib.figure import Figure

from prolip.corpora.emoji.corpus import Corpus
from prolip.corpora.emoji.evaluate import evaluate_corpus
from prolip.corpora.emoji.report import figures as report
from prolip.corpora.emoji.report.pca import pca
from prolip.corpora.emoji.result import CorpusResult
from prolip.embedder import Embedder
from prolip.hierarchy import INCLUSIONS, OWN
from prolip.hierarchy.hierarcaps import read_hierarcaps
from prolip.hierarchy.levels import plot_differences, plot_traces, traces_by_level
from prolip.hierarchy.traversal import Pairwise, Traversal, traverse
from prolip.prompts.figures import plot_weights
from prolip.prompts.weights import PromptWeights
from prolip.utils.style import STYLE, write
from studies.papers.figures import paper
from studies.papers.figures.index import FIGURES, VECTORS, file_of


@dataclass
class Source:
    """The data of the figures: a model, its evaluation corpus, and optional additional data.

    levels: a folder of images at levels (default: drawings with cells erased); captions: HierarCaps' CSV (default: the
    corpus's own levels); weights: of prompts, for C.4 and C.5; inclusion: the test that chooses a drawing's caption;
    seed: of every random choice.
    """

    embedder: Embedder
    corpus: Corpus
    levels: str | None = None
    captions: str | None = None
    weights: PromptWeights | None = None
    inclusion: str = INCLUSIONS[0]
    seed: int = 0

    @cached_property
    def result(self) -> CorpusResult:
        """Return the evaluation of the model on the corpus."""
        return evaluate_corpus(self.embedder, self.corpus)

    @cached_property
    def pictures(self) -> paper.Pictures:
        """Return the images at levels."""
        if self.levels:
            return paper.Pictures.read(self.embedder, self.levels)
        return paper.Pictures.erased(self.embedder, self.result.corpus, self.seed)

    @cached_property
    def traversal(self) -> Traversal:
        """Return the traversal of all drawings through all texts; points go to "" only."""
        by: str | Pairwise = self.embedder.score.pairwise if self.inclusion == OWN else self.inclusion
        root = "included" if self.embedder.probabilistic or self.inclusion == OWN else "empty"
        empty = self.embedder.embed_texts([""])
        return traverse(self.result.image, self.result.text, empty, root, inclusion=by)


def plane(source: Source) -> Figure:
    """Draw figure 1. ValueError for a corpus that is too small to span a plane."""
    figure = pca(source.result, source.seed)
    if figure is None:
        raise ValueError("figure 1 shows a plane, but these drawings and captions span none. Give more with --data")
    return figure


def levels_of_texts(source: Source) -> Figure:
    """Draw figure 7 from HierarCaps' captions if given, else from the corpus's."""
    if source.captions is None:
        return report.trace_by_level(source.result)
    data = read_hierarcaps(source.captions)
    text = source.embedder.embed_texts(data.texts)
    uncertainty = source.embedder.score.uncertainty(text).numpy()
    return plot_traces(traces_by_level(list(uncertainty[data.rows.T])), "texts")


def weights_of(source: Source) -> PromptWeights:
    """Return the given weights of prompts. ValueError if there are none."""
    if source.weights is None:
        raise ValueError("figures C.4 and C.5 need weights of prompts. Write them with: prolip prompts fit")
    return source.weights


def histograms(source: Source) -> Figure:
    """Draw figure C.4."""
    weights = weights_of(source)
    return plot_weights(weights.table, f"Weights of {len(weights.templates)} prompts, {weights.rule}")


#: Functions that draw FIGURES.
DRAW: dict[str, Callable[[Source], Figure]] = {
    "1": plane,
    "4": lambda source: paper.certain_and_uncertain(source.result),
    "5": lambda source: report.trace_histogram(source.result),
    "6": lambda source: report.trace_by_length(source.result),
    "7": levels_of_texts,
    "8": lambda source: paper.inclusion(source.pictures, source.seed),
    "9": lambda source: paper.traversals(source.result, source.traversal, seed=source.seed),
    "C.1": lambda source: paper.pairs(source.result, seed=source.seed),
    "C.2": lambda source: plot_differences(source.pictures.traces, "images"),
    "C.3": lambda source: paper.failures(source.pictures),
    "C.4": histograms,
    "C.5": lambda source: paper.prompts_of_classes(weights_of(source), source.result, seed=source.seed),
}


def draw_figures(
    source: Source,
    folder: str | Path,
    only: Sequence[str] | None = None,
    vector: str = VECTORS[0],
    dpi: int | None = None,
) -> Iterator[tuple[str, list[Path], str]]:
    """Write figures, all or `only` these, as PNG and vectors. Yield the key of each, its files, and why it has none.

    ValueError before the evaluation if one of `only` cannot be drawn.
    """
    missing = {}
    for key, figure in FIGURES.items():
        if figure.needs_variances and not source.embedder.probabilistic:
            missing[key] = f"{source.embedder.name} has no variances"
        if figure.needs_weights and source.weights is None:
            missing[key] = "it needs --prompts"
    for key in only or ():
        if key in missing:
            raise ValueError(f"figure {key} cannot be drawn: {missing[key]}")
    for key in only or FIGURES:
        done = key not in missing
        files = write(DRAW[key](source), folder, file_of(key), vector, dpi or STYLE["savefig.dpi"]) if done else []
        yield key, files, missing.get(key, "")
