"""What a model with units does not know: the first section of its page, all from the evaluation's embeddings."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from jinja2 import Environment, PackageLoader, StrictUndefined

from prolip.corpora.emoji.corpus import LEVELS
from prolip.corpora.emoji.report.examples import (
    Inputs,
    QueryExample,
    SetExamples,
    amount,
    both_ends,
    example,
    pick,
    show,
)
from prolip.corpora.emoji.result import CorpusResult
from prolip.corpora.emoji.uncertainty import matches_metrics, signs_against
from prolip.evaluation.metrics.selective import by_decile, spread
from prolip.evaluation.metrics.streaming import Relevance
from prolip.uncertainty.units import Units, in_words
from prolip.utils.style import picture

#: Where the texts of the first examples lie among all that fit a drawing, ordered by expected matches. Most fit one, so
#: equal steps would show five alike.
QUANTILES = (0.5, 0.8, 0.9, 0.97, 0.995)
WEAK = 0.1  # |Spearman| below which no order is claimed
FLAT = 1.02  # ratio of traces below which they count as equal


class Text(NamedTuple):
    """A text and its first drawings."""

    example: QueryExample
    share: str  # of the drawings, in words
    expected: float  # number of drawings
    bits: float  # its information


class NamedDrawing(NamedTuple):
    """A drawing and its first name."""

    example: QueryExample
    sure: float  # probability of that name
    texts: float  # how many the drawing may fit


class Third(NamedTuple):
    """A third of the drawings by uncertainty, its share named right, and some at random."""

    drawings: int
    right: float
    examples: list[NamedDrawing]


class CountError(NamedTuple):
    """Errors of a level's expected numbers in doublings (log2): their mean with sign, and without."""

    level: str
    texts: int
    true: float  # mean true number
    model: tuple[float, float]
    constant: tuple[float, float]  # of the best constant


class Section(NamedTuple):
    """What the first section of the page shows."""

    units: Units
    texts: list[Text]  # specific ones first
    thirds: list[Third]  # the surest first
    errors: list[CountError]
    constant: float  # the number for all texts in `errors`


def section(result: CorpusResult, seed: int = 0) -> Section | None:
    """What the page shows; None where the model's traces have no unit."""
    units, expected = result.model_score.units, result.expected_matches
    if units is None or expected is None:
        return None
    against = signs_against(result, "names", "i2t")
    sure = np.exp(-against["answer"]).clip(max=1.0)
    found = thirds(result, units, against.get("all", against["answer"]), sure, seed)
    return Section(units, texts(result, units, expected), found, *errors(result, expected))


def drawn(result: CorpusResult) -> Inputs:
    """The drawings of the corpus, as the model saw them, by their names."""
    shown = result.corpus.drawings
    names = [result.corpus.concepts[one.concept].name for one in shown]
    return Inputs(result.image, names, lambda row: picture(shown[row].image(), lossless=True))


def show_corpus(result: CorpusResult) -> SetExamples:
    """Drawings and all texts, as any other test set."""
    own, texts = result.model_score if result.probabilistic else None, Inputs(result.text, result.table.texts)
    relevance = Relevance.from_dense(torch.from_numpy(result.text_relation.T))
    shown, nats = show(drawn(result), texts, relevance, result.score, own), result.read.get("ambiguity")
    if nats is not None and not np.isnan(nats).any():
        ends = both_ends(drawn(result), torch.from_numpy(nats), [f"{x:.1f} nats" for x in nats])
        shown.ends.append(("image", "their ambiguity", *ends))
    return shown


def texts(result: CorpusResult, units: Units, expected: np.ndarray, top: int = 8) -> list[Text]:
    """The texts at QUANTILES of the expected matches, of those that fit any drawing, with the drawings found first."""
    relation, own, table = torch.from_numpy(result.text_relation), drawn(result), result.table
    shown = np.flatnonzero(relation.any(1))
    order = shown[expected[shown].argsort(kind="stable")]
    bits, share = units.information(result.text.trace, bits=True).tolist(), units.share(result.text.trace).tolist()
    found = []
    for i in (int(order[round(quantile * (len(order) - 1))]) for quantile in QUANTILES):
        (scores,) = result.score.pairwise(result.image, result.text.select([i])).mT
        said = example(scores, relation[i], own, table.texts[i], "", LEVELS[table.text_level[i]], top)
        found.append(Text(said, in_words(share[i]), float(expected[i]), bits[i]))
    return found


def errors(result: CorpusResult, expected: np.ndarray) -> tuple[list[CountError], float]:
    """The errors of every level's texts that fit any drawing, and the number that the constant has for all of them."""
    true, found = result.text_relation.sum(1), []
    constant = 2 ** float(np.log2(true[true > 0]).mean())
    for i, level in enumerate(LEVELS):
        if len(own := np.flatnonzero((result.table.text_level == i) & (true > 0))):
            off = (np.log2(numbers / true[own]) for numbers in (expected[own], constant))
            model, flat = ((float(x.mean()), float(np.abs(x).mean())) for x in off)
            found.append(CountError(level, len(own), float(true[own].mean()), model, flat))
    return found, constant


def thirds(
    result: CorpusResult, units: Units, unsure: np.ndarray, sure: np.ndarray, seed: int = 0, each: int = 6
) -> list[Third]:
    """The drawings in three equal groups (fewer drawings: one each) of rising `unsure` (N,), as `by_decile`."""
    rng = np.random.default_rng(seed + 3)
    right = by_decile(unsure, result.rankings["names"][0].hit(1).numpy(), 3).value
    parts = np.array_split(unsure.argsort(kind="stable"), len(right))
    return [
        Third(len(rows), float(share), drawings(result, units, sure, pick(rows, each, rng)))
        for rows, share in zip(parts, right)
    ]


def drawings(result: CorpusResult, units: Units, sure: np.ndarray, rows: list[int]) -> list[NamedDrawing]:
    """Some drawings, each with its first name."""
    own, (names, named) = drawn(result), result.galleries["names"]
    gallery = Inputs(names, [concept.name for concept in result.corpus.concepts])
    z = result.image.select(rows)
    scores, fits = result.score.pairwise(z, names), units.matches(z.trace, len(result.table.texts), of="texts").tolist()
    found = (
        example(x, torch.from_numpy(named[:, i]), gallery, own.labels[i], own.picture(i), top=1)
        for x, i in zip(scores, rows)
    )
    return [NamedDrawing(said, float(sure[i]), number) for said, i, number in zip(found, rows, fits)]


# --- what the figures of one run say ---------------------------------------------------------------------------------
def read_all(result: CorpusResult) -> dict[str, str]:
    """The sentences of the figures by name, as `readings.txt.j2` writes them from the numbers."""
    environment = Environment(
        loader=PackageLoader("prolip.corpora.emoji.report", "."), undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters["amount"] = amount
    said = environment.get_template("readings.txt.j2").make_module(numbers(result))
    names = ("modality", "levels", "length", "matches", "expected", "verdict")
    return {name: " ".join(getattr(said, name)().split()) for name in names}


def numbers(result: CorpusResult) -> dict[str, Any]:
    """The numbers that the sentences are written from."""
    m, table, units, expected = result.metrics, result.table, result.model_score.units, result.expected_matches
    trace, lengths = result.uncertainty(result.text), result.token_lengths
    usual = int(np.bincount(lengths).argmax())
    alike, true = trace[lengths == usual], result.text_relation.sum(1)
    means = sorted(((level, m[f"trace/{level}"]) for level in LEVELS), key=lambda pair: -pair[1])
    out: dict[str, Any] = {"m": m, "means": means, "order": order_of_levels(result), "similarity": result.similarity}
    out |= {"flat": FLAT, "weak": WEAK, "alike": len(alike), "usual": usual, "typical": ()}
    out |= {"spread": spread(alike), "overall": spread(trace)}
    if units is not None and expected is not None:
        shares = (float(units.share(result.text.trace[table.text[table.rows(level)]].median())) for level in LEVELS)
        out |= {"typical": list(zip(LEVELS, map(in_words, shares))), "found": matches_metrics(expected, true)}
        out["single"] = (true[true > 0] == 1).mean()
    return out


def order_of_levels(result: CorpusResult) -> str:
    """ "paper" if the mean trace falls from group to name, "reversed" if it rises, "flat" or "mixed" otherwise."""
    means = [result.metrics[f"trace/{level}"] for level in LEVELS]
    if max(means) <= FLAT * min(means):
        return "flat"
    orders = {"paper": sorted(means, reverse=True), "reversed": sorted(means)}
    return next((name for name, order in orders.items() if order == means), "mixed")
