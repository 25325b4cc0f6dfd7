"""What a model with units does not know: the first section of its page, all from the evaluation's embeddings."""
from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from prolip.data.emoji import LEVELS
from prolip.evaluation.suites.emoji.levels import Expected, by_expected
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
    """A drawing with its first name. texts: how many could be meant; bits: what it says about which one is."""

    example: Example
    texts: float
    bits: float


class Third(NamedTuple):
    """A third of the drawings by trace: how many, the share that get their own name first, some at random."""

    drawings: int
    right: float
    examples: list[Drawing]


class Count(NamedTuple):
    """A text with the number of drawings that it is expected to fit, and that it does fit."""

    label: str
    level: str
    expected: float
    true: int


class Section(NamedTuple):
    """All of it. texts: general ones first; thirds: the surest first; wrong: the surest whose first name is wrong."""

    units: Units
    texts: list[Text]
    thirds: list[Third]
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
    return Section(units, texts(result, units, seed), thirds(result, units, seed), surest_errors(result, units), groups,
                   most, least)  # fmt: skip


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


def thirds(result: CorpusResult, units: Units, seed: int = 0, each: int = 6) -> list[Third]:
    """The drawings in three equal groups by trace (fewer drawings: one each), the surest first."""
    rng = np.random.default_rng(seed + 3)
    right = result.names_ranking[0].hit(1).numpy()
    order = result.uncertainty(result.image).argsort(kind="stable")
    return [
        Third(len(rows), float(right[rows].mean()), drawings(result, units, pick(rows, each, rng)))
        for rows in np.array_split(order, min(3, len(order)))
    ]


def surest_errors(result: CorpusResult, units: Units, count: int = 12) -> list[Drawing]:
    """The drawings of the smallest traces whose first name is wrong."""
    order = result.uncertainty(result.image).argsort(kind="stable")
    wrong = ~result.names_ranking[0].hit(1).numpy()
    return drawings(result, units, order[wrong[order]][:count].tolist())


def drawings(result: CorpusResult, units: Units, rows: list[int]) -> list[Drawing]:
    """Some drawings, each with its first name."""
    trace = result.image.trace[torch.tensor(rows, dtype=torch.long)]
    among = units.matches(trace, len(result.table.texts), of="texts").tolist()
    bits = units.information(trace, of="texts", bits=True).tolist()
    return [Drawing(image_example(result, i, 1), *said) for i, *said in zip(rows, among, bits)]


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
