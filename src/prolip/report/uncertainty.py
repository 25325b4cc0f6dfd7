"""What a model with units does not know: the first section of its page, all from the evaluation's embeddings."""
from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from prolip.data.emoji import LEVELS
from prolip.evaluation.metrics.blockwise import Relevance
from prolip.evaluation.metrics.traces import by_decile
from prolip.evaluation.suites.emoji.refusal import signs_against
from prolip.evaluation.suites.emoji.result import CorpusResult
from prolip.report.examples import Example, Inputs, Shown, example, pick, picture, show
from prolip.uncertainty.units import Units, in_words

#: Where the texts of the first examples lie among all that fit a drawing, ordered by expected matches. Most fit one, so
#: equal steps would show five alike.
QUANTILES = (0.5, 0.8, 0.9, 0.97, 0.995)


class Text(NamedTuple):
    """A text and what it finds first. share: of the drawings, in words; expected: how many; bits: what it says."""

    example: Example
    share: str
    expected: float
    bits: float


class Drawing(NamedTuple):
    """A drawing with its first name. sure: the probability that it is the right one; texts: how many could be meant."""

    example: Example
    sure: float
    texts: float


class Third(NamedTuple):
    """A third of the drawings by what speaks against their first names: how many, the share that get their own, some at
    random.
    """

    drawings: int
    right: float
    examples: list[Drawing]


class Error(NamedTuple):
    """How far the expected numbers of a level's texts are from the true ones, in doublings (log2): the mean with its
    sign and without, of the model and of the one number for all that is nearest to all texts.
    """

    level: str
    texts: int
    true: float
    model: tuple[float, float]
    constant: tuple[float, float]


class Section(NamedTuple):
    """All of it. texts: specific ones first; thirds: the surest first; constant: the number for all texts that `errors`
    has beside the model.
    """

    units: Units
    texts: list[Text]
    thirds: list[Third]
    errors: list[Error]
    constant: float


def section(result: CorpusResult, seed: int = 0) -> Section | None:
    """What the page shows; None where the model's traces have no unit."""
    units, expected = result.model_score.units, result.expected_matches
    if units is None or expected is None:
        return None
    against = signs_against(result, "names", "i2t")
    sure = np.exp(-against["answer"]).clip(max=1.0)
    unsure = against.get("all", against["answer"])
    return Section(units, texts(result, units, expected), thirds(result, units, unsure, sure, seed),
                   *errors(result, expected))  # fmt: skip


def drawn(result: CorpusResult) -> Inputs:
    """The drawings of the corpus, as the model saw them, by their names."""
    corpus = result.corpus
    return Inputs(result.image, [corpus.concepts[one.concept].name for one in corpus.drawings],
                  lambda row: picture(corpus.drawings[row].image(), lossless=True))  # fmt: skip


def show_corpus(result: CorpusResult) -> Shown:
    """Drawings and all texts, as any other test set."""
    own = result.model_score if result.probabilistic else None
    relevance = Relevance.from_dense(torch.from_numpy(result.text_relation.T))
    return show(drawn(result), Inputs(result.text, result.table.texts), relevance, result.score, own)


def texts(result: CorpusResult, units: Units, expected: np.ndarray, top: int = 8) -> list[Text]:
    """The texts at QUANTILES of the expected matches, of those that fit any drawing, with the drawings found first."""
    shown = np.flatnonzero(result.text_relation.any(1))
    order = shown[expected[shown].argsort(kind="stable")]
    chosen = [int(order[round(quantile * (len(order) - 1))]) for quantile in QUANTILES]
    bits, share = units.information(result.text.trace, bits=True).tolist(), units.share(result.text.trace).tolist()
    scores = result.score.pairwise(result.image, result.text.select(chosen)).mT
    return [
        Text(example(scores[k], torch.from_numpy(result.text_relation[i]), drawn(result), result.table.texts[i],
                     LEVELS[result.table.text_level[i]], top),
             in_words(share[i]), float(expected[i]), bits[i])
        for k, i in enumerate(chosen)
    ]  # fmt: skip


def errors(result: CorpusResult, expected: np.ndarray) -> tuple[list[Error], float]:
    """The errors of every level's texts that fit any drawing, and the number that the constant has for all of them."""
    true = result.text_relation.sum(1)
    constant = 2 ** float(np.log2(true[true > 0]).mean())
    rows = {level: np.flatnonzero((result.table.text_level == i) & (true > 0)) for i, level in enumerate(LEVELS)}
    flat = np.full(len(true), constant)

    def off(numbers: np.ndarray, own: np.ndarray) -> tuple[float, float]:
        doublings = np.log2(numbers / true[own])
        return float(doublings.mean()), float(np.abs(doublings).mean())

    found = [Error(level, len(own), float(true[own].mean()), off(expected[own], own), off(flat[own], own))
             for level, own in rows.items() if len(own)]  # fmt: skip
    return found, constant


def thirds(
    result: CorpusResult, units: Units, unsure: np.ndarray, sure: np.ndarray, seed: int = 0, each: int = 6
) -> list[Third]:
    """The drawings in three equal groups (fewer drawings: one each) of rising `unsure` (N,), as `by_decile`."""
    rng = np.random.default_rng(seed + 3)
    right = by_decile(unsure, result.rankings["names"][0].hit(1).numpy(), 3).value
    parts = np.array_split(unsure.argsort(kind="stable"), len(right))
    return [Third(len(rows), float(share), drawings(result, units, sure, pick(rows, each, rng)))
            for rows, share in zip(parts, right)]  # fmt: skip


def drawings(result: CorpusResult, units: Units, sure: np.ndarray, rows: list[int]) -> list[Drawing]:
    """Some drawings, each with its first name."""
    own, (names, named) = drawn(result), result.galleries["names"]
    gallery = Inputs(names, [concept.name for concept in result.corpus.concepts])
    z = result.image.select(rows)
    scores, among = result.score.pairwise(z, names), units.matches(z.trace, len(result.table.texts), of="texts")
    return [Drawing(example(x, torch.from_numpy(named[:, i]), gallery, own.labels[i], top=1, picture=own.picture(i)),
                    float(sure[i]), float(texts)) for x, i, texts in zip(scores, rows, among)]  # fmt: skip
