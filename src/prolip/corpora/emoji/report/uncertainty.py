"""What a model with units does not know: the first section of its page, all from the evaluation's embeddings."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from prolip.corpora.emoji.corpus import LEVELS
from prolip.corpora.emoji.report.examples import Example, Inputs, Shown, amount, both_ends, example, pick, picture, show
from prolip.corpora.emoji.result import CorpusResult
from prolip.corpora.emoji.uncertainty import matches_metrics, signs_against
from prolip.evaluation.metrics.blockwise import Relevance
from prolip.evaluation.metrics.selective import by_decile, spread
from prolip.uncertainty.units import Units, in_words

#: Where the texts of the first examples lie among all that fit a drawing, ordered by expected matches. Most fit one, so
#: equal steps would show five alike.
QUANTILES = (0.5, 0.8, 0.9, 0.97, 0.995)
WEAK = 0.1  # |Spearman| below which no order is claimed
FLAT = 1.02  # ratio of traces below which they count as equal
ALIKE = 0.1  # spread of equally long texts over that of all, below which a trace tells the length alone


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
    return Section(
        units, texts(result, units, expected), thirds(result, units, unsure, sure, seed), *errors(result, expected)
    )


def drawn(result: CorpusResult) -> Inputs:
    """The drawings of the corpus, as the model saw them, by their names."""
    corpus = result.corpus
    return Inputs(
        result.image,
        [corpus.concepts[one.concept].name for one in corpus.drawings],
        lambda row: picture(corpus.drawings[row].image(), lossless=True),
    )


def show_corpus(result: CorpusResult) -> Shown:
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
    shown = np.flatnonzero(result.text_relation.any(1))
    order = shown[expected[shown].argsort(kind="stable")]
    chosen = [int(order[round(quantile * (len(order) - 1))]) for quantile in QUANTILES]
    bits, share = units.information(result.text.trace, bits=True).tolist(), units.share(result.text.trace).tolist()
    scores = result.score.pairwise(result.image, result.text.select(chosen)).mT
    return [
        Text(
            example(
                scores[k],
                torch.from_numpy(result.text_relation[i]),
                drawn(result),
                result.table.texts[i],
                LEVELS[result.table.text_level[i]],
                top,
            ),
            in_words(share[i]),
            float(expected[i]),
            bits[i],
        )
        for k, i in enumerate(chosen)
    ]


def errors(result: CorpusResult, expected: np.ndarray) -> tuple[list[Error], float]:
    """The errors of every level's texts that fit any drawing, and the number that the constant has for all of them."""
    true = result.text_relation.sum(1)
    constant = 2 ** float(np.log2(true[true > 0]).mean())
    rows = {level: np.flatnonzero((result.table.text_level == i) & (true > 0)) for i, level in enumerate(LEVELS)}
    flat = np.full(len(true), constant)

    def off(numbers: np.ndarray, own: np.ndarray) -> tuple[float, float]:
        doublings = np.log2(numbers / true[own])
        return float(doublings.mean()), float(np.abs(doublings).mean())

    found = [
        Error(level, len(own), float(true[own].mean()), off(expected[own], own), off(flat[own], own))
        for level, own in rows.items()
        if len(own)
    ]
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


def drawings(result: CorpusResult, units: Units, sure: np.ndarray, rows: list[int]) -> list[Drawing]:
    """Some drawings, each with its first name."""
    own, (names, named) = drawn(result), result.galleries["names"]
    gallery = Inputs(names, [concept.name for concept in result.corpus.concepts])
    z = result.image.select(rows)
    scores, among = result.score.pairwise(z, names), units.matches(z.trace, len(result.table.texts), of="texts")
    return [
        Drawing(
            example(x, torch.from_numpy(named[:, i]), gallery, own.labels[i], top=1, picture=own.picture(i)),
            float(sure[i]),
            float(texts),
        )
        for x, i, texts in zip(scores, rows, among)
    ]


# --- what the figures of one run say, in a sentence each, written from the numbers and not from what was hoped for ----
def read_all(result: CorpusResult) -> dict[str, str]:
    """A sentence per figure."""
    return {
        "modality": modality(result),
        "levels": levels(result),
        "length": length(result),
        "matches": matches(result),
        "expected": expected(result),
        "verdict": verdict(result),
    }


def verdict(result: CorpusResult) -> str:
    """One sentence on whether the uncertainties can be read as the paper reads them."""
    if result.similarity == "mean":
        return "Drawings and texts were ranked by their means alone: the traces below played no part in it."
    met = [
        order_of_levels(result) == "paper",
        result.metrics["trace/text_over_image"] > FLAT,
        result.metrics["spearman/trace_true_matches"] > WEAK,
    ]
    words = ("none of three", "one of three", "two of three", "all three")[sum(met)]
    ends = {3: "Here they can be read as generality.", 0: "Here a trace must not be read as generality."}
    levels_do, texts_do, matches_do = ("yes" if one else "no" for one in met)
    return (
        f"The traces of this run meet {words} expectations of the paper: general captions more uncertain than specific "
        f"ones ({levels_do}), texts more uncertain than images ({texts_do}), and captions with more true matches more "
        f"uncertain ({matches_do}). {ends.get(sum(met), 'Read them with care.')}"
    )


def order_of_levels(result: CorpusResult) -> str:
    """ "paper" if the mean trace falls from group to name, "reversed" if it rises, "flat" or "mixed" otherwise."""
    means = [result.metrics[f"trace/{level}"] for level in LEVELS]
    if max(means) <= FLAT * min(means):
        return "flat"
    if all(a >= b for a, b in zip(means, means[1:])):
        return "paper"
    return "reversed" if all(a <= b for a, b in zip(means, means[1:])) else "mixed"


def modality(result: CorpusResult) -> str:
    """Texts against images."""
    ratio = result.metrics["trace/text_over_image"]
    if not math.isfinite(ratio) or 1 / FLAT <= ratio <= FLAT:
        return "Here both are about equally uncertain."
    if ratio > 1:
        return f"Here texts are more uncertain than drawings, {ratio:.2g} times on average, as in the paper."
    return f"Here it is the other way round: drawings are {1 / ratio:.2g} times as uncertain as texts on average."


def expected(result: CorpusResult) -> str:
    """Expected against true numbers of drawings; nothing where traces have no unit."""
    units, numbers = result.model_score.units, result.expected_matches
    if units is None or numbers is None:
        return ""
    true = result.text_relation.sum(1)
    found = matches_metrics(numbers, true)
    within, chance, bias = (
        found[f"matches/{key}"] for key in ("within_factor_2", "chance_within_factor_2", "expected_over_true")
    )
    single = (true[true > 0] == 1).mean()
    at = {level: result.text.trace[result.table.text[result.table.rows(level)]] for level in LEVELS}
    inside = result.metrics.get("matches/inside_interval")
    held = "" if inside is None else f" For {inside:.0%} of the texts the thin line covers the true number."
    said = ", ".join(f"a {level} {in_words(float(units.share(trace).median()))}" for level, trace in at.items())
    return (
        f"Here {within:.0%} of the texts lie in the band. As {single:.0%} of them fit a single drawing, one number for "
        f"all could reach {chance:.0%}: the diamonds say more. The expected number is {amount(bias)} times the true "
        f"one on average (geometric mean).{held} What a typical text of each level fits of the drawings: {said}."
    )


def levels(result: CorpusResult) -> str:
    """The order of the four levels."""
    means = {level: result.metrics[f"trace/{level}"] for level in LEVELS}
    ranked = " > ".join(f"{level} {means[level]:.4g}" for level in sorted(means, key=lambda level: -means[level]))
    said = {
        "paper": "This is the order that the paper predicts.",
        "reversed": "This is the reverse of the paper's order: specific captions came out as the uncertain ones.",
        "flat": "The four levels hardly differ, so no order should be read into them.",
        "mixed": "This is neither the paper's order nor its reverse.",
    }
    return f"Here {ranked}. {said[order_of_levels(result)]}"


def length(result: CorpusResult) -> str:
    """Short against long texts, and whether the length is all that a trace tells, which need not be a rising order."""
    rho = result.metrics["spearman/trace_tokens"]
    direction = _direction(rho, "longer", "shorter")
    said = f"Here the rank correlation with the number of tokens is {_signed(rho)}: {direction}."
    trace, lengths = result.uncertainty(result.text), result.token_lengths
    usual = int(np.bincount(lengths).argmax())
    alike, overall = trace[lengths == usual], spread(trace)
    if len(alike) < 20 or not spread(alike) < ALIKE * overall:
        return said
    return (
        f"{said} The middle 90% of the {len(alike):,} texts of {usual} tokens lie within "
        f"{_share(spread(alike))} of their median, of all texts within {_share(overall)}: each length has "
        "a trace of its own, and what a text says hardly changes it."
    )


def matches(result: CorpusResult) -> str:
    """Trace against the number of true matches."""
    rho, within = (result.metrics[f"spearman/trace_true_matches{part}"] for part in ("", "_of_keywords"))
    return (
        f"Here Spearman's correlation is {_signed(rho)} over all texts and {_signed(within)} among the keywords alone: "
        f"{_direction(rho, 'widely applicable', 'rarely applicable')}."
    )


def _direction(rho: float, positive: str, negative: str) -> str:
    if not math.isfinite(rho) or abs(rho) < WEAK:
        return "no clear relation"
    return f"{positive if rho > 0 else negative} texts are the more uncertain ones"


def _signed(value: float) -> str:
    return f"{value:+.2f}" if math.isfinite(value) else "undefined (constant)"


def _share(value: float) -> str:
    """A share of one as percent with two significant digits, however small."""
    return f"{float(f'{100 * value:.1e}'):g}%" if value >= 1e-6 else "less than 0.0001%"
