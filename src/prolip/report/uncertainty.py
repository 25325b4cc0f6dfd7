"""What a model with units does not know: the first section of its page, all from the evaluation's embeddings."""
from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from prolip.data.emoji import LEVELS
from prolip.evaluation.metrics.traces import by_decile
from prolip.evaluation.suites.emoji.levels import Expected, by_expected
from prolip.evaluation.suites.emoji.refusal import signs_against
from prolip.evaluation.suites.emoji.result import CorpusResult
from prolip.report.examples import Example, image_example, pick, text_example
from prolip.uncertainty.units import Units, in_words


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


class Count(NamedTuple):
    """A text with the number of drawings that it is expected to fit, and that it does fit."""

    label: str
    level: str
    expected: float
    true: int


class Said(NamedTuple):
    """Drawings whose first names have a probability in [low, high): how many, its mean, the share that is right."""

    low: float
    high: float
    drawings: int
    sure: float
    right: float


class Section(NamedTuple):
    """All of it. texts: general ones first; thirds: the surest first; said: the least sure first; wrong: the surest
    whose first name is wrong.
    """

    units: Units
    texts: list[Text]
    thirds: list[Third]
    said: list[Said]
    wrong: list[Drawing]
    groups: list[Expected]
    too_many: list[Count]
    too_few: list[Count]


def section(result: CorpusResult, seed: int = 0) -> Section | None:
    """What the page shows; None where the model's traces have no unit."""
    units, expected = result.model_score.units, result.expected_matches
    if units is None or expected is None:
        return None
    groups = by_expected(expected, result.text_relation.sum(1))
    most, least = worst_counts(result, expected)
    against = signs_against(result, result.text.select(result.name_texts), "i2t")
    sure = np.exp(-against["answer"]).clip(max=1.0)
    unsure = against.get("all", against["answer"])
    order = unsure.argsort(kind="stable")
    shown = thirds(result, units, unsure, sure, seed)
    return Section(units, texts(result, units, seed), shown, by_probability(result, sure),
                   surest_errors(result, units, order, sure), groups, most, least)  # fmt: skip


def texts(result: CorpusResult, units: Units, seed: int = 0, steps: int = 6, top: int = 8) -> list[Text]:
    """One text at random from each of `steps` equal steps of bits, of those that fit any drawing; general ones first.

    Deciles of the texts would be nearly all alike: most fit one drawing.
    """
    rng = np.random.default_rng(seed + 2)
    bits = units.information(result.text.trace, bits=True).numpy()
    shown = np.flatnonzero(result.text_relation.any(1))
    edges = np.linspace(bits[shown].min(), bits[shown].max(), steps + 1)
    step = np.digitize(bits[shown], edges[1:-1])
    chosen = [i for k in range(steps) for i in pick(shown[step == k], 1, rng)]
    share = units.share(result.text.trace).tolist()
    return [
        Text(text_example(result, i, LEVELS[result.table.text_level[i]], top), in_words(share[i]),
             share[i] * len(result.corpus.drawings), float(bits[i]))
        for i in chosen
    ]  # fmt: skip


def thirds(
    result: CorpusResult, units: Units, unsure: np.ndarray, sure: np.ndarray, seed: int = 0, each: int = 6
) -> list[Third]:
    """The drawings in three equal groups (fewer drawings: one each) of rising `unsure` (N,), as `by_decile`."""
    rng = np.random.default_rng(seed + 3)
    right = by_decile(unsure, result.rankings["names"][0].hit(1).numpy(), 3).value
    parts = np.array_split(unsure.argsort(kind="stable"), len(right))
    return [Third(len(rows), float(share), drawings(result, units, sure, pick(rows, each, rng)))
            for rows, share in zip(parts, right)]  # fmt: skip


def by_probability(result: CorpusResult, sure: np.ndarray, steps: int = 5) -> list[Said]:
    """The drawings in steps of the probability that their first names have, those steps that have any."""
    right, edges = result.rankings["names"][0].hit(1).numpy(), np.linspace(0, 1, steps + 1)
    step = np.digitize(sure, edges[1:-1])
    parts = [(k, step == k) for k in range(steps) if (step == k).any()]
    return [
        Said(float(edges[k]), float(edges[k + 1]), int(own.sum()), float(sure[own].mean()), float(right[own].mean()))
        for k, own in parts
    ]


def surest_errors(
    result: CorpusResult, units: Units, order: np.ndarray, sure: np.ndarray, count: int = 12
) -> list[Drawing]:
    """The drawings whose first name is wrong, in their order from the surest on."""
    wrong = ~result.rankings["names"][0].hit(1).numpy()
    return drawings(result, units, sure, order[wrong[order]][:count].tolist())


def drawings(result: CorpusResult, units: Units, sure: np.ndarray, rows: list[int]) -> list[Drawing]:
    """Some drawings, each with its first name."""
    trace = result.image.trace[torch.tensor(rows, dtype=torch.long)]
    among = units.matches(trace, len(result.table.texts), of="texts").tolist()
    return [Drawing(image_example(result, i, 1), float(sure[i]), texts) for i, texts in zip(rows, among)]


def worst_counts(result: CorpusResult, expected: np.ndarray, count: int = 6) -> tuple[list[Count], list[Count]]:
    """The texts whose expected number is too large and too small by the largest factors, of those that fit any."""
    true, table = result.text_relation.sum(1), result.table
    shown = np.flatnonzero(true)
    factor = expected[shown] / true[shown]
    ordered = shown[factor.argsort(kind="stable")]
    counts = [Count(table.texts[i], LEVELS[table.text_level[i]], float(expected[i]), int(true[i])) for i in ordered]
    many = [x for x in reversed(counts) if x.expected > x.true]
    few = [x for x in counts if x.expected < x.true]
    return many[:count], few[:count]
